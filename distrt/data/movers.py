"""Transformations that move whole elements about (data room, layer 5).

May import: pipeline, prefetch. Shuffle, repeat, take, skip and shard move handles; a
prefetch makes elements ahead of time and hands over the same ones.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from distrt.data.pipeline import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Epoch,
    Mover,
    Node,
    Stream,
    runs_of,
)
from distrt.data.prefetch import prefetched

__all__ = ["Prefetch", "Repeat", "Shard", "Shuffle", "Skip", "Take"]

# Random numbers are drawn in blocks: one call of the generator per pick costs more than the pick.
_PICKS = 1024


@final
@dataclass(frozen=True, eq=False)
class Prefetch(Stream):
    """Elements made ahead in a thread; its handle is the element itself."""

    settled = True
    splits = True
    upstream: Node
    buffer_size: int

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        return self.handles_from(epoch, 0)

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[Any]:
        upstream = self.upstream
        made = (upstream.fetch(handle) for handle in upstream.handles_from(epoch, start))
        return prefetched(made, self.buffer_size)

    def example(self, variant: int) -> Any:
        return self.upstream.example(variant)

    @property
    def element_spec(self) -> Any:
        return self.upstream.element_spec

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        return f"{self.upstream.describe()}.prefetch({self.buffer_size})"


@final
@dataclass(frozen=True, eq=False)
class Shuffle(Mover):
    """Each element picked uniformly from a buffer that is refilled in order, as in tf.data.

    Attributes:
      seed: of the generator, with the epoch where ``reshuffle``.
      drawn: True where nobody gave a seed, so the ranks must take rank 0's.
    """

    upstream: Node
    buffer_size: int
    seed: int
    drawn: bool
    reshuffle: bool

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        # In runs, so that Python's own speed counts only where a buffer is refilled.
        return itertools.chain.from_iterable(self._runs(epoch))

    def blocks(self, epoch: Epoch, start: int, size: int) -> Iterator[Sequence[Any]]:
        rows = self.upstream.cardinality()
        if not 0 < rows <= self.buffer_size:
            return super().blocks(epoch, start, size)
        buffer = next(self.upstream.blocks(epoch, 0, rows), ())
        order = self._generator(epoch).permutation(len(buffer))
        return runs_of(_ordered(buffer, order)[start:], size)

    def _runs(self, epoch: Epoch) -> Iterator[Any]:
        """Yield the elements picked while the buffer is refilled, and those picked at last."""
        generator, upstream = self._generator(epoch), self.upstream.handles(epoch)
        buffer = list(itertools.islice(upstream, self.buffer_size))
        yield _refilled(buffer, upstream, _picks(generator, len(buffer)))
        # Uniform picks from a buffer that is not refilled are a permutation of it.
        yield _ordered(buffer, generator.permutation(len(buffer)))

    def _generator(self, epoch: Epoch) -> np.random.Generator:
        entropy = (self.seed % 2**64, *(epoch if self.reshuffle else ()))
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        seed = None if self.drawn else self.seed
        return (
            f"{self.upstream.describe()}.shuffle({self.buffer_size}, seed={seed}, "
            f"reshuffle_each_iteration={self.reshuffle})"
        )


def _refilled(buffer: list[Any], upstream: Iterator[Any], picks: Iterator[int]) -> Iterator[Any]:
    for handle, pick in zip(upstream, picks, strict=False):
        yield buffer[pick]
        buffer[pick] = handle


def _ordered(buffer: Any, order: np.ndarray) -> Any:
    if isinstance(buffer, np.ndarray):
        return buffer[order]
    return [buffer[pick] for pick in order.tolist()]


def _picks(generator: np.random.Generator, bound: int) -> Iterator[int]:
    while True:
        yield from generator.integers(bound, size=_PICKS).tolist()


@final
@dataclass(frozen=True, eq=False)
class Repeat(Mover):
    """``count`` passes, each with an epoch of its own; without end where ``count`` is negative."""

    upstream: Node
    count: int

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        for repetition in itertools.count() if self.count < 0 else range(self.count):
            empty = True
            for handle in self.upstream.handles((*epoch, repetition)):
                empty = False
                yield handle
            if empty:
                return

    def cardinality(self) -> int:
        elements = self.upstream.cardinality()
        if elements == 0 or self.count == 0:
            return 0
        if self.count < 0:
            return INFINITE_CARDINALITY
        return elements * self.count if elements > 0 else elements

    def describe(self) -> str:
        return f"{self.upstream.describe()}.repeat({self.count})"


@final
@dataclass(frozen=True, eq=False)
class Take(Mover):
    """The first ``count`` elements; all where ``count`` is negative."""

    upstream: Node
    count: int

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        upstream = self.upstream.handles(epoch)
        return upstream if self.count < 0 else itertools.islice(upstream, self.count)

    def cardinality(self) -> int:
        elements = self.upstream.cardinality()
        if self.count < 0 or elements == UNKNOWN_CARDINALITY:
            return elements
        return self.count if elements == INFINITE_CARDINALITY else min(self.count, elements)

    def describe(self) -> str:
        return f"{self.upstream.describe()}.take({self.count})"


@final
@dataclass(frozen=True, eq=False)
class Skip(Mover):
    """All but the first ``count`` elements; none where ``count`` is negative."""

    upstream: Node
    count: int

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        if self.count < 0:
            return iter(())
        return itertools.islice(self.upstream.handles(epoch), self.count, None)

    def example(self, variant: int) -> Any:
        return self.upstream.example_after(max(self.count, 0), variant)

    def cardinality(self) -> int:
        elements = self.upstream.cardinality()
        if self.count < 0:
            return 0
        return elements if elements < 0 else max(elements - self.count, 0)

    def describe(self) -> str:
        return f"{self.upstream.describe()}.skip({self.count})"


@final
@dataclass(frozen=True, eq=False)
class Shard(Mover):
    """Elements ``index``, ``index + num_shards``, …; see ``Dataset.shard``."""

    upstream: Node
    num_shards: int
    index: int

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        return itertools.islice(self.upstream.handles(epoch), self.index, None, self.num_shards)

    def cardinality(self) -> int:
        elements = self.upstream.cardinality()
        return elements if elements < 0 else len(range(self.index, elements, self.num_shards))

    def describe(self) -> str:
        return f"{self.upstream.describe()}.shard({self.num_shards}, {self.index})"
