"""Rows of a large array and where they belong: sparse gradients (layer 3).

May import: arrays, reduce_op, errors. Touches no transport: an all_reduce of slices is
an all_gather, which it is given. Indices are never reduced. Source: tf.IndexedSlices,
and how tf.distribute reduces it (the ranks' rows one behind the other in rank order,
duplicates kept).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import numpy as np

from distrt.arrays import (
    DTYPES,
    array_namespace,
    as_array,
    dtype_of,
    is_cupy,
    mean_dtype,
)
from distrt.errors import DTypeError, InvalidArgumentError
from distrt.reduce_op import ReduceOp

__all__ = ["IndexedSlices", "Verbs", "all_reduce"]


class Verbs(Protocol):
    """What an all_reduce is made of: a Communicator, or what stands for one."""

    size: int

    def refusing(self, call: str) -> AbstractContextManager[None]:
        """Tell all ranks of an exception inside."""

    def all_gather(self, value: Any) -> Any:
        """Join the rows of all ranks' arrays, of a structure, in rank order."""


@final
class IndexedSlices:
    """``values[i]`` belongs to row ``indices[i]`` of an array of shape ``dense_shape``.

    Rows may repeat; they then add up. Source: tf.IndexedSlices.

    Args:
      values: [m, ...], any m from 0; a NumPy or CuPy array, or what becomes one.
      indices: [m] of int32 or int64, in the same kind of memory.
      dense_shape: the shape of the whole, or None where nobody asks for it.

    Raises:
      InvalidArgumentError: shapes that do not belong together.
      DTypeError: the indices are no int32 or int64, or the values no numbers.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | Any = None) -> None:
        self.values = as_array(values)
        self.indices = as_array(indices)
        if isinstance(indices, list | tuple) and not indices:
            self.indices = self.indices.astype(np.int32)  # [] has no type of its own
        self.dense_shape: tuple[int, ...] | None = None
        if dense_shape is not None:
            self.dense_shape = tuple(operator.index(length) for length in dense_shape)
        dtype_of(self.values)
        if self.indices.dtype not in (np.int32, np.int64):
            raise DTypeError(
                f"IndexedSlices: expected indices of int32 or int64, got {self.indices.dtype}"
            )
        if is_cupy(self.values) != is_cupy(self.indices):
            raise InvalidArgumentError(
                "IndexedSlices: values and indices are not both on the host or both on the GPU: "
                "move one of them"
            )
        self._check_shapes()

    def _check_shapes(self) -> None:
        rows, indices, dense = self.values.shape, self.indices.shape, self.dense_shape
        if not rows or len(indices) != 1 or rows[0] != indices[0]:
            raise InvalidArgumentError(
                "IndexedSlices: expected values of shape [m, ...] and indices of shape [m], got "
                f"{list(rows)} and {list(indices)}"
            )
        if dense is not None and (len(dense) != len(rows) or dense[1:] != rows[1:]):
            raise InvalidArgumentError(
                f"IndexedSlices: expected a dense_shape of {['any', *rows[1:]]} for values of "
                f"shape {list(rows)}, got {list(dense)}"
            )

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        dtype: np.dtype = np.dtype(self.values.dtype)
        return dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the whole; its first number is None where it is not known."""
        return self.dense_shape or (None, *self.values.shape[1:])

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape})"
        )

    def coalesced(self) -> IndexedSlices:
        """Return the same with each index once, in ascending order.

        The rows of an index are added in the order in which they stand here, two by two,
        then the sums two by two, and so on: one order, whatever the memory. Half types
        are added in float32 and rounded once.

        Raises:
          DTypeError: the values are booleans, which do not add up.
        """
        row = dtype_of(self.values, ReduceOp.SUM)
        xp = array_namespace(self.values)
        order = xp.argsort(self.indices, stable=True)
        indices = self.indices[order]
        sums = self.values[order]
        if row.accumulator != row.kernel:
            sums = sums.astype(DTYPES[row.accumulator].numpy)
        first = xp.ones(indices.shape, dtype=bool)
        first[1:] = indices[1:] != indices[:-1]
        # Places within the rows of an index: 0, 1, 2, ... Each round adds the rows at
        # odd places to the ones before them and halves the places of what is left.
        starts = xp.nonzero(first)[0]
        places = xp.arange(indices.shape[0]) - starts[first.cumsum() - 1]
        # What goes beyond a type becomes infinite, as it does in the kernels.
        with np.errstate(all="ignore"):
            while places.shape[0] > starts.shape[0]:
                odd = xp.nonzero(places % 2 == 1)[0]
                sums[odd - 1] += sums[odd]
                kept = places % 2 == 0
                sums, places = sums[kept], places[kept] // 2
            values = sums.astype(row.numpy)
        return IndexedSlices(values, indices[starts], self.dense_shape)

    def to_dense(self) -> Any:
        """Return the whole: an array of ``dense_shape``, zero where no row belongs.

        Raises:
          InvalidArgumentError: ``dense_shape`` is None, or an index lies outside of it.
        """
        if self.dense_shape is None:
            raise InvalidArgumentError(
                "IndexedSlices without a dense_shape cannot become dense: give it one"
            )
        slices = self.coalesced()
        indices, rows = slices.indices, self.dense_shape[0]
        if indices.shape[0] and not 0 <= int(indices[0]) <= int(indices[-1]) < rows:
            wrong = int(indices[0]) if int(indices[0]) < 0 else int(indices[-1])
            raise InvalidArgumentError(f"IndexedSlices: index {wrong} is not one of {rows} rows")
        xp = array_namespace(self.values)
        dense = xp.zeros(self.dense_shape, dtype=self.values.dtype)
        dense[indices] = slices.values
        return dense


