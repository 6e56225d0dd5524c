"""Pieces: a worker walks rows by itself, a per-replica batch at a time (data room, layer 5).

May import: errors, arrays, elements, pipeline, batching, movers, sharder. What a
worker gets under AutoShardPolicy.OFF (all rows) and FILE (those of its files). The global
batch size G over K workers gives per-replica sizes G // K + (j < G % K); worker w starts with
the w-th of them and goes round. Source: the records of tf.distribute in tests/data.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from distrt.arrays import array_namespace, flatten, map_structure
from distrt.data.batching import Batching
from distrt.data.elements import ArraySpec
from distrt.data.pipeline import Epoch, Mover, Node, Stream, upstreams
from distrt.data.sharder import Share

__all__ = ["Parts", "Pieces", "Remainder", "batch_size_of", "empty_part"]


def batch_size_of(node: Node) -> int | None:
    """Return the number of rows of a full batch, or None where the pipeline does not say.

    Known of a batch that is only moved about, and of shapes that never vary.
    """
    if isinstance(node, Batching):
        return node.batch_size
    if node.splits:
        nodes = itertools.chain.from_iterable(upstreams(node).values())
        sizes = {batch_size_of(upstream) for upstream in nodes}
        return sizes.pop() if len(sizes) == 1 else None
    leaves: list[ArraySpec] = flatten(node.element_spec).leaves
    firsts = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    return firsts.pop() if len(firsts) == 1 else None


def empty_part(node: Node) -> Any:
    """Return a part of no rows, of the structure, dtypes and trailing shapes of ``node``.

    None where an element of it is a scalar, which cannot be empty.
    """
    example = node.example(0)
    if any(leaf.ndim == 0 for leaf in flatten(example).leaves):
        return None
    return map_structure(lambda leaf: leaf[:0], example)


@final
@dataclass(frozen=True, eq=False)
class Pieces(Node):
    """The rows of the batches of ``upstream``, one after the other, in pieces.

    Attributes:
      size: rows of a global batch, G.
      share: which worker of how many.
      padded: end with empty pieces until the last of the workers has ended, which only those
        who walk the same rows can tell.
    """

    settled = True
    upstream: Node
    size: int
    share: Share
    padded: bool

    @property
    def _sizes(self) -> list[int]:
        workers = self.share.size
        whole, rest = divmod(self.size, workers)
        return [whole + (worker < rest) for worker in range(workers)]

    @property
    def _batch(self) -> Batching | None:
        # Where whole batches are only moved about, a batch's handle lists those of its rows.
        node = self.upstream
        while isinstance(node, Mover):
            node = node.upstream
        return node if isinstance(node, Batching) and node.own_rows else None

    def handles(self, epoch: Epoch) -> Iterator[list[Any]]:
        sizes, first, walked, pieces = self._sizes, self.share.rank, 0, 0
        rows = self._rows(epoch)
        for size in itertools.cycle(sizes[first:] + sizes[:first]):
            piece = list(itertools.islice(rows, size))
            if size and not piece:
                break
            walked, pieces = walked + len(piece), pieces + 1
            yield piece
        if self.padded:
            most = max(_pieces(walked, sizes, start) for start in range(len(sizes)))
            yield from ([] for _ in range(most - pieces))

    def _rows(self, epoch: Epoch) -> Iterator[Any]:
        handles = self.upstream.handles(epoch)
        if self._batch is not None:
            yield from itertools.chain.from_iterable(handles)
            return
        for handle in handles:
            element = self.upstream.fetch(handle)
            length = flatten(element).leaves[0].shape[0]
            yield from ((element, row) for row in range(length))

    def fetch(self, handle: Sequence[Any]) -> Any:
        batch = self._batch
        if batch is not None:
            return batch.fetch(handle)
        if len(handle) == 0:
            return empty_part(self.upstream)
        # Rows of one element lie side by side, so each run of them is one slice.
        runs = [list(run) for _, run in itertools.groupby(handle, key=lambda row: id(row[0]))]
        cut = [_slice(run[0][0], run[0][1], run[-1][1] + 1) for run in runs]
        return cut[0] if len(cut) == 1 else _joined(cut)

    def example(self, variant: int) -> Any:
        return self.share.of_element(self.upstream.example(variant))

    @property
    def element_spec(self) -> Any:
        return map_structure(
            lambda leaf: ArraySpec((None, *leaf.shape[1:]), leaf.dtype), self.upstream.element_spec
        )

    def cardinality(self) -> int:
        batches = self.upstream.cardinality()
        rows = batches * self.size
        if batches < 0 or not self.padded:
            return min(batches, -2) if batches != -1 else -1
        if not getattr(self._batch, "drop_remainder", False):
            return -2
        return max(_pieces(rows, self._sizes, start) for start in range(self.share.size))

    def describe(self) -> str:
        share = self.share
        return f"{self.upstream.describe()}.pieces({share.rank} of {share.size})"


def _pieces(rows: int, sizes: Sequence[int], start: int) -> int:
    """Return how many pieces the worker takes who starts with ``sizes[start]``."""
    rounds, left = divmod(rows, sum(sizes))
    count = rounds * len(sizes)
    for size in itertools.cycle([*sizes[start:], *sizes[:start]]):
        if size and left <= 0:
            return count
        count, left = count + 1, left - size
    raise AssertionError("a cycle has no end")


def _slice(element: Any, start: int, stop: int) -> Any:
    return map_structure(lambda leaf: leaf[start:stop], element)


def _joined(parts: Sequence[Any]) -> Any:
    return map_structure(lambda *leaves: array_namespace(leaves[0]).concatenate(leaves), *parts)


@final
@dataclass(frozen=True, eq=False)
class Parts(Stream):
    """Every element cut into as many parts as there are workers, all for this worker.

    What tf.distribute does under OFF where it cannot tell the size of a batch.
    """

    settled = True
    upstream: Node
    workers: int

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        for handle in self.upstream.handles(epoch):
            element = self.upstream.fetch(handle)
            yield from (Share(w, self.workers).of_element(element) for w in range(self.workers))

    def example(self, variant: int) -> Any:
        return Share(0, self.workers).of_element(self.upstream.example(variant))

    @property
    def element_spec(self) -> Any:
        return Share(0, self.workers).of_spec(self.upstream.element_spec)

    def cardinality(self) -> int:
        elements = self.upstream.cardinality()
        return elements if elements < 0 else elements * self.workers

    def describe(self) -> str:
        return f"{self.upstream.describe()}.parts({self.workers})"


@final
@dataclass(frozen=True, eq=False)
class Remainder(Node):
    """What some of a former number of workers left of a pass: the rest of each, in turn.

    Attributes:
      former: the pieces of those workers; none where there are more workers now.
      step: how many of them each had taken.
      like: whose elements these are, for the spec.
    """

    former: tuple[Node, ...]
    step: int
    like: Node

    def handles(self, epoch: Epoch) -> Iterator[tuple[int, Any]]:
        for number, node in enumerate(self.former):
            yield from ((number, handle) for handle in node.handles_from(epoch, self.step))

    def fetch(self, handle: tuple[int, Any]) -> Any:
        return self.former[handle[0]].fetch(handle[1])

    def example(self, variant: int) -> Any:
        return self.like.example(variant)

    @property
    def element_spec(self) -> Any:
        return self.like.element_spec

    def cardinality(self) -> int:
        return -2

    def describe(self) -> str:
        return self.like.describe()
