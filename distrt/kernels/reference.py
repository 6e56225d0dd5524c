"""``ReferenceKernels``: the kernels in NumPy, which the others are compared with (layer 2).

May import: errors, reduce_op, arrays, kernels.base. It says what each kernel
computes, in few lines and without regard to speed; the tests demand ``==``.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from distrt.arrays import DType, dtype_of
from distrt.kernels.base import HostMemory, accumulator
from distrt.reduce_op import ReduceOp

__all__ = ["ReferenceKernels"]

# np.minimum and np.maximum give NaN where either operand is NaN.
_UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@final
class ReferenceKernels(HostMemory):
    """The kernels in NumPy, on host memory."""

    def fold(
        self, op: ReduceOp, dtype: DType, out: np.ndarray, partial: np.ndarray, local: np.ndarray
    ) -> None:
        """Write ``op(partial, local)`` to ``out``."""
        with np.errstate(all="ignore"):
            out[...] = _UFUNCS[op.fold](partial, local.astype(accumulator(dtype).numpy))

    def finish(
        self,
        op: ReduceOp,
        dtype: DType,
        out: np.ndarray,
        partial: np.ndarray,
        local: np.ndarray,
        divisor: float = 1.0,
    ) -> None:
        """Write ``op(partial, local) / divisor`` to ``out``."""
        total = np.empty_like(partial)
        self.fold(op, dtype, total, partial, local)
        with np.errstate(all="ignore"):
            if divisor != 1:
                assert total.dtype.kind == "f", f"{total.dtype} is not divided, got {divisor}"
                total /= total.dtype.type(divisor)
            out[...] = total.astype(out.dtype)

    def widen(self, dtype: DType, out: np.ndarray, local: np.ndarray) -> None:
        """Copy ``local`` to ``out`` in the accumulator dtype."""
        out[...] = local.astype(out.dtype)

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
        """Do one step of gradient descent."""
        real: Any = accumulator(dtype_of(param)).numpy.type
        with np.errstate(all="ignore"):
            step = grad.astype(real) * real(lr)
            if velocity is None:
                param[...] = (param.astype(real) - step).astype(param.dtype)
                return
            v = real(momentum) * velocity.astype(real) - step
            move = real(momentum) * v - step if nesterov else v
            param[...] = (param.astype(real) + move).astype(param.dtype)
            velocity[...] = v.astype(param.dtype)

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
        """Do one step of Adam."""
        real: Any = accumulator(dtype_of(param)).numpy.type
        g, w, m_old, v_old = (array.astype(real) for array in (grad, param, m, v))
        with np.errstate(all="ignore"):
            m_new = m_old + (g - m_old) * real(1 - beta1)
            v_new = v_old + (g * g - v_old) * real(1 - beta2)
            w = w - (m_new * real(alpha)) / (np.sqrt(v_new) + real(epsilon))
            m[...] = m_new.astype(m.dtype)
            v[...] = v_new.astype(v.dtype)
            param[...] = w.astype(param.dtype)
