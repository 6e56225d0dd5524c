"""Turns: replicas that take consecutive elements of one pipeline (data room, layer 5).

May import: elements, pipeline, pieces, sharder. What MirroredStrategy does with a dataset
from a function. Source: the records of tf.distribute in tests/data.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from distrt.arrays import flatten
from distrt.data.pieces import empty_part
from distrt.data.pipeline import Epoch, Node
from distrt.data.sharder import Share

__all__ = ["Turns"]


@final
@dataclass(frozen=True, eq=False)
class Turns(Node):
    """Elements ``share.rank``, + ``share.size``, …; empty ones fill the last round.

    Where every shape is fixed an empty one has no place: the last round is dropped.
    """

    settled = True
    upstream: Node
    share: Share

    @property
    def _fixed(self) -> bool:
        return all(None not in leaf.shape for leaf in flatten(self.element_spec).leaves)

    def handles(self, epoch: Epoch) -> Iterator[tuple[Any, ...]]:
        rank, size = self.share
        upstream, fixed = self.upstream.handles(epoch), self._fixed
        while taken := list(itertools.islice(upstream, size)):
            if len(taken) < size and fixed:
                return
            yield tuple(taken[rank : rank + 1])

    def fetch(self, handle: tuple[Any, ...]) -> Any:
        return self.upstream.fetch(handle[0]) if handle else empty_part(self.upstream)

    def example(self, variant: int) -> Any:
        return self.upstream.example(variant)

    @property
    def element_spec(self) -> Any:
        return self.upstream.element_spec

    def cardinality(self) -> int:
        elements = self.upstream.cardinality()
        if elements < 0:
            return elements
        return elements // self.share.size if self._fixed else -(-elements // self.share.size)

    def describe(self) -> str:
        return f"{self.upstream.describe()}.turns({self.share.rank} of {self.share.size})"
