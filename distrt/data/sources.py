"""Sources: where elements come from (data room, layer 5).

May import: errors, arrays, elements, pipeline, sparse. The handle of a row is its
number, so a batch of an unmapped source is one slice or one gather per leaf.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any, final

import numpy as np

from distrt.arrays import array_namespace, cupy_module, flatten, is_cupy, map_structure
from distrt.data.elements import ArraySpec, components, leaf_names, row_of, spec_of
from distrt.data.pipeline import Epoch, Node, runs_of
from distrt.data.sparse import SparseRows, is_sparse
from distrt.errors import InvalidArgumentError, NotFoundError

__all__ = ["NpzFile", "Range", "Slices", "Tensors", "slices_of"]


class _Rows(Node):
    """A source whose handles are the numbers of its rows."""

    @final
    def handles(self, epoch: Epoch) -> Iterator[int]:
        return iter(range(self.cardinality()))

    @final
    def blocks(self, epoch: Epoch, start: int, size: int) -> Iterator[Sequence[int]]:
        return runs_of(np.arange(start, self.cardinality()), size)


@final
@dataclass(frozen=True, eq=False)
class Range(_Rows):
    """The numbers start, start + step, …; see ``Dataset.range``."""

    settled = True
    numbers: range
    dtype: np.dtype

    def fetch(self, handle: int) -> Any:
        return self.dtype.type(self.numbers[handle])

    def gather(self, handles: Sequence[int]) -> Any:
        index = np.asarray(handles, np.int64)
        return (self.numbers.start + self.numbers.step * index).astype(self.dtype)

    def example(self, variant: int) -> Any:
        return self.dtype.type(self.numbers.start + variant * self.numbers.step)

    @property
    def element_spec(self) -> ArraySpec:
        return ArraySpec((), self.dtype)

    def cardinality(self) -> int:
        return len(self.numbers)

    def describe(self) -> str:
        numbers = self.numbers
        return f"range({numbers.start}, {numbers.stop}, {numbers.step}, {self.dtype})"


@final
@dataclass(frozen=True, eq=False)
class Tensors(Node):
    """One element: the whole structure; see ``Dataset.from_tensors``."""

    settled = True
    batched = True
    element: Any

    def handles(self, epoch: Epoch) -> Iterator[int]:
        return iter(range(1))

    def fetch(self, handle: int) -> Any:
        return map_structure(lambda leaf: leaf.copy(), self.element)

    def example(self, variant: int) -> Any:
        return self.fetch(0)

    @property
    def element_spec(self) -> Any:
        return spec_of(self.element)

    def cardinality(self) -> int:
        return 1

    def describe(self) -> str:
        return "from_tensors"


@final
@dataclass(frozen=True, eq=False)
class Slices(_Rows):
    """The rows of arrays of equal first dimension; made by ``slices_of``."""

    settled = True
    arrays: Any
    rows: int

    def fetch(self, handle: int) -> Any:
        if type(self.arrays) is np.ndarray:
            return row_of(self.arrays, handle)
        return map_structure(lambda leaf: row_of(leaf, handle), self.arrays)

    def gather(self, handles: Sequence[int]) -> Any:
        index = np.asarray(handles, np.intp)
        in_order = index.size > 0 and bool((np.diff(index) == 1).all())
        if in_order:
            rows = slice(int(index[0]), int(index[-1]) + 1)
            return map_structure(lambda leaf: leaf[rows].copy(), self.arrays)
        return map_structure(lambda leaf: _rows_of(leaf, index), self.arrays)

    def example(self, variant: int) -> Any:
        if self.rows:
            return self.fetch(variant % self.rows)
        return map_structure(
            lambda leaf: _namespace(leaf).zeros(leaf.shape[1:], dtype=leaf.dtype)[()],
            self.arrays,
        )

    @property
    def element_spec(self) -> Any:
        return map_structure(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), self.arrays)

    def cardinality(self) -> int:
        return self.rows

    def describe(self) -> str:
        return f"from_tensor_slices({self.rows} rows)"


def _namespace(leaf: Any) -> Any:
    return array_namespace(leaf) if is_cupy(leaf) else np


def _rows_of(array: Any, index: np.ndarray) -> Any:
    if isinstance(array, SparseRows):
        return array[index]
    if is_cupy(array):
        return array[cupy_module().asarray(index)]
    # take() moves whole rows, but would first copy an array that is not contiguous.
    return array.take(index, axis=0) if array.flags.c_contiguous else array[index]


def slices_of(structure: Any) -> Slices:
    """Return the source over the first dimension of every array of ``structure``.

    Raises:
      InvalidArgumentError: no array, one of rank 0, or unequal first dimensions.
    """
    dense = map_structure(lambda leaf: SparseRows(leaf) if is_sparse(leaf) else leaf, structure)
    tree = flatten(components(dense))
    names = leaf_names(tree.rebuild(tree.leaves))
    if not tree.leaves:
        raise InvalidArgumentError(f"expected at least one array, got {structure!r}")
    scalars = [name for name, leaf in zip(names, tree.leaves, strict=True) if leaf.ndim == 0]
    if scalars:
        raise InvalidArgumentError(
            f"{', '.join(scalars)} is a scalar and has no rows to slice: expected arrays of "
            "rank 1 or more; from_tensors() makes one element of the whole structure"
        )
    sizes = [int(leaf.shape[0]) for leaf in tree.leaves]
    if len(set(sizes)) > 1:
        found = ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=True))
        raise InvalidArgumentError(
            f"all arrays must have the same first dimension (number of rows), got {found}"
        )
    # A memory map is read as the plain array that it is.
    kept = [is_cupy(leaf) or isinstance(leaf, SparseRows) for leaf in tree.leaves]
    arrays = [
        leaf if keep else np.asarray(leaf) for leaf, keep in zip(tree.leaves, kept, strict=True)
    ]
    return Slices(tree.rebuild(arrays), sizes[0])


@final
@dataclass(frozen=True, eq=False)
class NpzFile(_Rows):
    """The rows of the arrays in a .npz or .npy file, opened when first needed."""

    settled = True
    path: str | PathLike[str]

    @cached_property
    def _slices(self) -> Slices:
        path = fspath(self.path)
        try:
            loaded = np.load(path, mmap_mode="r", allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return slices_of(loaded)
            with loaded:
                return slices_of({name: loaded[name] for name in loaded.files})
        except FileNotFoundError:
            raise NotFoundError(
                f"dataset file {path!r} does not exist on this rank: every rank reads the file, "
                "so it must be there under this name on every host"
            ) from None
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise InvalidArgumentError(f"dataset file {path!r} cannot be used: {error}") from error

    def fetch(self, handle: int) -> Any:
        return self._slices.fetch(handle)

    def gather(self, handles: Sequence[int]) -> Any:
        return self._slices.gather(handles)

    def example(self, variant: int) -> Any:
        return self._slices.example(variant)

    @property
    def element_spec(self) -> Any:
        return self._slices.element_spec

    def cardinality(self) -> int:
        return self._slices.cardinality()

    def describe(self) -> str:
        # The path may differ between hosts, the contents may not.
        opened = vars(self).get("_slices")
        return f"from_npz({opened.rows} rows)" if opened else "from_npz"
