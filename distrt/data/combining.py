"""Transformations of several datasets, or with their positions (data room, layer 5).

May import: errors, arrays, elements, pipeline.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from distrt.arrays import Tree, array_namespace, map_structure
from distrt.data.elements import ArraySpec, widened
from distrt.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Epoch, Node

__all__ = ["Concatenate", "Enumerate", "Zip"]


@final
@dataclass(frozen=True, eq=False)
class Zip(Node):
    """One element of each dataset, in the structure ``shape``; ends with the shortest."""

    settled = True
    splits = True
    datasets: tuple[Node, ...]
    shape: Tree

    def handles(self, epoch: Epoch) -> Iterator[tuple[Any, ...]]:
        return zip(*(node.handles(epoch) for node in self.datasets), strict=False)

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[tuple[Any, ...]]:
        return zip(*(node.handles_from(epoch, start) for node in self.datasets), strict=False)

    def fetch(self, handle: Sequence[Any]) -> Any:
        pairs = zip(self.datasets, handle, strict=True)
        return self.shape.rebuild([node.fetch(inner) for node, inner in pairs])

    def gather(self, handles: Sequence[Sequence[Any]]) -> Any:
        columns = zip(*handles, strict=True) if handles else ((),) * len(self.datasets)
        pairs = zip(self.datasets, columns, strict=True)
        return self.shape.rebuild([node.gather(column) for node, column in pairs])

    def example(self, variant: int) -> Any:
        return self.shape.rebuild([node.example(variant) for node in self.datasets])

    @cached_property
    def element_spec(self) -> Any:
        return self.shape.rebuild([node.element_spec for node in self.datasets])

    def cardinality(self) -> int:
        counts = [node.cardinality() for node in self.datasets]
        if UNKNOWN_CARDINALITY in counts:
            return UNKNOWN_CARDINALITY
        return min((n for n in counts if n != INFINITE_CARDINALITY), default=INFINITE_CARDINALITY)

    def describe(self) -> str:
        return f"zip({', '.join(node.describe() for node in self.datasets)})"


@final
@dataclass(frozen=True, eq=False)
class Concatenate(Node):
    """All elements of the first dataset, then those of the second."""

    settled = True
    splits = True
    datasets: tuple[Node, ...]

    def handles(self, epoch: Epoch) -> Iterator[tuple[int, Any]]:
        for number, node in enumerate(self.datasets):
            yield from ((number, inner) for inner in node.handles(epoch))

    def fetch(self, handle: tuple[int, Any]) -> Any:
        return self.datasets[handle[0]].fetch(handle[1])

    def gather(self, handles: Sequence[tuple[int, Any]]) -> Any:
        runs = [
            self.datasets[number].gather([inner for _, inner in run])
            for number, run in itertools.groupby(handles, key=lambda handle: handle[0])
        ]
        if len(runs) < 2:
            return runs[0] if runs else self.datasets[0].gather(())
        shapes = [[leaf.shape[1:] for leaf in _leaves(run)] for run in runs]
        if any(other != shapes[0] for other in shapes):
            return super().gather(handles)  # which says what is wrong
        return map_structure(lambda *leaves: array_namespace(leaves[0]).concatenate(leaves), *runs)

    def example(self, variant: int) -> Any:
        return self.datasets[0].example(variant)

    @cached_property
    def element_spec(self) -> Any:
        first, *rest = (node.element_spec for node in self.datasets)
        for other in rest:
            first = widened(first, other)
        return first

    def cardinality(self) -> int:
        counts = [node.cardinality() for node in self.datasets]
        return (
            min(counts)
            if min(counts) < 0 and INFINITE_CARDINALITY not in counts
            else (INFINITE_CARDINALITY if INFINITE_CARDINALITY in counts else sum(counts))
        )

    def describe(self) -> str:
        first, *rest = (node.describe() for node in self.datasets)
        return first + "".join(f".concatenate({other})" for other in rest)


def _leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    map_structure(found.append, structure)
    return found


@final
@dataclass(frozen=True, eq=False)
class Enumerate(Node):
    """``(position, element)``; see ``Dataset.enumerate``."""

    settled = True
    upstream: Node
    start: int

    def handles(self, epoch: Epoch) -> Iterator[tuple[int, Any]]:
        return enumerate(self.upstream.handles(epoch), self.start)

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[tuple[int, Any]]:
        return enumerate(self.upstream.handles_from(epoch, start), self.start + start)

    def fetch(self, handle: tuple[int, Any]) -> Any:
        return np.int64(handle[0]), self.upstream.fetch(handle[1])

    def gather(self, handles: Sequence[tuple[int, Any]]) -> Any:
        positions = np.array([position for position, _ in handles], np.int64)
        return positions, self.upstream.gather([inner for _, inner in handles])

    def example(self, variant: int) -> Any:
        return np.int64(self.start + variant), self.upstream.example(variant)

    @property
    def element_spec(self) -> Any:
        return ArraySpec((), np.dtype(np.int64)), self.upstream.element_spec

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        return f"{self.upstream.describe()}.enumerate({self.start})"
