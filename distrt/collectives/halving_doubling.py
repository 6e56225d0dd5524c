"""All-reduce in pairs, for short messages between hosts (layer 3: ``halving_doubling``).

May import: kernels, transport, collectives.schedule, collectives.ring (its scratch), arrays,
reduce_op. Where the ring takes 2 (n - 1) steps, this takes about 2 log2 n, so it wins while
a step's latency counts for more than the bytes. Any number of ranks.

Steps and bytes for n ranks, p the largest power of two in n, and a buffer of B bytes, each rank:

    up to halving_bytes    log2 p steps, B log2 p sent             (recursive doubling)
    above                  2 log2 p steps, 2 B (p - 1) / p sent    (halving, then doubling)
    n is not p             2 steps more, B sent in one of them

Both fold alike, in the order of the ranks: the same bits, whatever the limit is. A
run is a resumable ``step()`` that never blocks. Half types travel as float32 until the last
fold and are rounded once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from distrt.arrays import DTYPES, DType
from distrt.collectives import schedule
from distrt.collectives.ring import Slots
from distrt.collectives.schedule import Action, Round, Span, segments
from distrt.kernels.base import Kernels
from distrt.reduce_op import ReduceOp
from distrt.transport.base import Bytes, Request, Tag, Transport

__all__ = ["HalvingDoubling", "fold_alike"]

_NOTHING = Span(0, 0)


class _Leg(NamedTuple):
    """A segment each way, posted, not yet acted upon."""

    requests: list[Request]
    received: Span
    view: Any
    buffer: Bytes | None
    slot: Any


@final
class HalvingDoubling:
    """One all_reduce on flat buffers.

    Args:
      transport: the ranks; with one there is nothing to do, and ``target`` is left alone.
      kernels: the arithmetic for the memory of ``source`` and ``target``.
      row: the kernel row of the elements (no bool, no complex: view them first).
      op: the reduction.
      source: this rank's input, 1-D contiguous.
      target: the result, 1-D contiguous. May be ``source``.
      divisor: the last fold divides by it.
      slots: scratch shared by the calls of one communicator.
      segment_bytes: the longest message, in bytes of the element type; equal on all ranks.
      halving_bytes: the longest buffer that is sent whole, in bytes; equal on all ranks.
        Measured on 2 to 4 ranks of one host: whole is ahead at 256 KiB, level or behind at
        1 MiB. By the model it is even at 160 KiB for 4 ranks and steps of 40 us at 1 GB/s.
      window: segments under way at once.
    """

    def __init__(
        self,
        transport: Transport,
        kernels: Kernels,
        *,
        row: DType,
        op: ReduceOp,
        source: Any,
        target: Any,
        divisor: float = 1.0,
        slots: Slots,
        segment_bytes: int,
        halving_bytes: int = 1 << 17,
        window: int = 4,
    ) -> None:
        self._transport, self._kernels = transport, kernels
        self._row, self._wide = row, DTYPES[row.accumulator]
        self._op, self._divisor = op, divisor
        self._source, self._target = source, target
        self._slots, self._window = slots, window
        self._limit = max(1, segment_bytes // row.numpy.itemsize)
        short = source.size * row.numpy.itemsize <= halving_bytes
        make = schedule.recursive_doubling if short else schedule.halving_doubling
        self._program = make(transport.size, transport.rank, source.size)
        # What is sent: the partial result, from where it lies, later the complete one.
        self._held = source
        self._running = self._run()

    def step(self) -> bool:
        """Do what can be done now; return whether all is done. Never blocks."""
        return next(self._running, True)

    def _run(self) -> Iterator[bool]:
        """Yield False where this rank must wait."""
        if self._wide is not self._row:
            self._held = self._kernels.empty(self._source.size, self._wide.numpy)
            self._kernels.widen(self._row, self._held, self._source)
        for meeting in self._program:
            yield from self._meet(meeting)
            # Partial results of half types stay in their float32 until they are complete.
            if meeting.action is Action.FINISH or (
                meeting.action is Action.FOLD and self._wide is self._row
            ):
                self._held = self._target

    def _meet(self, meeting: Round) -> Iterator[bool]:
        # Both ranks send before they wait, segment by segment, so neither waits in vain. A
        # leg is acted upon when both its ways are done: in place, a fold overwrites
        # what has just been sent. What one meeting folds is what the next one sends, so
        # the next begins when this one has ended.
        posted: deque[_Leg] = deque()
        both = itertools.zip_longest(
            segments(meeting.sent, self._limit),
            segments(meeting.received, self._limit),
            fillvalue=_NOTHING,
        )
        for sent, received in both:
            if len(posted) == self._window:
                yield from self._settle(meeting, posted.popleft())
            posted.append(self._start(meeting, sent, received))
        while posted:
            yield from self._settle(meeting, posted.popleft())

    def _start(self, meeting: Round, sent: Span, received: Span) -> _Leg:
        requests, view, buffer, slot = [], None, None, None
        if received.length:
            if meeting.action is Action.STORE:
                view = self._target[received.slice]
            else:
                slot = self._slots.take(self._kernels, self._row, self._limit)
                view = slot[: received.length]
            buffer = self._kernels.landing(view)
            requests.append(self._transport.irecv(buffer, meeting.peer, Tag.PAIRS))
        if sent.length:
            out = self._kernels.stage_out(self._held[sent.slice])
            requests.append(self._transport.isend(out, meeting.peer, Tag.PAIRS))
        return _Leg(requests, received, view, buffer, slot)

    def _settle(self, meeting: Round, leg: _Leg) -> Iterator[bool]:
        for request in leg.requests:
            while not request.done():
                yield False
        if leg.buffer is None:
            return
        self._kernels.land(leg.view, leg.buffer)
        if leg.slot is not None:
            mine, theirs = self._held[leg.received.slice], leg.view
            ordered = (mine, theirs) if self._transport.rank < meeting.peer else (theirs, mine)
            fold = self._finish if meeting.action is Action.FINISH else self._fold
            fold(leg.received, *ordered)
            self._slots.give(self._kernels, self._row, leg.slot)

    def _fold(self, span: Span, low: Any, high: Any) -> None:
        into = self._target if self._wide is self._row else self._held
        self._kernels.fold(self._op, self._wide, into[span.slice], low, high)

    def _finish(self, span: Span, low: Any, high: Any) -> None:
        out = self._target[span.slice]
        if self._wide is self._row:
            self._kernels.finish(self._op, self._row, out, low, high, self._divisor)
            return
        # Both operands are float32, and the kernel that rounds takes one of a half type:
        # it gets the least value there is, of which MAX keeps nothing, whatever the op.
        self._fold(span, low, high)
        least = self._slots.least(self._kernels, self._row, self._limit)[: span.length]
        total = self._held[span.slice]
        self._kernels.finish(ReduceOp.MAX, self._row, out, total, least, self._divisor)


def fold_alike(
    kernels: Kernels,
    blocks: Sequence[Any],
    *,
    row: DType,
    op: ReduceOp,
    target: Any,
    divisor: float,
    slots: Slots,
) -> None:
    """Fold all ranks' inputs, which this rank has, in the order of the meetings: the same bits.

    For arrays so short that every rank gets all of them with the fingerprint of the call.

    Args:
      kernels, row, op, target, divisor, slots: see ``HalvingDoubling``.
      blocks: the inputs of two or more ranks, in rank order; they are overwritten.
    """
    wide, parts = DTYPES[row.accumulator], list(blocks)
    if wide is not row:
        for number, part in enumerate(blocks):
            parts[number] = kernels.empty(part.size, wide.numpy)
            kernels.widen(row, parts[number], part)
    # First the surplus ranks with their neighbours, then neighbours with neighbours.
    surplus = len(parts) - (1 << (len(parts).bit_length() - 1))
    pairs = surplus
    while len(parts) > 2:
        pairs = pairs or len(parts) // 2
        for low, high in zip(parts[: 2 * pairs : 2], parts[1 : 2 * pairs : 2], strict=True):
            kernels.fold(op, wide, low, low, high)
        parts = [*parts[: 2 * pairs : 2], *parts[2 * pairs :]]
        pairs = 0
    low, high = parts
    if wide is row:
        kernels.finish(op, row, target, low, high, divisor)
        return
    kernels.fold(op, wide, low, low, high)
    least = slots.least(kernels, row, target.size)
    kernels.finish(ReduceOp.MAX, row, target, low, least, divisor)
