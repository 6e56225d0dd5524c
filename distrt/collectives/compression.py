"""Wire compression of float32 to half types, with error feedback (layer 3).

May import: kernels, arrays, reduce_op, errors. Off unless a program makes a
``Compressor``. Touches no transport: it is given the verbs.

An all_reduce is an all_to_all of halves, a sum in float32 at the rank that owns the
chunk, and an all_gather of halves: (n - 1) / n of the array's 2 bytes an element leave a
rank twice, half of what float32 takes. A ring of halves would not do: its partial sums
travel as float32. Both roundings are fed back: what is rounded away in one step is added
in the next, so the sum of all results keeps up with the sum of all that went in.
Source: Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", 2014; Karimireddy et al., "Error
feedback fixes SignSGD and other gradient compression schemes", 2019; and for the second
rounding Tang et al., "DoubleSqueeze", 2019.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import ml_dtypes
import numpy as np

from distrt.arrays import array_namespace, dtype_of, is_array, is_cupy
from distrt.errors import DTypeError, InvalidArgumentError
from distrt.kernels import kernels_for
from distrt.reduce_op import ReduceOp

__all__ = ["Compressor", "Verbs"]

_HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_FLOAT32 = np.dtype(np.float32)
_BLOCK = 1 << 15  # elements: the four arrays of a block take 448 KiB


class Verbs(Protocol):
    """What an all_reduce is made of: a Communicator, or what stands for one."""

    size: int

    def refusing(self, call: str) -> AbstractContextManager[None]:
        """Tell all ranks of an exception inside."""

    def empty(self, like: Any, count: int, dtype: Any) -> Any:
        """Return [count] of ``dtype`` in the memory of ``like``."""

    def all_to_all(self, value: Any, *, out: Any) -> Any:
        """Send the r-th of ``size`` equal parts to rank r; ``out`` gets what came."""

    def all_gather(self, value: Any, *, out: Any) -> Any:
        """Join all ranks' equally long values in ``out``."""


