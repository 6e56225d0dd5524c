"""The verbs in messages between the ranks (layer 4): ring, halving_doubling, exchange.

May import: progress, collectives, kernels, transport, settings, arrays, reduce_op. engine.py is
the only user. Any kind of memory; the ranks have agreed on the call before. Every
method is a program (progress.py), except where it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from distrt.arrays import DTYPES, DType
from distrt.collectives import schedule
from distrt.collectives.exchange import Exchange, Move
from distrt.collectives.halving_doubling import HalvingDoubling, fold_alike
from distrt.collectives.ring import Ring, Slots
from distrt.collectives.schedule import Span
from distrt.kernels import kernels_for
from distrt.progress import Program
from distrt.reduce_op import ReduceOp
from distrt.settings import Settings
from distrt.transport.base import Transport

__all__ = ["Messages"]

_BYTES = DTYPES["u8"]


@final
class Messages:
    """The algorithms over ``transport``; the arguments are those of the engine's methods."""

    def __init__(self, transport: Transport, settings: Settings, slots: Slots) -> None:
        self._transport, self._settings, self._slots = transport, settings, slots

    # -------------------------------------------------------------- reductions

    def halving_doubling(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float
    ) -> Program[None]:
        """An all_reduce in pairs."""
        if self._alone(source, target):
            return
        algorithm = HalvingDoubling(
            self._transport,
            kernels_for(source),
            row=row,
            op=op,
            source=source,
            target=target,
            divisor=divisor,
            slots=self._slots,
            segment_bytes=self._settings.segment_bytes,
        )
        yield from _until(algorithm.step)

    def carried(
        self,
        blocks: np.ndarray,
        row: DType,
        source: Any,
        target: Any,
        op: ReduceOp,
        divisor: float,
    ) -> None:
        """End an all_reduce in pairs whose inputs have come with the fingerprint: no program."""
        fold_alike(
            kernels_for(source),
            [block.view(row.numpy) for block in blocks],
            row=row,
            op=op,
            target=target,
            divisor=divisor,
            slots=self._slots,
        )

    def all_reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float
    ) -> Program[None]:
        """An all_reduce around the ring."""
        size, rank = self._transport.size, self._transport.rank
        chunks = schedule.chunks(source.size, size)
        program = schedule.all_reduce(size, rank)
        return self._ring(program, chunks, row, source, target, op, divisor)

    def reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float, root: int
    ) -> Program[None]:
        """A reduce along the ring."""
        program = schedule.reduce(self._transport.size, self._transport.rank, root)
        chunks = schedule.chunks(source.size, 1)
        return self._ring(program, chunks, row, source, target, op, divisor)

    def reduce_scatter(
        self,
        row: DType,
        source: Any,
        target: Any,
        op: ReduceOp,
        divisor: float,
        chunks: Sequence[Span],
    ) -> Program[None]:
        """A reduce_scatter around the ring."""
        size, rank = self._transport.size, self._transport.rank
        program, offset = schedule.reduce_scatter(size, rank), chunks[rank].offset
        return self._ring(program, chunks, row, source, target, op, divisor, offset)

    # ------------------------------------------------------------------- moves

    def broadcast(self, source: Any, target: Any, root: int) -> Program[None]:
        """A broadcast along the ring."""
        size, rank = self._transport.size, self._transport.rank
        if rank == root and target is not source:
            target[...] = source
        program = schedule.broadcast(size, rank, root)
        yield from self._ring(program, schedule.chunks(target.size, 1), _BYTES, target, target)

    def all_gather(self, source: Any, lengths: Sequence[int]) -> Program[Any]:
        """Join all ranks' bytes, of which each has ``lengths``, around the ring."""
        size, rank = self._transport.size, self._transport.rank
        spans = schedule.joined(lengths)
        target = kernels_for(source).empty(sum(lengths), source.dtype)
        target[spans[rank].slice] = source
        yield from self._ring(schedule.all_gather(size, rank), spans, _BYTES, target, target)
        return target

    def gather(self, source: Any, lengths: Sequence[int], root: int) -> Program[Any]:
        """Join all ranks' bytes at ``root``; the others get None."""
        if self._transport.rank != root:
            yield from self._exchange([Move(root, source)], [])
            return None
        target = kernels_for(source).empty(sum(lengths), source.dtype)
        spans = enumerate(schedule.joined(lengths))
        moves = [Move(rank, target[span.slice]) for rank, span in spans]
        yield from self._exchange([Move(root, source)], moves)
        return target

    def pairs(self, source: Any, target: Any, table: np.ndarray) -> Program[None]:
        """Move ``table[s, d]`` bytes from the source of s to the target of d, in rank order."""
        rank = self._transport.rank
        out = enumerate(schedule.joined(table[rank].tolist()))
        into = enumerate(schedule.joined(table[:, rank].tolist()))
        return self._exchange(
            [Move(other, source[span.slice]) for other, span in out],
            [Move(other, target[span.slice]) for other, span in into],
        )

    # -------------------------------------------------------------- algorithms

    def _exchange(self, sends: list[Move], receives: list[Move]) -> Program[None]:
        return _until(Exchange(self._transport, sends, receives).step)

    def _alone(self, source: Any, target: Any) -> bool:
        if self._transport.size == 1 and target is not source:
            target[...] = source
        return self._transport.size == 1

    def _ring(
        self,
        program: Sequence[schedule.Hop],
        chunks: Sequence[Span],
        row: DType,
        source: Any,
        target: Any,
        op: ReduceOp | None = None,
        divisor: float = 1.0,
        target_offset: int = 0,
    ) -> Program[None]:
        if self._alone(source, target):
            return
        ring = Ring(
            self._transport,
            kernels_for(source),
            program,
            chunks,
            row=row,
            op=op,
            source=source,
            target=target,
            target_offset=target_offset,
            divisor=divisor,
            slots=self._slots,
            segment_bytes=self._settings.segment_bytes,
        )
        yield from _until(ring.step)


def _until(step: Callable[[], bool]) -> Program[None]:
    while not step():
        yield
