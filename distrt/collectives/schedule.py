"""Schedules as pure integers (layer 3; imports nothing of distrt, touches no data).

A schedule says what one rank does, in order. The tests run all of them for 1..64
ranks without moving a byte, scripts/simulate_scaling.py for thousands. There are two kinds:

- around the ring a rank does something with each *chunk* of a buffer: the chunk
  arrives from the left neighbour (rank - 1) and goes on to the right one (a ``Hop``);
- in pairs two ranks meet and give each other a piece of the buffer (a ``Round``).

A rank sends in the order in which the other one expects to receive, so messages
need no numbers. Chunks and pieces are then cut into *segments*, the unit of
pipelining: while one segment is folded the next ones travel.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Action",
    "Hop",
    "Round",
    "Span",
    "all_gather",
    "all_reduce",
    "broadcast",
    "chunks",
    "halving_doubling",
    "joined",
    "recursive_doubling",
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
    """What a rank does with what it holds.

    LOAD: it is this rank's own (nothing arrives).
    FOLD: the arriving partial result is combined with this rank's.
    FINISH: as FOLD, and the result is complete: it is rounded, scaled and stored.
    STORE: what arrives is complete and is stored as it is.
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


class Round(NamedTuple):
    """A meeting with ``peer``: ``sent`` goes there, ``received`` comes, then ``action``.

    What goes there is this rank's partial result as it was before the meeting, and complete
    once this rank has finished. An empty span travels as no message.
    """

    peer: int
    sent: Span
    received: Span
    action: Action


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


def recursive_doubling(size: int, rank: int, count: int) -> tuple[Round, ...]:
    """Every rank ends with all ``count`` elements complete, in the fewest steps.

    In round k, blocks of 2^k neighbouring ranks, which hold the same partial result, meet
    the blocks beside them, rank by rank, and both fold the whole buffer.

    ``log2 size`` steps, each sends the whole buffer; where ``size`` is no power of two,
    one more before and one more after (see ``_enter``).

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005.
    """
    whole, (before, after) = Span(0, count), _enter(size, rank, count)
    peers = _peers(size, rank)
    rounds = [Round(peer, whole, whole, Action.FOLD) for peer in peers]
    return (*before, *_finishing(rounds), *after)


def halving_doubling(size: int, rank: int, count: int) -> tuple[Round, ...]:
    """As ``recursive_doubling``, and folds in the same order, but sends less.

    A reduce_scatter in which two ranks that meet share the piece that both hold: each
    sends half of it and folds the other. Then the same meetings backwards, as an all_gather.

    ``2 log2 size`` steps, ``2 (size - 1) / size`` of the buffer sent; where ``size`` is
    no power of two, one more before and one more after, of the whole buffer.

    Source: Rabenseifner, "Optimization of collective reduction operations", 2004.
    """
    (before, after), peers = _enter(size, rank, count), _peers(size, rank)
    rounds, held = [], Span(0, count)
    for peer in peers:
        low, high = (
            Span(held.offset + half.offset, half.length) for half in chunks(held.length, 2)
        )
        held, sent = (low, high) if rank < peer else (high, low)
        rounds.append(Round(peer, sent, held, Action.FOLD))
    back = [Round(r.peer, r.received, r.sent, Action.STORE) for r in reversed(rounds)]
    return (*before, *_finishing(rounds), *back, *after)


def _enter(size: int, rank: int, count: int) -> tuple[list[Round], list[Round]]:
    """Return what ``rank`` does before and after the meetings of a power of two of ranks.

    The surplus ranks give their input to a neighbour and get the result from it: of the
    first ``2 surplus`` ranks each even one to the odd one behind it, so that blocks of
    neighbours stay blocks, and every fold is in the order of the ranks.
    """
    whole, nothing = Span(0, count), Span(0, 0)
    if rank >= 2 * _surplus(size):
        return [], []
    if rank % 2 == 0:
        give = Round(rank + 1, whole, nothing, Action.LOAD)
        return [give], [Round(rank + 1, nothing, whole, Action.STORE)]
    take = Round(rank - 1, nothing, whole, Action.FOLD)
    return [take], [Round(rank - 1, whole, nothing, Action.LOAD)]


def _surplus(size: int) -> int:
    return size - (1 << (size.bit_length() - 1))


def _peers(size: int, rank: int) -> list[int]:
    """Return whom ``rank`` meets, nearest first; a surplus rank meets none."""
    surplus = _surplus(size)
    paired = rank < 2 * surplus
    if paired and rank % 2 == 0:
        return []
    place = rank // 2 if paired else rank - surplus
    places = [place ^ (1 << k) for k in range(size.bit_length() - 1)]
    return [2 * at + 1 if at < surplus else at + surplus for at in places]


def _finishing(rounds: list[Round]) -> list[Round]:
    return [*rounds[:-1], *(r._replace(action=Action.FINISH) for r in rounds[-1:])]
