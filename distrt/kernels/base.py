"""``Kernels``: arithmetic and staging for one kind of memory (layer 2: kernels).

May import: errors, reduce_op, arrays. The verb above has checked its arguments;
from here down only invariants are asserted.

All arrays are one-dimensional and contiguous, in the memory of the object.
Boolean and complex arrays come viewed as the row that does their arithmetic:

    row = DTYPES[dtype_of(array).kernel]      # bool -> u8, c64 -> f32
    flat = array.reshape(-1).view(row.numpy)
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from distrt.arrays import DTYPES, DType
from distrt.reduce_op import ReduceOp

__all__ = ["HostMemory", "Kernels", "accumulator", "agrees", "kernel_name", "kernel_names"]

_FOLDS = ("sum", "prod", "min", "max")


def accumulator(dtype: DType) -> DType:
    """Return the row in which partial results of ``dtype`` travel (f32 for half types)."""
    return DTYPES[dtype.accumulator]


def kernel_name(verb: str, dtype: DType, op: ReduceOp | None = None) -> str:
    """Return the exported name of a kernel, such as ``distrt_fold_sum_f32``.

    Args:
      verb: "fold", "finish", "widen", "sgd" or "adam".
      dtype: the row of the elements.
      op: the reduction, for "fold" and "finish"; MEAN uses SUM's kernels.
    """
    assert dtype.kernel == dtype.name, f"view the {dtype.name} arrays as {dtype.kernel} first"
    return f"distrt_{verb}_{dtype.name}" if op is None else f"distrt_{verb}_{op.fold}_{dtype.name}"


def kernel_names() -> tuple[str, ...]:
    """Return the names that the dtype table asks for, in the order of csrc's table.h."""
    rows = [row for row in DTYPES.values() if row.kernel == row.name]
    halves = [row for row in rows if row.accumulator != row.name]
    floats = [row for row in rows if row.accumulator in ("f32", "f64")]
    return (
        *(f"distrt_{v}_{op}_{r.name}" for v in ("fold", "finish") for r in rows for op in _FOLDS),
        *(f"distrt_widen_{row.name}" for row in halves),
        *(f"distrt_{verb}_{row.name}" for verb in ("sgd", "adam") for row in floats),
    )


class Kernels(abc.ABC):
    """The arithmetic and the staging buffers for arrays of one kind of memory.

    ``out`` may be ``partial``, or ``local`` where the dtypes agree; arrays never
    overlap in another way. GPU kernels run on the caller's current stream.
    """

    @abc.abstractmethod
    def fold(self, op: ReduceOp, dtype: DType, out: Any, partial: Any, local: Any) -> None:
        """Write ``op(partial, local)`` to ``out``, without rounding half types.

        Args:
          op: the reduction; MEAN folds as SUM.
          dtype: the row of ``local``.
          out: [n] of the accumulator dtype.
          partial: [n] of the accumulator dtype: the result so far.
          local: [n] of ``dtype``: this rank's own elements.
        """

    @abc.abstractmethod
    def finish(
        self,
        op: ReduceOp,
        dtype: DType,
        out: Any,
        partial: Any,
        local: Any,
        divisor: float = 1.0,
    ) -> None:
        """Write ``op(partial, local) / divisor`` to ``out``, rounded once: the last fold.

        The division is a true one in the accumulator's precision, so where the
        sum is exact the mean is correctly rounded.

        Args:
          op: the reduction; MEAN folds as SUM, and the caller passes the divisor.
          dtype: the row of ``local`` and ``out``.
          out: [n] of ``dtype``.
          partial: [n] of the accumulator dtype.
          local: [n] of ``dtype``.
          divisor: 1 for integers.
        """

    @abc.abstractmethod
    def widen(self, dtype: DType, out: Any, local: Any) -> None:
        """Copy ``local``, [n] of ``dtype``, to ``out``, [n] of the accumulator dtype."""

    @abc.abstractmethod
    def sgd(
        self,
        param: Any,
        grad: Any,
        velocity: Any | None,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Do one step of gradient descent, in place. Source: keras.optimizers.SGD.

        Without a velocity ``param -= grad * lr``. With one, ``velocity = momentum *
        velocity - grad * lr``, then ``param += velocity``, or with ``nesterov``
        ``param += momentum * velocity - grad * lr``. Half types are computed in
        float32 and rounded where they are stored.

        Args:
          param: [n] of a real dtype.
          grad: [n], same dtype.
          velocity: [n], same dtype, or None.
          lr: the learning rate.
          momentum: the share of the velocity that is kept; unused without one.
          nesterov: whether to look ahead by one step.
        """

    @abc.abstractmethod
    def adam(
        self,
        param: Any,
        grad: Any,
        m: Any,
        v: Any,
        *,
        alpha: float,
        beta1: float,
        beta2: float,
        epsilon: float,
    ) -> None:
        """Do one step of Adam, in place. Source: keras.optimizers.Adam.

        ``m += (grad - m) * (1 - beta1)``, ``v += (grad * grad - v) * (1 - beta2)``,
        ``param -= m * alpha / (sqrt(v) + epsilon)``. Half types as in ``sgd``.

        Args:
          param: [n] of a real dtype.
          grad: [n], same dtype.
          m: [n], same dtype: the mean of the gradients.
          v: [n], same dtype: the mean of their squares.
          alpha: ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)``, in float64.
          beta1: the decay of ``m``.
          beta2: the decay of ``v``.
          epsilon: keeps the divisor from zero.
        """

    @abc.abstractmethod
    def empty(self, count: int, dtype: np.dtype) -> Any:
        """Return an uninitialised array of ``count`` elements in this memory."""

    @abc.abstractmethod
    def stage_out(self, view: Any) -> np.ndarray:
        """Return uint8 on the host that holds the bytes of ``view``, ready to be sent.

        Host memory gives its own bytes. A GPU gives a pinned buffer, after the
        work queued on the current stream and the copy are done.
        """

    @abc.abstractmethod
    def landing(self, view: Any) -> np.ndarray:
        """Return uint8 on the host into which the bytes for ``view`` are to be received."""

    @abc.abstractmethod
    def land(self, view: Any, buffer: np.ndarray) -> None:
        """Put the bytes that arrived in ``buffer``, from ``landing(view)``, into ``view``.

        ``buffer`` may be used again as soon as this returns.
        """


class HostMemory(Kernels):
    """The staging of host memory: there is none, messages use the array itself."""

    def empty(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised NumPy array of ``count`` elements."""
        return np.empty(count, dtype)

    def stage_out(self, view: np.ndarray) -> np.ndarray:
        """Return the bytes of ``view`` itself."""
        return view.view(np.uint8)

    def landing(self, view: np.ndarray) -> np.ndarray:
        """Return the bytes of ``view`` itself."""
        return view.view(np.uint8)

    def land(self, view: np.ndarray, buffer: np.ndarray) -> None:
        """Do nothing: the bytes were received in place."""
        del view, buffer


def agrees(count: int, **arrays: tuple[Any, np.dtype]) -> bool:
    """Tell whether all arrays are [count], contiguous, aligned and of their dtype.

    Called in an assert, so the message names the array that is wrong.
    """
    for name, (array, dtype) in arrays.items():
        assert array.shape == (count,) and array.dtype == dtype, (
            f"{name}: expected [{count}] of {dtype}, got {array.shape} of {array.dtype}"
        )
        flags = array.flags
        assert flags.c_contiguous, f"{name} is not contiguous: strides {array.strides}"
        # CuPy has no such flag: the elements of its arrays always are aligned.
        assert getattr(flags, "aligned", True), f"{name} starts inside an element"
    return True
