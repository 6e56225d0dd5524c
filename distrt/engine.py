"""The engine: which algorithm a call takes, and how it is run (layer 4).

May import: collectives, health, kernels, transport, settings, arrays, reduce_op,
errors. general.py is the only user. Ranks of one host that share memory use
``direct`` for NumPy arrays; everything else goes around the ring or from rank to
rank in messages. The choice depends on what is equal on all ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from distrt.arrays import DTYPES, DType, is_cupy
from distrt.collectives import schedule
from distrt.collectives.direct import VERBS, Direct, MismatchError
from distrt.collectives.exchange import Exchange, Move
from distrt.collectives.ring import Ring, Slots
from distrt.collectives.schedule import Span
from distrt.errors import PeerError
from distrt.health.fingerprint import Fingerprints
from distrt.kernels import kernels_for
from distrt.reduce_op import ReduceOp
from distrt.settings import Settings
from distrt.transport.base import Transport
from distrt.transport.shared_memory import Node

__all__ = ["Engine"]

_BYTES = DTYPES["u8"]


@final
class _NeverQuick:
    """What stands for the channel where the ranks have none: no call is quick."""

    held = 0
    busy = False

    def unsynchronised(self, on: bool) -> None:
        """Messages cannot do without waiting."""

    def quick_all_reduce(self, value: Any, op: Any, out: Any) -> None:
        """Leave the call to the general way."""

    quick_reduce_scatter = quick_all_gather = quick_broadcast = quick_all_to_all = quick_all_reduce


@final
class Engine:
    """The algorithms over the ranks of a transport. All ranks must construct it.

    Every call begins with ``agree``; what follows it is equal on all ranks. All
    arrays are flat and contiguous, of a kernel row's dtype (bytes where they only move).

    Attributes:
      direct: the shared-memory algorithms, where all ranks are on one host.
      quick: its channel, or what never takes a call.
    """

    def __init__(self, transport: Transport, settings: Settings, node: Node | None) -> None:
        self._transport, self._settings = transport, settings
        self._fingerprints = Fingerprints(transport)
        self._slots = Slots()
        self._first = 0
        self._node = node
        self.direct: Direct | None = None
        shares = node is not None and len(node.bases) == transport.size > 1
        if shares and settings.algorithm != "ring":
            assert node is not None
            self.direct = Direct(transport, node, settings, self._look)
        self.quick: Any = _NeverQuick() if self.direct is None else self.direct.channel

    def empty(self, like: Any, count: int, dtype: Any) -> Any:
        """Return a flat array that this engine's algorithms use where it lies."""
        if self._node is None or is_cupy(like):
            return kernels_for(like).empty(count, np.dtype(dtype))
        return self._node.arena.heap.empty(count, dtype)

    def algorithm_for(self, verb: str) -> str:
        """Return the name of the algorithm that NumPy arrays take in ``verb``."""
        if self.direct is not None:
            return "direct"
        return "exchange" if verb in ("all_to_all", "gather", "scatter") else "ring"

    # ----------------------------------------------------------------- checks

    def agree(self, text: str, quick: Callable[[Direct], int] | None = None) -> None:
        """Compare the call with the other ranks'.

        Args:
          text: the call in words.
          quick: given where the call is one that the quick way may make as well: its
            fingerprint, which then travels with the collective that follows.
        """
        direct = self.direct
        if direct is None:
            self._fingerprints.agree(text)
            return
        self._fingerprints.call = f"call #{self._transport.calls + 1} {text}"
        if direct.channel.given_up:
            # A quick call was: the transport learns it now, and refuses this one.
            self._transport.give_up(lambda: False)
            self._drive(lambda: True)
        if quick is not None:
            self._first = quick(direct)
        else:
            self._drive(direct.agree(text))

    def explain(self, text: str) -> None:
        """Raise what all ranks called; after a quick call that found them different."""
        self._fingerprints.explain(f"call #{self._transport.calls} {text}")

    def _look(self, seconds: float, aborted: int, verb: int, value: np.ndarray) -> None:
        if aborted >= 0:
            raise PeerError(Direct.lost(aborted))
        shape = f"{value.dtype.name}{list(value.shape)}"
        self._transport.look(f"call #{self._transport.calls} {VERBS[verb]} {shape}", seconds)

    def _drive(self, step: Callable[[], bool]) -> None:
        # All ranks see a mismatch at the same barrier and none goes on, so the call has
        # ended, and the next one finds everything in order.
        differs = False

        def guarded() -> bool:
            nonlocal differs
            try:
                return step()
            except MismatchError:
                differs = True
                return True

        try:
            self._transport.drive(guarded, self._fingerprints.call)
        except BaseException:
            if self.direct is not None:
                self.direct.channel.give_up()
            raise
        if differs:
            self._fingerprints.explain(self._fingerprints.call)

    def _direct_for(self, source: Any) -> Direct | None:
        return None if is_cupy(source) else self.direct

    def _digest(self) -> int:
        digest, self._first = self._first, 0
        return digest

    # -------------------------------------------------------------- reductions

    def all_reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float
    ) -> None:
        """Reduce ``source`` into ``target``, which may be the same object."""
        if direct := self._direct_for(source):
            self._drive(direct.fold(self._digest(), row, op, source, target, divisor))
            return
        size, rank = self._transport.size, self._transport.rank
        chunks = schedule.chunks(source.size, size)
        program = schedule.all_reduce(size, rank)
        self._ring(program, chunks, row, source, target, op, divisor)

    def reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float, root: int
    ) -> None:
        """As ``all_reduce``, but only ``root`` has a target."""
        if direct := self._direct_for(source):
            self._drive(direct.fold(self._digest(), row, op, source, target, divisor, root=root))
            return
        program = schedule.reduce(self._transport.size, self._transport.rank, root)
        chunks = schedule.chunks(source.size, 1)
        self._ring(program, chunks, row, source, target, op, divisor)

    def reduce_scatter(
        self,
        row: DType,
        source: Any,
        target: Any,
        op: ReduceOp,
        divisor: float,
        chunks: Sequence[Span],
    ) -> None:
        """Reduce chunk r of ``source`` into the target of rank r."""
        if direct := self._direct_for(source):
            digest = self._digest()
            self._drive(direct.fold(digest, row, op, source, target, divisor, chunks=chunks))
            return
        size, rank = self._transport.size, self._transport.rank
        whole = kernels_for(source).empty(source.size, source.dtype)
        program = schedule.reduce_scatter(size, rank)
        self._ring(program, chunks, row, source, whole, op, divisor)
        target[...] = whole[chunks[rank].slice]

    # ------------------------------------------------------------------- moves

    def broadcast(self, source: Any, target: Any, root: int) -> None:
        """Copy the bytes of ``root``'s source into every target."""
        rank, size = self._transport.rank, self._transport.size
        if direct := self._direct_for(source):
            pulls = [(0, target.size if other == root else 0, 0) for other in range(size)]
            offered = source if rank == root else None
            self._drive(direct.move(self._digest(), offered, target, pulls))
            return
        if rank == root and target is not source:
            target[...] = source
        program = schedule.broadcast(size, rank, root)
        self._ring(program, schedule.chunks(target.size, 1), _BYTES, target, target)

    def all_gather(self, source: Any) -> tuple[Any, list[int]]:
        """Return all ranks' bytes, joined in rank order, and how many each had."""
        if direct := self._direct_for(source):
            return self._gathered(direct, source, wanted=True)
        lengths = self.table([source.size])[:, 0].tolist()
        return self._ring_gather(source, lengths), lengths

    def gather(self, source: Any, root: int) -> tuple[Any, list[int]]:
        """As ``all_gather``, but only ``root`` gets the bytes; the others None."""
        rank, size = self._transport.rank, self._transport.size
        if direct := self._direct_for(source):
            return self._gathered(direct, source, wanted=rank == root)
        lengths = self.table([source.size])[:, 0].tolist()
        if rank != root:
            self._exchange([Move(root, source)], [])
            return None, lengths
        target = kernels_for(source).empty(sum(lengths), source.dtype)
        spans = schedule.joined(lengths)
        target[spans[root].slice] = source
        others = [r for r in range(size) if r != root]
        self._exchange([], [Move(r, target[spans[r].slice]) for r in others])
        return target, lengths

    def pairs(self, source: Any, target: Any, table: np.ndarray) -> None:
        """Move ``table[s, d]`` bytes from the source of s to the target of d, in rank order."""
        rank, size = self._transport.rank, self._transport.size
        starts = np.cumsum(table, axis=1) - table
        into = schedule.joined(table[:, rank].tolist())
        if direct := self._direct_for(source):
            pulls = [
                (int(starts[other, rank]), into[other].length, into[other].offset)
                for other in range(size)
            ]
            offered = source if table[rank].any() else None
            self._drive(direct.move(self._digest(), offered, target, pulls))
            return
        out = schedule.joined(table[rank].tolist())
        target[into[rank].slice] = source[out[rank].slice]
        others = [r for r in range(size) if r != rank]
        self._exchange(
            [Move(r, source[out[r].slice]) for r in others],
            [Move(r, target[into[r].slice]) for r in others],
        )

    def objects(self, root: int | None, payload: bytes) -> Any:
        """Return all ranks' payloads or, with a root, the root's."""
        if root is None:
            return self._transport.all_gather_bytes(payload)
        return self._transport.broadcast_bytes(payload, root)

    def _gathered(self, direct: Direct, source: Any, wanted: bool) -> tuple[Any, list[int]]:
        lengths: list[int] = []
        targets: list[Any] = []

        def allocate(offered: list[int]) -> Any:
            lengths[:] = offered
            targets.append(np.empty(sum(offered), np.uint8) if wanted else None)
            return targets[0]

        self._drive(direct.gather(self._digest(), source, allocate))
        return targets[0], lengths

    def table(self, own: Sequence[int]) -> np.ndarray:
        """Return all ranks' rows of int64: [size, len(own)]."""
        size = self._transport.size
        row = np.array(own, np.int64).view(np.uint8)
        if self.direct is not None:
            table = self._gathered(self.direct, row, wanted=True)[0]
        else:
            table = self._ring_gather(row, [row.size] * size)
        return np.asarray(table.view(np.int64).reshape(size, len(own)))

    def _ring_gather(self, source: Any, lengths: Sequence[int]) -> Any:
        size, rank = self._transport.size, self._transport.rank
        spans = schedule.joined(lengths)
        target = kernels_for(source).empty(sum(lengths), source.dtype)
        target[spans[rank].slice] = source
        self._ring(schedule.all_gather(size, rank), spans, _BYTES, target, target)
        return target

    def _exchange(self, sends: list[Move], receives: list[Move]) -> None:
        self._drive(Exchange(self._transport, sends, receives).step)

    def _ring(
        self,
        program: Sequence[schedule.Hop],
        chunks: Sequence[Span],
        row: DType,
        source: Any,
        target: Any,
        op: ReduceOp | None = None,
        divisor: float = 1.0,
    ) -> None:
        if self._transport.size == 1:
            if target is not source:
                target[...] = source
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
            divisor=divisor,
            slots=self._slots,
            segment_bytes=self._settings.segment_bytes,
        )
        self._drive(ring.step)
