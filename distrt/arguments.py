"""The arguments of a verb: checked once and made flat (layer 4).

May import: collectives.schedule, arrays, reduce_op, errors. verbs.py is the main user.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from distrt.arrays import (
    DTYPES,
    DType,
    Tree,
    array_namespace,
    as_array,
    dtype_of,
    flatten,
    is_array,
    is_cupy,
    mean_dtype,
    paths_of,
    share_memory,
)
from distrt.collectives.schedule import chunks
from distrt.errors import DistrtError, DTypeError, InvalidArgumentError
from distrt.reduce_op import ReduceOp

__all__ = [
    "Leaf",
    "counts_of",
    "describe",
    "front_of",
    "leaves_of",
    "outs_of",
    "parts_of",
    "row_bytes",
    "untangled",
]

_BYTES = DTYPES["u8"]


class Leaf(NamedTuple):
    """One array of a call, checked and made flat.

    ``flat`` is 1-D, contiguous and of the kernel dtype of ``row``; ``shape`` and
    ``dtype`` are those of the array that the user sees.
    """

    flat: Any
    row: DType
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def text(self) -> str:
        """How messages and fingerprints write it: ``float32[2, 3]``."""
        place = " on the GPU" if is_cupy(self.flat) else ""
        return f"{self.dtype.name}{list(self.shape)}{place}"


def _flat(array: Any, row: DType) -> Any:
    if not array.flags.c_contiguous:
        array = array_namespace(array).ascontiguousarray(array)
    return array.reshape(-1).view(row.numpy)


def leaf_of(value: Any, op: ReduceOp | None) -> Leaf:
    """Check one value; with an op its elements are numbers to fold, else bytes to move."""
    array = as_array(value)
    dtype = dtype_of(array, op)
    if op is None:
        return Leaf(_flat(array, _BYTES), _BYTES, array.shape, dtype.numpy)
    if op.divides and mean_dtype(dtype) != dtype.numpy:
        array = array.astype(mean_dtype(dtype))
        dtype = dtype_of(array)
    row = DTYPES[dtype.kernel]
    return Leaf(_flat(array, row), row, array.shape, dtype.numpy)


def leaves_of(tree: Tree, op: ReduceOp | None) -> list[Leaf]:
    """Check all leaves of ``tree``; see ``leaf_of``. An error says which leaf it is about."""
    leaves: list[Leaf] = []
    for value in tree.leaves:
        try:
            leaves.append(leaf_of(value, op))
        except DistrtError as error:
            path = paths_of(tree)[len(leaves)]
            raise type(error)(f"value{path}: {error}" if path else str(error)) from error
    return leaves


def front_of(verb: str, value: Any, axis: int) -> tuple[Leaf, int]:
    """Return the leaf with ``axis`` moved to the front, and where it belongs."""
    array = as_array(value)
    try:
        axis = operator.index(axis)
    except TypeError as error:
        raise InvalidArgumentError(f"{verb}: axis must be an int, got {axis!r}") from error
    if array.ndim == 0 or not -array.ndim <= axis < array.ndim:
        raise InvalidArgumentError(
            f"{verb} along axis {axis}: expected an array with that axis, got shape {array.shape}"
        )
    place = axis % array.ndim
    return leaf_of(array_namespace(array).moveaxis(array, place, 0), None), place


def describe(tree: Tree, leaves: Sequence[Leaf]) -> str:
    """Return what the fingerprint of a call says of its value: structure, dtypes, shapes."""
    texts = " ".join(leaf.text for leaf in leaves)
    return texts if len(leaves) == 1 and tree.spec.is_leaf() else f"{tree.spec} {texts}"


def outs_of(out: Any, tree: Tree, leaves: Sequence[Leaf]) -> list[Any]:
    """Return the arrays of ``out`` that receive the results, or a None for each leaf."""
    if out is None:
        return [None] * len(leaves)
    given = flatten(out)
    if given.spec != tree.spec:
        raise InvalidArgumentError(
            f"out has another structure than value: expected {tree.spec}, got {given.spec}"
        )
    for array, leaf in zip(given.leaves, leaves, strict=True):
        if not is_array(array) or isinstance(array, np.generic):
            raise DTypeError(f"out: expected a NumPy or CuPy array, got {type(array).__name__}")
        dtype_of(array)
        if array.shape != leaf.shape or np.dtype(array.dtype) != leaf.dtype:
            raise InvalidArgumentError(
                f"out: expected {leaf.text}, got {np.dtype(array.dtype).name}{list(array.shape)}"
            )
        if not getattr(array.flags, "writeable", True):
            raise InvalidArgumentError("out: expected a writable array, got a read-only one")
    return given.leaves


def untangled(leaves: Sequence[Leaf], outs: Sequence[Any], own: bool = False) -> list[Leaf]:
    """Copy the leaves that an earlier ``out``, or their own, overwrites while they are read."""
    return [
        leaf._replace(flat=leaf.flat.copy())
        if any(out is not None and share_memory(leaf.flat, out) for out in outs[: number + own])
        else leaf
        for number, leaf in enumerate(leaves)
    ]


def row_bytes(leaf: Leaf) -> int:
    """Return the bytes of one row, an element along the first dimension."""
    return leaf.dtype.itemsize * math.prod(leaf.shape[1:])


def parts_of(verb: str, leaf: Leaf, size: int, equal: bool = False) -> list[Leaf]:
    """Cut a leaf into one part of its rows for each rank; the first ones may have one row more."""
    if not leaf.shape:
        raise InvalidArgumentError(f"{verb}: expected an array with rows, got {leaf.text}")
    if equal and leaf.shape[0] % size:
        raise InvalidArgumentError(
            f"{verb}: expected rows that divide by {size} ranks, got {leaf.text}: pass counts"
        )
    width = leaf.flat.size // max(1, leaf.shape[0])
    return [
        leaf._replace(
            flat=leaf.flat[rows.offset * width : (rows.offset + rows.length) * width],
            shape=(rows.length, *leaf.shape[1:]),
        )
        for rows in chunks(leaf.shape[0], size)
    ]


def counts_of(leaves: Sequence[Leaf], counts: Sequence[int], size: int) -> list[int]:
    """Check the rows that all_to_all sends to each of ``size`` ranks."""
    rows = [int(count) for count in counts]
    for leaf in leaves:
        length = leaf.shape[0] if leaf.shape else None
        if len(rows) != size or min(rows) < 0 or sum(rows) != length:
            raise InvalidArgumentError(
                f"all_to_all: expected {size} counts of rows that add up to the rows of "
                f"{leaf.text}, got {rows}"
            )
    return rows
