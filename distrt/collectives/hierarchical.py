"""All-reduce over several hosts whose ranks share memory (layer 3: ``hierarchical``).

May import: transport, kernels, arrays, reduce_op, collectives.{direct,ring,schedule}.

1. Inside each node, ``direct``: rank l of the node reduces part l of all its ranks' buffers.
2. Between the nodes, one ring for each local rank, all at once: rank l of every node
   all-reduces part l with rank l of the others.
3. Inside each node, ``direct`` again: every rank takes the parts of the others.

Steps and bytes for h nodes and a buffer of B bytes: 2 (h - 1) steps around the rings;
each node sends and receives 2 B (h - 1) / h, where a ring of all n ranks would need
2 B (n - 1) / n. Nodes may have unequal numbers of ranks: there are as many rings as the
smallest node has ranks, and the surplus ranks of the others own no part.

Half types travel as float32 until the last fold and are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import numpy as np

from distrt.arrays import DTYPES, DType
from distrt.collectives import schedule
from distrt.collectives.direct import Direct
from distrt.collectives.ring import Ring, Slots
from distrt.kernels import kernels_for
from distrt.reduce_op import ReduceOp
from distrt.settings import Settings
from distrt.transport.base import Transport
from distrt.transport.shared_memory import Node
from distrt.transport.subset import Subset

__all__ = ["Hierarchical"]


@final
class Hierarchical:
    """The rings between the nodes of ``transport``, and the channel inside this one.

    All ranks must construct it. Calls are made one at a time, after all ranks have agreed
    on them: nothing here compares calls.

    Args:
      transport: the ranks of all nodes.
      groups: the ranks of each node, equal on all ranks.
      node: the shared memory of this rank's group, or None where it is alone.
      settings: equal on all ranks.
      slots: scratch shared by the calls of one communicator.
      patience: how long the next step may block, in seconds.

    Attributes:
      direct: the algorithms inside this node, or None where this rank is alone.
    """

    def __init__(
        self,
        transport: Transport,
        groups: Sequence[Sequence[int]],
        node: Node | None,
        settings: Settings,
        slots: Slots,
        patience: Callable[[], float] = lambda: 0.0,
    ) -> None:
        own = next(group for group in groups if transport.rank in group)
        self._rails = min(len(group) for group in groups)
        self._place, self._neighbours = own.index(transport.rank), len(own)
        self._rail: Subset | None = None
        if self._place < self._rails:
            self._rail = Subset(transport, [group[self._place] for group in groups])
        self._slots, self._segment_bytes = slots, settings.segment_bytes
        self.direct: Direct | None = None
        if len(own) > 1:
            assert node is not None
            self.direct = Direct(Subset(transport, own), node, settings, patience=patience)

    def all_reduce(
        self, row: DType, op: ReduceOp, source: Any, target: Any, divisor: float
    ) -> Generator[None, None, None]:
        """Reduce flat NumPy ``source`` into ``target``, which may be the same object.

        Yields where it must wait.

        Args:
          row: the kernel row of the elements, equal on all ranks.
          op: the reduction; a mean folds as a sum.
          source: this rank's input, of one length on all ranks.
          target: the result.
          divisor: the last fold divides by it.
        """
        kernels, wide = kernels_for(source), DTYPES[row.accumulator]
        spans = [
            *schedule.chunks(source.size, self._rails),
            *[schedule.Span(0, 0)] * (self._neighbours - self._rails),
        ]
        own = spans[self._place]
        # The very object, where it is all of it: that is how the ring knows a call in place.
        whole, part = source, target if own.length == target.size else target[own.slice]
        if wide is not row:
            whole, part = (kernels.empty(count, wide.numpy) for count in (source.size, own.length))
            kernels.widen(row, whole, source)
        if self.direct is not None:
            yield from _until(self.direct.fold(0, wide, op, whole, part, 1.0, chunks=spans))
            whole = part
        if self._rail is not None:
            yield from _until(self._ring(self._rail, wide, op, whole, part, divisor).step)
        if wide is not row:
            self._round(row, part, target[own.slice])
        if self.direct is not None:
            yield from _until(self._share(self.direct, target, spans))

    def _round(self, row: DType, wide: Any, target: Any) -> None:
        kernels, limit = kernels_for(wide), max(1, self._segment_bytes // wide.dtype.itemsize)
        # The kernel that rounds takes an operand of the half type: one of which MAX keeps nothing.
        least = self._slots.least(kernels, row, limit)
        for span in schedule.segments(schedule.Span(0, wide.size), limit):
            out, total = target[span.slice], wide[span.slice]
            kernels.finish(ReduceOp.MAX, row, out, total, least[: span.length], 1.0)

    def _ring(
        self, rail: Subset, row: DType, op: ReduceOp, source: Any, target: Any, divisor: float
    ) -> Ring:
        return Ring(
            rail,
            kernels_for(source),
            schedule.all_reduce(rail.size, rail.rank),
            schedule.chunks(source.size, rail.size),
            row=row,
            op=op,
            source=source,
            target=target,
            divisor=divisor,
            slots=self._slots,
            segment_bytes=self._segment_bytes,
        )

    def _share(
        self, direct: Direct, target: Any, spans: Sequence[schedule.Span]
    ) -> Callable[[], bool]:
        itemsize, own = target.dtype.itemsize, spans[self._place]
        pulls = [(0, span.length * itemsize, span.offset * itemsize) for span in spans]
        pulls[self._place] = (0, 0, 0)
        offered = target[own.slice].view(np.uint8) if own.length else None
        return direct.move(0, offered, target.view(np.uint8), pulls)


def _until(step: Callable[[], bool]) -> Generator[None, None, None]:
    while not step():
        yield
