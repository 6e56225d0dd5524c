"""Transformations between elements and batches of them (data room, layer 5).

May import: errors, arrays, elements, pipeline. The handle of a batch is the run of its rows'
handles, so the sharder gives a rank only its own rows, and ``unbatch`` takes them apart again.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from distrt.arrays import array_namespace, flatten, map_structure
from distrt.data.elements import ArraySpec, leaf_names, row_of, stack
from distrt.data.pipeline import Epoch, Node
from distrt.errors import InvalidArgumentError

__all__ = ["Batch", "Batching", "PaddedBatch", "Unbatch", "padding_of"]


class Batching(Node):
    """``batch_size`` consecutive elements as one; its handle is the run of their handles.

    Attributes:
      own_rows: the rows of a part can be made without those of other parts.
    """

    batched = True
    upstream: Node
    batch_size: int
    drop_remainder: bool

    @property
    def own_rows(self) -> bool:
        """See above."""
        return True

    def handles(self, epoch: Epoch) -> Iterator[Sequence[Any]]:
        return self.handles_from(epoch, 0)

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[Sequence[Any]]:
        for rows in self.upstream.blocks(epoch, start * self.batch_size, self.batch_size):
            if self.drop_remainder and len(rows) < self.batch_size:
                return
            yield rows

    def fetch(self, handle: Sequence[Any]) -> Any:
        return self.upstream.gather(handle)

    def example(self, variant: int) -> Any:
        rows = self.batch_size
        if not self.drop_remainder:
            available = self.upstream.cardinality()
            rows = min(rows, available) if available > 0 else rows
            if variant:
                rows = rows - 1 or 2
        return self._of_examples([self.upstream.example(variant)] * rows)

    def _of_examples(self, elements: Sequence[Any]) -> Any:
        return stack(elements)

    def cardinality(self) -> int:
        elements = self.upstream.cardinality()
        if elements < 0:
            return elements
        return (elements if self.drop_remainder else elements + self.batch_size - 1) // (
            self.batch_size
        )

    @property
    def _rows(self) -> int | None:
        return self.batch_size if self.drop_remainder else None


@final
@dataclass(frozen=True, eq=False)
class Batch(Batching):
    """Elements of equal shapes, stacked; see ``Dataset.batch``."""

    settled = True
    upstream: Node
    batch_size: int
    drop_remainder: bool

    @cached_property
    def element_spec(self) -> Any:
        return map_structure(
            lambda leaf: ArraySpec((self._rows, *leaf.shape), leaf.dtype),
            self.upstream.element_spec,
        )

    def describe(self) -> str:
        return f"{self.upstream.describe()}.batch({self.batch_size}, {self.drop_remainder})"


@final
@dataclass(frozen=True, eq=False)
class PaddedBatch(Batching):
    """Elements padded to one shape, then stacked; see ``Dataset.padded_batch``.

    Attributes:
      shapes: structured as an element: what each dimension is padded to; None: the longest.
      values: structured as an element: what it is padded with.
    """

    upstream: Node
    batch_size: int
    drop_remainder: bool
    shapes: Any
    values: Any

    @property
    def own_rows(self) -> bool:
        # Otherwise the longest row of the whole batch decides, which may be another rank's.
        return all(None not in leaf.shape for leaf in flatten(self.shapes).leaves)

    def fetch(self, handle: Sequence[Any]) -> Any:
        if len(handle) == 0:
            return map_structure(lambda leaf: leaf[:0], self.example(0))
        return self._of_examples([self.upstream.fetch(row) for row in handle])

    def _of_examples(self, elements: Sequence[Any]) -> Any:
        trees = [flatten(element) for element in elements]
        shapes, values = flatten(self.shapes).leaves, flatten(self.values).leaves
        names = leaf_names(elements[0])
        columns = zip(*(tree.leaves for tree in trees), strict=True)
        padded = [
            _padded(name, column, shape.shape, value)
            for name, column, shape, value in zip(names, columns, shapes, values, strict=True)
        ]
        return trees[0].rebuild(padded)

    @cached_property
    def element_spec(self) -> Any:
        return map_structure(
            lambda leaf, shape: ArraySpec((self._rows, *shape.shape), leaf.dtype),
            self.upstream.element_spec,
            self.shapes,
        )

    def describe(self) -> str:
        shapes = [leaf.shape for leaf in flatten(self.shapes).leaves]
        values = [leaf.item() for leaf in flatten(self.values).leaves]
        return (
            f"{self.upstream.describe()}.padded_batch({self.batch_size}, {shapes}, {values}, "
            f"{self.drop_remainder})"
        )


def padding_of(spec: Any, shapes: Any, values: Any) -> tuple[Any, Any]:
    """Return padded shapes and padding values, each structured as ``spec``.

    Raises:
      InvalidArgumentError: they are structured otherwise, or have other ranks.
    """
    tree = flatten(spec)
    try:
        wanted = (
            [leaf.shape for leaf in tree.leaves]
            if shapes is None
            else (
                [tuple(shapes)]
                if len(tree.leaves) == 1 and _flat(shapes)
                else [tuple(shape) for shape in tree.spec.flatten_up_to(shapes)]
            )
        )
        given = (
            [None] * len(tree.leaves)
            if values is None
            else (
                [values] * len(tree.leaves)
                if np.ndim(values) == 0 and not isinstance(values, dict)
                else tree.spec.flatten_up_to(values)
            )
        )
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"padded_batch: expected padded_shapes and padding_values structured as an element, "
            f"got {shapes!r} and {values!r}: {error}"
        ) from error
    sizes, fills = [], []
    for name, leaf, shape, value in zip(leaf_names(spec), tree.leaves, wanted, given, strict=True):
        if len(shape) != len(leaf.shape):
            raise InvalidArgumentError(
                f"padded_batch: {name}: expected a padded shape of {len(leaf.shape)} dimensions, "
                f"got {list(shape)}"
            )
        known = tuple(None if size in (None, -1) else int(size) for size in shape)
        sizes.append(ArraySpec(known, leaf.dtype))
        zero = b"" if leaf.dtype.kind == "O" else np.zeros((), leaf.dtype)[()]
        fills.append(np.asarray(zero if value is None else value, leaf.dtype))
    return tree.rebuild(sizes), tree.rebuild(fills)


def _flat(shape: Any) -> bool:
    plain = isinstance(shape, tuple | list)
    return plain and all(size is None or isinstance(size, int | np.integer) for size in shape)


def _padded(name: str, rows: Sequence[Any], shape: tuple[int | None, ...], value: Any) -> Any:
    ranks = {row.ndim for row in rows} | {len(shape)}
    if len(ranks) > 1:
        raise InvalidArgumentError(
            f"padded_batch: {name}: expected {len(shape)} dimensions, as in padded_shapes, got "
            f"elements of shapes {sorted({row.shape for row in rows})}"
        )
    longest = tuple(
        max(row.shape[axis] for row in rows) if size is None else size
        for axis, size in enumerate(shape)
    )
    for row in rows:
        if any(have > room for have, room in zip(row.shape, longest, strict=True)):
            raise InvalidArgumentError(
                f"padded_batch: {name}: an element of shape {list(row.shape)} does not fit into "
                f"padded_shapes {list(shape)}: nothing is cut off; give a larger shape or None"
            )
    xp = array_namespace(rows[0])
    batch = xp.full((len(rows), *longest), value, dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        corner = (index, *map(slice, row.shape))
        batch[corner] = row
    return batch


@final
@dataclass(frozen=True, eq=False)
class Unbatch(Node):
    """The rows of every element, one after the other; see ``Dataset.unbatch``.

    The rows of a ``batch`` are those that it was made of, so its handles are taken; of any
    other element the rows are cut from it, and are their own handles.
    """

    settled = True
    upstream: Node

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        for handle in self.upstream.handles(epoch):
            if isinstance(self.upstream, Batch):
                yield from handle
                continue
            element = self.upstream.fetch(handle)
            yield from (_row(element, index) for index in range(_length(element)))

    def fetch(self, handle: Any) -> Any:
        return self.upstream.upstream.fetch(handle) if isinstance(self.upstream, Batch) else handle

    def gather(self, handles: Sequence[Any]) -> Any:
        if isinstance(self.upstream, Batch):
            return self.upstream.upstream.gather(handles)
        return super().gather(handles)

    def example(self, variant: int) -> Any:
        element = self.upstream.example(variant)
        if _length(element):
            return _row(element, 0)
        return map_structure(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype)[()], element)

    @property
    def element_spec(self) -> Any:
        return map_structure(
            lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), self.upstream.element_spec
        )

    def cardinality(self) -> int:
        if isinstance(self.upstream, Batch) and not self.upstream.drop_remainder:
            return self.upstream.upstream.cardinality()
        batches, sizes = self.upstream.cardinality(), set()
        for leaf in flatten(self.upstream.element_spec).leaves:
            sizes.add(leaf.shape[0])
        known = batches >= 0 and None not in sizes and len(sizes) == 1
        return batches * sizes.pop() if known else min(batches, -1) if batches == -1 else -2

    def describe(self) -> str:
        return f"{self.upstream.describe()}.unbatch()"


def _row(element: Any, index: int) -> Any:
    return map_structure(lambda leaf: row_of(leaf, index), element)


def _length(element: Any) -> int:
    named = zip(leaf_names(element), flatten(element).leaves, strict=True)
    lengths = {name: leaf.shape[0] if leaf.ndim else None for name, leaf in named}
    found = set(lengths.values())
    if len(found) != 1 or None in found:
        raise InvalidArgumentError(
            "unbatch: expected components of one first dimension, the rows, got "
            + ", ".join(
                f"{name}: {'a scalar' if rows is None else rows}" for name, rows in lengths.items()
            )
        )
    return int(found.pop() or 0)