@final
class Compressor:
    """Rounds float32 arrays to a half type and remembers what was lost. One for each rank.

    Args:
      dtype: bfloat16 (float32's range, 8 bits of precision) or float16 (11 bits, up to 65504).

    Attributes:
      dtype: the half type.
      residuals: key -> float32 array: what the key's next array gets on top; under (key,
        "sum") that of the sums that this rank sends out. A checkpoint that must go on to
        the same bits has to keep every rank's.

    Raises:
      DTypeError: another dtype.
    """

    def __init__(self, dtype: Any = ml_dtypes.bfloat16) -> None:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        if name not in _HALVES:
            raise DTypeError(f"compression: expected {' or '.join(_HALVES)}, got {dtype!r}")
        self.dtype = _HALVES[name]
        self.residuals: dict[Hashable, Any] = {}

    def all_reduce(
        self,
        verbs: Verbs,
        key: Hashable,
        flat: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
    ) -> Any:
        """Combine the ranks' ``flat``, sent as halves. All ranks must call; all get the same bits.

        A rank alone sends nothing, and rounds nothing.

        Args:
          verbs: the communicator.
          key: what the array is, such as its bucket's number; every key has its residuals.
          flat: [n] of float32, as in ``compress``; n is equal on all ranks.
          op: SUM or MEAN.
          out: [n] of float32, contiguous, that receives the result; may be ``flat``.

        Returns:
          [n] of float32; ``out`` where it was given.

        Raises:
          CollectiveMismatchError: on every rank, where keys, ops or lengths differ, or a rank's
            arguments are refused, as by ``compress`` and ``decompress``, or for another op.
        """
        with verbs.refusing("all_reduce, compressed"):
            op = self._checked(key, flat, op, out)
        if out is None:
            out = array_namespace(flat).empty_like(flat)
        n, size = flat.shape[0], verbs.size
        if size == 1:
            out[...] = flat
            return out
        # Equal parts, the last ones filled up with zeros.
        part = -(-n // size)
        sent, come = (verbs.empty(flat, part * size, self.dtype) for _ in range(2))
        self.compress(key, flat, sent[:n])
        sent[n:] = 0
        # As the key of a dict, what must be equal on all ranks gets into the fingerprint.
        call = f"all_reduce op={op.value} of {_text(flat)} under {key!r}"
        verbs.all_to_all({call: sent}, out={call: come})
        mine = self.compress((key, "sum"), self._sum(come.reshape(size, part), op))
        verbs.all_gather(mine, out=come)
        return self.decompress(come[:n], out)

    def _checked(self, key: Hashable, flat: Any, op: ReduceOp | str, out: Any) -> ReduceOp:
        parsed = ReduceOp.parse(op)
        if parsed not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise InvalidArgumentError(f"compression: expected SUM or MEAN, got {parsed.value}")
        _check("compress", flat, _FLOAT32)
        self._residual(key, flat)
        if out is not None:
            _check_out(out, flat.shape[0], is_cupy(flat))
        return parsed

    def _sum(self, parts: Any, op: ReduceOp) -> Any:
        """Add the ranks' halves in float32, in rank order."""
        kernels, row = kernels_for(parts), dtype_of(parts)
        total = kernels.empty(parts.shape[1], _FLOAT32)
        kernels.widen(row, total, parts[0])
        for part in parts[1:]:
            kernels.fold(op, row, total, total, part)
        if op.divides:
            total /= np.float32(parts.shape[0])
        return total

    def compress(self, key: Hashable, flat: Any, out: Any = None) -> Any:
        """Return ``flat`` plus the residual of ``key``, rounded to nearest even. Not collective.

        Keeps what was rounded away as the new residual. Elements that come out infinite or
        NaN (also finite ones beyond the half type's range) are sent so, because a loss
        scaler wants to see them, and leave no residual.

        Args:
          key: what the array is.
          flat: [n] of float32, of the same n and in the same memory at every call with this key.
          out: [n] of the half type, contiguous, that receives the result.

        Returns:
          [n] of the half type; ``out`` where it was given. ``flat`` is not changed.

        Raises:
          DTypeError, InvalidArgumentError: another dtype or shape than the key's.
        """
        _check("compress", flat, _FLOAT32)
        n, kernels = flat.shape[0], kernels_for(flat)
        residual = self._residual(key, flat)
        if residual is None:
            residual = self.residuals[key] = kernels.empty(n, _FLOAT32)
            residual[...] = 0
        half = kernels.empty(n, self.dtype) if out is None else out
        half[...] = 0
        # A host goes through long arrays block by block, so that all steps but the first find
        # the block in the cache.
        block = max(1, n) if is_cupy(flat) else _BLOCK
        sent = kernels.empty(min(n, block), _FLOAT32)
        # What overflows, and inf - inf, is expected here: see what _round stores.
        with np.errstate(all="ignore"):
            for start in range(0, n, block):
                part = slice(start, min(start + block, n))
                _round(flat[part], residual[part], half[part], sent[: part.stop - start])
        return half

    def _residual(self, key: Hashable, flat: Any) -> Any:
        residual = self.residuals.get(key)
        if residual is not None and (
            residual.shape != flat.shape or is_cupy(residual) != is_cupy(flat)
        ):
            raise InvalidArgumentError(
                f"compress: expected {_text(residual)} under key {key!r}, as before, got "
                f"{_text(flat)}: take another key, or call forget({key!r}) first"
            )
        return residual

    def decompress(self, half: Any, out: Any) -> Any:
        """Widen ``half``, [n] of the half type, into ``out``, [n] of float32; return ``out``.

        Both are contiguous.

        Raises:
          DTypeError, InvalidArgumentError: other dtypes, or shapes that differ.
        """
        _check("decompress", half, self.dtype)
        _check_out(out, half.shape[0], is_cupy(half))
        kernels_for(half).widen(dtype_of(half), out, half)
        return out

    def forget(self, key: Hashable) -> None:
        """Drop the residuals of ``key``, if it has some."""
        self.residuals.pop(key, None)
        self.residuals.pop((key, "sum"), None)


def _round(flat: Any, residual: Any, half: Any, sent: Any) -> None:
    """Round ``flat + residual`` into ``half``, which is zero; keep the rest in ``residual``."""
    xp, kernels, row = array_namespace(flat), kernels_for(flat), dtype_of(half)
    residual += flat
    kernels.finish(ReduceOp.SUM, row, half, residual, half)
    kernels.widen(row, sent, half)
    # Exact: a multiple of the last place of the sum, and not larger than it.
    residual -= sent
    xp.copyto(residual, np.float32(0), where=~xp.isfinite(sent))


def _text(array: Any) -> str:
    return f"float32{list(array.shape)}{' on the GPU' if is_cupy(array) else ''}"


def _check(what: str, array: Any, dtype: np.dtype) -> None:
    if not is_array(array) or array.dtype != dtype:
        got = getattr(array, "dtype", type(array).__name__)
        raise DTypeError(f"{what}: expected a NumPy or CuPy array of {dtype}, got {got}")
    if array.ndim != 1:
        raise InvalidArgumentError(f"{what}: expected a flat array, got shape {array.shape}")


def _check_out(out: Any, count: int, gpu: bool) -> None:
    _check("decompress: out", out, _FLOAT32)
    if out.shape[0] != count or not out.flags.c_contiguous or is_cupy(out) != gpu:
        raise InvalidArgumentError(
            f"decompress: expected a contiguous out of {count} elements "
            f"{'on the GPU' if gpu else 'on the host'}, got {_text(out)} of strides {out.strides}"
        )