def all_reduce(
    verbs: Verbs, slices: IndexedSlices, op: ReduceOp | str = ReduceOp.SUM
) -> IndexedSlices:
    """Combine the ranks' slices; every rank gets the result. All ranks must call.

    Args:
      verbs: the communicator.
      slices: any number of rows on each rank; equal types, row shapes and ``dense_shape``.
      op: SUM keeps the values as they are, MEAN divides them by the number of ranks.

    Returns:
      All ranks' rows in rank order, duplicates kept: see ``IndexedSlices.coalesced``.

    Raises:
      CollectiveMismatchError: on every rank, where the ranks' slices or ops do not fit
        together, or a rank has another op or values that do not add up.

    Source: tf.distribute.ReplicaContext.all_reduce.
    """
    with verbs.refusing("all_reduce of IndexedSlices"):
        parsed = _parsed(slices, op)
    # As the key of a dict, what must be equal on all ranks gets into the fingerprint.
    text = f"all_reduce op={parsed.value} of {_text(slices)}"
    joined = verbs.all_gather({text: (slices.values, slices.indices)})
    values, indices = joined[text]
    if parsed.divides:
        values = _divided(values, verbs.size)
    return IndexedSlices(values, indices, slices.dense_shape)


def _parsed(slices: IndexedSlices, op: ReduceOp | str) -> ReduceOp:
    parsed = ReduceOp.parse(op)
    if parsed not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise InvalidArgumentError(
            f"{parsed.value} of IndexedSlices: expected SUM or MEAN, because absent rows count as "
            "zero. Reduce slices.to_dense() instead"
        )
    dtype_of(slices.values, parsed)
    return parsed


def _text(slices: IndexedSlices) -> str:
    """Write what must be equal on all ranks: all but the number of rows and the contents."""
    values, indices = slices.values, slices.indices
    place = " on the GPU" if is_cupy(values) else ""
    shape = None if slices.dense_shape is None else list(slices.dense_shape)
    return (
        f"IndexedSlices({np.dtype(values.dtype).name}{['*', *values.shape[1:]]}, "
        f"{np.dtype(indices.dtype).name}, dense_shape={shape}){place}"
    )


def _divided(values: Any, size: int) -> Any:
    # As the dense MEAN: a true division in the accumulator's precision, rounded once.
    result = mean_dtype(dtype_of(values))
    values = array_namespace(values).ascontiguousarray(values.astype(result, copy=False))
    row = dtype_of(values)
    wide = DTYPES[row.accumulator].numpy
    lanes = values.view(DTYPES[row.kernel].numpy)  # a complex number is two
    return (lanes.astype(wide) / wide.type(size)).astype(lanes.dtype).view(result)
