"""``HostKernels``: the compiled kernels for NumPy arrays (layer 2: kernels).

May import: errors, reduce_op, arrays, kernels.base and the extension
``distrt._host`` (csrc/host), which picks the widest instruction set of the
processor by itself.
"""

from __future__ import annotations

from typing import final

import numpy as np

from distrt import _host
from distrt.arrays import DType, dtype_of
from distrt.kernels.base import HostMemory, accumulator, agrees, kernel_name
from distrt.reduce_op import ReduceOp

__all__ = ["HostKernels"]

# The extension takes a kernel by its index; names are looked up here.
_INDEX = {name: index for index, name in enumerate(_host.names())}


@final
class HostKernels(HostMemory):
    """The kernels of csrc/host. Large counts run without the GIL."""

    def fold(
        self, op: ReduceOp, dtype: DType, out: np.ndarray, partial: np.ndarray, local: np.ndarray
    ) -> None:
        """Write ``op(partial, local)`` to ``out``."""
        n, acc = local.size, accumulator(dtype).numpy
        assert agrees(n, out=(out, acc), partial=(partial, acc), local=(local, dtype.numpy))
        _host.fold(
            _INDEX[kernel_name("fold", dtype, op)],
            out.ctypes.data,
            partial.ctypes.data,
            local.ctypes.data,
            n,
        )

    def finish(
        self,
        op: ReduceOp,
        dtype: DType,
        out: np.ndarray,
        partial: np.ndarray,
        local: np.ndarray,
        divisor: float = 1.0,
    ) -> None:
        """Write ``op(partial, local) / divisor`` to ``out``, rounded once."""
        n, acc, own = local.size, accumulator(dtype).numpy, dtype.numpy
        assert agrees(n, out=(out, own), partial=(partial, acc), local=(local, own))
        assert divisor == 1 or acc.kind == "f", f"{own} is not divided, got {divisor}"
        _host.finish(
            _INDEX[kernel_name("finish", dtype, op)],
            out.ctypes.data,
            partial.ctypes.data,
            local.ctypes.data,
            n,
            divisor,
        )

    def widen(self, dtype: DType, out: np.ndarray, local: np.ndarray) -> None:
        """Copy ``local`` to ``out`` in the accumulator dtype."""
        n, acc = local.size, accumulator(dtype).numpy
        assert agrees(n, out=(out, acc), local=(local, dtype.numpy))
        if acc == dtype.numpy:
            np.copyto(out, local)
        else:
            index = _INDEX[kernel_name("widen", dtype)]
            _host.widen(index, out.ctypes.data, local.ctypes.data, n)

    def sgd(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        velocity: np.ndarray | None,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Do one step of gradient descent, in place."""
        n, own = param.size, param.dtype
        kept = param if velocity is None else velocity
        assert agrees(n, param=(param, own), grad=(grad, own), velocity=(kept, own))
        _host.sgd(
            _INDEX[kernel_name("sgd", dtype_of(param))],
            param.ctypes.data,
            grad.ctypes.data,
            0 if velocity is None else velocity.ctypes.data,
            n,
            lr,
            momentum,
            nesterov,
        )

    def adam(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        m: np.ndarray,
        v: np.ndarray,
        *,
        alpha: float,
        beta1: float,
        beta2: float,
        epsilon: float,
    ) -> None:
        """Do one step of Adam, in place."""
        n, own = param.size, param.dtype
        assert agrees(n, param=(param, own), grad=(grad, own), m=(m, own), v=(v, own))
        _host.adam(
            _INDEX[kernel_name("adam", dtype_of(param))],
            param.ctypes.data,
            grad.ctypes.data,
            m.ctypes.data,
            v.ctypes.data,
            n,
            alpha,
            beta1,
            beta2,
            epsilon,
        )
