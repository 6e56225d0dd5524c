"""The pipelined ring over any transport (layer 3).

May import: kernels, transport, collectives.schedule, arrays, reduce_op.

Each rank receives only from its left neighbour and sends only to its right one.
Steps and bytes for n ranks and a buffer of B bytes, each rank:

    all_reduce      2 (n - 1) steps, 2 B (n - 1) / n sent
    reduce_scatter, all_gather    n - 1 steps, B (n - 1) / n sent
    broadcast, reduce             n - 1 steps, B sent (pipelined along the ring)

A run is a resumable ``step()`` that never blocks. Chunks travel in segments, so
no message is ever longer than ``segment_bytes`` and buffers have no upper limit.
Partial results of half types travel as float32 and are rounded once, at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from distrt.arrays import DTYPES, DType
from distrt.collectives.schedule import Action, Hop, Span, segments
from distrt.kernels.base import Kernels
from distrt.reduce_op import ReduceOp
from distrt.transport.base import Bytes, Request, Tag, Transport

__all__ = ["Ring", "Slots"]


@final
class Slots:
    """Segment-sized scratch buffers, kept between calls so that they stay in the cache."""

    _KEEP = 16

    def __init__(self) -> None:
        self._free: dict[tuple[type[Kernels], str, int], list[Any]] = {}
        self._least: dict[tuple[type[Kernels], str, int], Any] = {}

    def take(self, kernels: Kernels, row: DType, count: int) -> Any:
        """Return a buffer of ``count`` accumulators of ``row``."""
        free = self._free.get((type(kernels), row.accumulator, count))
        return free.pop() if free else kernels.empty(count, DTYPES[row.accumulator].numpy)

    def give(self, kernels: Kernels, row: DType, slot: Any) -> None:
        """Take ``slot`` back."""
        free = self._free.setdefault((type(kernels), row.accumulator, slot.size), [])
        if len(free) < self._KEEP:
            free.append(slot)

    def least(self, kernels: Kernels, row: DType, count: int) -> Any:
        """Return ``count`` times minus infinity in ``row``, a floating one; not to be written."""
        key = type(kernels), row.name, count
        if key not in self._least:
            word = np.dtype(f"u{row.numpy.itemsize}")
            bits = kernels.empty(count, word)
            bits.fill(np.array(-np.inf, row.numpy).view(word)[()])
            self._least[key] = bits.view(row.numpy)
        return self._least[key]


class _Leg(NamedTuple):
    """A segment at this rank: posted, not yet acted upon."""

    hop: Hop
    span: Span
    request: Request | None
    view: Any
    buffer: Bytes | None
    slot: Any


class _Sent(NamedTuple):
    """A segment on its way to the right neighbour."""

    request: Request
    from_source: bool
    slot: Any


@final
class Ring:
    """One collective on flat buffers, following a schedule.

    Args:
      transport: at least two ranks.
      kernels: the arithmetic for the memory of ``source`` and ``target``.
      program: this rank's hops, of ``schedule``.
      chunks: the spans of the chunks, equal on all ranks.
      row: the kernel row of the elements (no bool, no complex: view them first).
      op: the reduction, or None where the call only moves bytes.
      source: this rank's input, 1-D contiguous, or None where the program loads nothing.
      target: the result, 1-D contiguous, or None where nothing is stored. May be ``source``;
        of a reduce_scatter also this rank's own chunk of ``source``.
      target_offset: which element of the whole buffer the target's first one is: that of
        this rank's chunk where the target holds no other.
      divisor: the last fold divides by it.
      slots: scratch shared by the calls of one communicator.
      segment_bytes: the longest message, in bytes of the element type; equal on all ranks.
      window: receives posted ahead; at least two segments are in flight.
    """

    def __init__(
        self,
        transport: Transport,
        kernels: Kernels,
        program: Sequence[Hop],
        chunks: Sequence[Span],
        *,
        row: DType,
        op: ReduceOp | None = None,
        source: Any = None,
        target: Any = None,
        target_offset: int = 0,
        divisor: float = 1.0,
        slots: Slots,
        segment_bytes: int,
        window: int = 4,
    ) -> None:
        self._transport, self._kernels = transport, kernels
        self._row, self._op, self._divisor = row, op, divisor
        self._source, self._target, self._target_offset = source, target, target_offset
        self._slots, self._window = slots, window
        self._limit = max(1, segment_bytes // row.numpy.itemsize)
        self._left = (transport.rank - 1) % transport.size
        self._right = (transport.rank + 1) % transport.size
        self._actions = {
            Action.LOAD: self._load,
            Action.FOLD: self._fold,
            Action.FINISH: self._finish,
            Action.STORE: self._store,
        }
        self._folds_left = sum(
            -(-chunks[hop.chunk].length // self._limit)
            for hop in program
            if hop.action in (Action.FOLD, Action.FINISH)
        )
        self._widens = op is not None and row.accumulator != row.name
        self._overwrites = op is not None and source is target
        self._plan = self._spans(program, chunks)
        self._next = next(self._plan, None)
        self._posted: deque[_Leg] = deque()
        self._receiving = 0
        self._sent: deque[_Sent] = deque()
        self._loads_in_flight = 0

    def _spans(self, program: Sequence[Hop], chunks: Sequence[Span]) -> Iterator[tuple[Hop, Span]]:
        for hop in program:
            for span in segments(chunks[hop.chunk], self._limit):
                yield hop, span

    def step(self) -> bool:
        """Do what can be done now; return whether all is done. Never blocks."""
        # Strictly in order: the right neighbour matches by order alone. Receives
        # are posted ahead of the legs that wait, so that the left neighbour can
        # always send; without that two full ranks would wait for each other.
        self._post()
        while self._posted:
            leg = self._posted[0]
            if leg.request is not None and not leg.request.done():
                break
            self._posted.popleft()
            self._act(leg)
            self._post()
        while self._sent and self._sent[0].request.done():
            sent = self._sent.popleft()
            self._loads_in_flight -= sent.from_source
            if sent.slot is not None:
                self._slots.give(self._kernels, self._row, sent.slot)
        return not (self._posted or self._sent or self._next)

    def _post(self) -> None:
        while self._next is not None and self._receiving < self._window:
            hop, span = self._next
            if hop.action is Action.STORE and not self._may_store():
                return
            self._next = next(self._plan, None)
            if not hop.receives:
                self._posted.append(_Leg(hop, span, None, None, None, None))
                continue
            slot = None
            if hop.action is Action.STORE:
                view = self._target_view(span)
            else:
                slot = self._slots.take(self._kernels, self._row, self._limit)
                view = slot[: span.length]
            buffer = self._kernels.landing(view)
            request = self._transport.irecv(buffer, self._left, Tag.RING)
            self._receiving += 1
            self._posted.append(_Leg(hop, span, request, view, buffer, slot))

    def _may_store(self) -> bool:
        # In place, results overwrite inputs: none may arrive while this rank's
        # input is still being folded or sent.
        return not (self._overwrites and (self._folds_left or self._loads_in_flight))

    def _target_view(self, span: Span) -> Any:
        return self._target[Span(span.offset - self._target_offset, span.length).slice]

    def _act(self, leg: _Leg) -> None:
        if leg.buffer is not None:
            self._receiving -= 1
            self._kernels.land(leg.view, leg.buffer)
        view, slot = self._actions[leg.hop.action](leg)
        if leg.hop.sends:
            request = self._transport.isend(self._kernels.stage_out(view), self._right, Tag.RING)
            from_source = leg.hop.action is Action.LOAD and slot is None
            self._loads_in_flight += from_source
            self._sent.append(_Sent(request, from_source, slot))
        elif slot is not None:
            self._slots.give(self._kernels, self._row, slot)

    # Each action returns the view to send on and the slot that it lies in, if any.

    def _load(self, leg: _Leg) -> tuple[Any, Any]:
        view = self._source[leg.span.slice]
        if not self._widens:
            return view, None
        slot = self._slots.take(self._kernels, self._row, self._limit)
        self._kernels.widen(self._row, slot[: leg.span.length], view)
        return slot[: leg.span.length], slot

    def _fold(self, leg: _Leg) -> tuple[Any, Any]:
        local = self._source[leg.span.slice]
        assert self._op is not None
        self._kernels.fold(self._op, self._row, leg.view, leg.view, local)
        self._folds_left -= 1
        return leg.view, leg.slot

    def _finish(self, leg: _Leg) -> tuple[Any, Any]:
        local = self._source[leg.span.slice]
        view = self._target_view(leg.span)
        assert self._op is not None
        self._kernels.finish(self._op, self._row, view, leg.view, local, self._divisor)
        self._folds_left -= 1
        self._slots.give(self._kernels, self._row, leg.slot)
        return view, None

    def _store(self, leg: _Leg) -> tuple[Any, Any]:
        return leg.view, None
