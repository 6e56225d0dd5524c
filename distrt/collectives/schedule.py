"""Ring schedules as pure integers (layer 3; imports nothing of distrt, touches no data).

A schedule says what one rank does with each *chunk* of a buffer, in order: a
chunk arrives from the left neighbour (rank - 1), something is done with it, and
it goes on to the right neighbour (rank + 1). Because a rank sends in the order
in which its right neighbour expects to receive, messages need no numbers. The
tests run these schedules for 1..64 ranks without moving a byte.

Chunks are then cut into *segments*, the unit of pipelining: while one segment
is folded the next ones travel.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Action",
    "Hop",
    "Span",
    "all_gather",
    "all_reduce",
    "broadcast",
    "chunks",
    "joined",
    "reduce",
    "reduce_scatter",
    "segments",
]


class Span(NamedTuple):
    """A piece of a flat buffer: ``[offset, offset + length)``, in elements."""

    offset: int
    length: int

    @property
    def slice(self) -> slice:
        """The piece as an index."""
        return slice(self.offset, self.offset + self.length)


class Action(enum.Enum):
    """What a rank does with a chunk that it holds.

    LOAD: it is this rank's own input (nothing arrives).
    FOLD: the arriving partial result is combined with this rank's input.
    FINISH: as FOLD, and the result is complete: it is rounded, scaled and stored.
    STORE: the arriving chunk is complete and is stored as it is.
    """

    LOAD = "load"
    FOLD = "fold"
    FINISH = "finish"
    STORE = "store"


class Hop(NamedTuple):
    """The stay of one chunk at one rank."""

    chunk: int
    action: Action
    sends: bool

    @property
    def receives(self) -> bool:
        """Whether the chunk arrives from the left neighbour."""
        return self.action is not Action.LOAD


def chunks(count: int, parts: int) -> tuple[Span, ...]:
    """Cut ``count`` elements into ``parts`` spans whose sizes differ by at most one."""
    size, longer = divmod(count, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return tuple(Span(a, b - a) for a, b in itertools.pairwise(starts))


def joined(lengths: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of parts of these lengths, laid one behind the other."""
    ends = list(itertools.accumulate(lengths))
    return tuple(Span(end - n, n) for n, end in zip(lengths, ends, strict=True))


def segments(span: Span, limit: int) -> Iterator[Span]:
    """Cut ``span`` into pieces of at most ``limit`` elements; an empty span has none."""
    end = span.offset + span.length
    for offset in range(span.offset, end, limit):
        yield Span(offset, min(limit, end - offset))


def reduce_scatter(size: int, rank: int) -> tuple[Hop, ...]:
    """Every rank ends with chunk ``rank`` complete. ``size - 1`` steps, 1 chunk sent in each.

    Chunk c starts at rank c + 1 and walks the ring until it reaches rank c,
    folded once at each rank on its way. Source: Patarasuk and Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    first = Hop((rank - 1) % size, Action.LOAD, True)
    middle = [Hop((rank - 2 - s) % size, Action.FOLD, True) for s in range(size - 2)]
    return (first, *middle, Hop(rank, Action.FINISH, False))


def all_gather(size: int, rank: int) -> tuple[Hop, ...]:
    """Every rank starts with chunk ``rank`` and ends with all. ``size - 1`` steps."""
    first = Hop(rank, Action.LOAD, True)
    return (first, *_gather_steps(size, rank))


def all_reduce(size: int, rank: int) -> tuple[Hop, ...]:
    """A reduce_scatter whose complete chunks go straight on into an all_gather.

    ``2 (size - 1)`` steps; each rank sends ``2 (size - 1) / size`` of the buffer.
    """
    *steps, last = reduce_scatter(size, rank)
    return (*steps, last._replace(sends=True), *_gather_steps(size, rank))


def _gather_steps(size: int, rank: int) -> list[Hop]:
    return [Hop((rank - 1 - s) % size, Action.STORE, s < size - 2) for s in range(size - 1)]


def broadcast(size: int, rank: int, root: int) -> tuple[Hop, ...]:
    """The one chunk walks from ``root`` around the ring, segment behind segment."""
    place = (rank - root) % size
    return (Hop(0, Action.LOAD if place == 0 else Action.STORE, place < size - 1),)


def reduce(size: int, rank: int, root: int) -> tuple[Hop, ...]:
    """The one chunk walks from ``root + 1`` to ``root`` and is folded at each rank."""
    place = (rank - root - 1) % size
    if place == size - 1:
        return (Hop(0, Action.FINISH, False),)
    return (Hop(0, Action.LOAD if place == 0 else Action.FOLD, True),)
