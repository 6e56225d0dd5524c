"""Elements: what one element of a dataset is (data room, layer 5).

May import: errors, arrays, sparse. An element is a structure (tuples, dicts, named
tuples) whose leaves are NumPy or CuPy arrays; a leaf of rank 0 is a NumPy
scalar. A list is not a structure but data, as in tf.data. Byte strings (records, lines)
are arrays of dtype object that hold ``bytes``, also in rank 0: NumPy's own byte strings would
lose zero bytes at their end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from distrt.arrays import array_namespace, as_array, flatten, is_cupy, map_structure
from distrt.data.sparse import SparseRows
from distrt.errors import InvalidArgumentError

__all__ = [
    "ArraySpec",
    "boxed",
    "components",
    "leaf_names",
    "row_of",
    "spec_of",
    "spec_text",
    "stack",
    "widened",
]


@final
@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of a component of an element. Source: ``tf.TensorSpec``.

    Attributes:
      shape: its dimensions; None where a dimension varies between elements.
      dtype: its NumPy dtype.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def __repr__(self) -> str:
        return f"ArraySpec(shape={self.shape}, dtype={self.dtype})"


def components(structure: Any) -> Any:
    """Return ``structure`` with every leaf, and every list, turned into an array.

    Raises:
      InvalidArgumentError: a list whose items differ in shape.
      DTypeError: a leaf that cannot become an array.
    """
    # What most functions return; this is called for every row.
    if type(structure) is np.ndarray and structure.ndim:
        return structure
    if isinstance(structure, tuple):
        parts = [components(item) for item in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    if isinstance(structure, dict):
        result = copy.copy(structure)
        result.update((key, components(item)) for key, item in structure.items())
        return result
    if isinstance(structure, bytes):
        return boxed(structure)
    if isinstance(structure, str):
        return np.str_(structure)
    if isinstance(structure, SparseRows):
        return structure
    try:
        array = as_array(structure)
    except ValueError as error:
        raise InvalidArgumentError(
            f"a list becomes one array, so its items must have equal shapes: {error}"
        ) from error
    if array.ndim or is_cupy(array) or array.dtype.kind == "O":
        return array
    return array[()]


def boxed(value: Any) -> np.ndarray:
    """Return ``value``, no array, as an array of rank 0 and dtype object."""
    box = np.empty((), object)
    box[()] = value
    return box


def row_of(leaf: Any, index: int) -> Any:
    """Return a copy of row ``index`` of an array, a leaf like any other."""
    row = leaf[index]
    if leaf.dtype.kind == "O" and not isinstance(row, np.ndarray):
        return boxed(row)
    return row.copy()


def stack(elements: Sequence[Any]) -> Any:
    """Return the batch of ``elements`` (at least one): each leaf gains a first dimension.

    Raises:
      InvalidArgumentError: the elements differ in structure, shape or dtype.
    """
    if all(type(element) is np.ndarray for element in elements):
        return _stack_leaves(elements)
    trees = [flatten(element) for element in elements]
    first = trees[0]
    odd = next((tree for tree in trees if tree.spec != first.spec), None)
    if odd is not None:
        raise InvalidArgumentError(
            f"cannot batch elements of different structures: {first.spec} and {odd.spec}"
        )
    columns = zip(*(tree.leaves for tree in trees), strict=True)
    return first.rebuild([_stack_leaves(column) for column in columns])


def _stack_leaves(rows: Sequence[Any]) -> Any:
    kinds = {(row.shape, row.dtype) for row in rows}
    if len(kinds) > 1 and all(row.dtype.kind == "U" and row.ndim == 0 for row in rows):
        return np.array(rows)  # text of any lengths: wide enough for the longest
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype}{list(shape)}" for shape, dtype in kinds))
        raise InvalidArgumentError(
            f"cannot batch elements of different shapes or dtypes: got {found} in one batch; "
            "let map() bring them to one shape first, or use batch(1)"
        )
    if is_cupy(rows[0]):
        return array_namespace(rows[0]).stack(rows)
    batch = np.empty((len(rows), *rows[0].shape), rows[0].dtype)
    if batch.dtype.kind == "O" and batch.ndim == 1:
        # A box would be stored as it is, where what it holds is meant.
        rows = [row[()] for row in rows]
    for index, row in enumerate(rows):
        batch[index] = row
    return batch


def spec_of(element: Any) -> Any:
    """Return the structure of ``ArraySpec`` of one element."""
    return map_structure(lambda leaf: ArraySpec(leaf.shape, leaf.dtype), element)


def widened(spec: Any, other: Any) -> Any:
    """Return ``spec`` with None for each dimension in which ``other`` differs.

    Raises:
      ValueError: they differ in structure, rank or dtype.
    """

    def widen(a: ArraySpec, b: ArraySpec) -> ArraySpec:
        texts = a.dtype.kind == b.dtype.kind == "U"  # how long they are is no part of the type
        if a.dtype != b.dtype and not texts:
            raise ValueError(f"dtype {a.dtype} and {b.dtype}")
        dimensions = zip(a.shape, b.shape, strict=True)
        longer = max(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
        return ArraySpec(tuple(m if m == n else None for m, n in dimensions), longer)

    return map_structure(widen, spec, other)


def leaf_names(structure: Any) -> list[str]:
    """Return how a person would write each leaf: ``['x']``, ``[1]``, ``element``."""
    paths = flatten(structure).spec.paths()
    return ["".join(f"[{key!r}]" for key in path) or "element" for path in paths]


def spec_text(spec: Any) -> str:
    """Return ``spec`` as text that is equal exactly where the specs are."""
    leaves = zip(leaf_names(spec), flatten(spec).leaves, strict=True)
    kinds = {"U": "text", "O": "bytes"}
    return ", ".join(
        f"{name}: {kinds.get(leaf.dtype.kind, leaf.dtype)}{list(leaf.shape)}"
        for name, leaf in leaves
    )
