"""Collectives of one host's ranks through shared memory (layer 3: ``direct``).

May import: transport, kernels, arrays, reduce_op, errors, settings, and the
extension ``distrt._shared``, which does the work: csrc/shared/channel.h says how.

Steps and bytes for n ranks and a buffer of B bytes, each rank, registered memory:

    all_reduce                  2 barriers, B read and B written
    reduce_scatter, reduce      2 barriers, B read and B / n written
    all_gather, all_to_all      2 barriers, B read and B written
    broadcast                   2 barriers, B read and B written by all but the root

Other memory passes through slots, one barrier for each piece. Up to
``inline_bytes`` an array travels behind its flag, with one barrier in all. Every
element is folded in rank order, half types in float32, and rounded once.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, final

from distrt import _host, _shared
from distrt.arrays import DTYPES, DType, address_of
from distrt.collectives.schedule import Span
from distrt.errors import InvalidArgumentError, PeerError
from distrt.kernels.base import kernel_name
from distrt.reduce_op import ReduceOp
from distrt.settings import Settings
from distrt.transport.base import Transport
from distrt.transport.shared_memory import Node

__all__ = ["VERBS", "Direct", "MismatchError"]

# The order in which the extension counts the ops; it counts kernels as _host does.
_OPS = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
VERBS = ("", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")

_DONE, _PENDING, _MISMATCH, _ABORTED, _SIZED = range(5)

# Looks at a flag before the first yield and yields before the first sleep: about 20 us
# of looking where every rank has a core. Where they share cores a look is time
# taken from the very rank that is waited for.
_OWN_CORE = (2000, 200)
_SHARED_CORE = (20, 400)


class MismatchError(Exception):
    """The ranks made different calls; the communicator finds out which."""


class _Deliver(enum.IntEnum):
    ALL = 0
    OWNER = 1
    ROOT = 2


def _rows() -> tuple[Any, ...]:
    index = {name: number for number, name in enumerate(_host.names())}
    rows = []
    for row in DTYPES.values():
        kernel = DTYPES[row.kernel]
        able = [
            op.fold in row.folds and not (op.divides and row.numpy.kind in "iub") for op in _OPS
        ]
        folds, finishes = (
            tuple(
                index[kernel_name(verb, kernel, op)] if can else -1
                for op, can in zip(_OPS, able, strict=True)
            )
            for verb in ("fold", "finish")
        )
        rows.append((row.numpy.num, row.lanes, kernel.numpy.itemsize, folds, finishes))
    return tuple(rows)


_shared.configure(_host.kernels(), _OPS, _rows(), InvalidArgumentError)


@final
class Direct:
    """One channel among the ranks of ``transport``, all of which share memory.

    All ranks must construct it. A call is begun and then driven by ``step``; the
    communicator makes one at a time.

    Args:
      transport: exchanges the places of the control blocks, once.
      node: the shared memory of these very ranks.
      settings: equal on all ranks.
      look: called every 100 ms that a quick call waits, with the seconds so far, a rank
        that gave up or -1, the number of the verb in VERBS and the array.
      patience: how long the next step may block, in seconds.

    Attributes:
      channel: the extension's part; its ``quick_*`` methods take a verb's arguments.
    """

    def __init__(
        self,
        transport: Transport,
        node: Node,
        settings: Settings,
        look: Callable[[float, int, int, Any], None] = lambda *_: None,
        patience: Callable[[], float] = lambda: 0.0,
    ) -> None:
        assert len(node.bases) == transport.size
        # A slot holds at least a cache line for each rank.
        stage_bytes = max(settings.stage_bytes, 64 * transport.size)
        nbytes = _shared.control_bytes(settings.inline_bytes, stage_bytes)
        block = node.arena.heap.allocate(nbytes)
        self._heap, self._block = node.arena.heap, block
        # All flags are zero before any rank learns where they are.
        ctypes.memset(node.arena.base + block, 0, nbytes)
        facts = transport.all_gather_object((block, sorted(os.sched_getaffinity(0))))
        cores = {core for _, affinity in facts for core in affinity}
        spins, yields = _OWN_CORE if transport.size <= len(cores) else _SHARED_CORE
        self._size, self._patience = transport.size, patience
        # The channel writes there for as long as it lives.
        self._counter = transport.counter
        self.channel = _shared.Channel(
            arenas=node.bases,
            controls=[base + block for base, (block, _) in zip(node.bases, facts, strict=True)],
            rank=transport.rank,
            window=node.arena.window_bytes,
            inline_bytes=settings.inline_bytes,
            stage_bytes=stage_bytes,
            stream_bytes=settings.stream_bytes,
            spins=spins,
            yields=yields,
            counter=ctypes.addressof(self._counter),
            look=look,
        )

    def free(self) -> None:
        """Give the control block back. No rank may use the channel, or wait in it, any more."""
        self._heap.free(self._block)

    # ------------------------------------------------------------- fingerprints

    def quick_digest(
        self, verb: str, dtype: DType, shape: tuple[int, ...], op: ReduceOp | None, root: int = 0
    ) -> int:
        """Return what the quick way says of a call with one plain array."""
        number = 0 if op is None else _OPS.index(op)
        kind = dtype.numpy.num
        return self.channel.fingerprint(VERBS.index(verb), number, kind, shape, root)

    @staticmethod
    def digest(text: str) -> int:
        """Return the fingerprint of any other call."""
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    # -------------------------------------------------------------------- calls

    def agree(self, text: str) -> Callable[[], bool]:
        """Begin a barrier that also compares ``text``."""
        return self.move(self.digest(text), None, None, [(0, 0, 0)] * self._size)

    def fold(
        self,
        digest: int,
        row: DType,
        op: ReduceOp,
        source: Any,
        target: Any,
        divisor: float,
        *,
        chunks: Sequence[Span] | None = None,
        root: int | None = None,
    ) -> Callable[[], bool]:
        """Begin an all_reduce; with ``chunks`` a reduce_scatter, with ``root`` a reduce.

        Args:
          digest: the fingerprint.
          row: the kernel row of the flat arrays, equal on all ranks.
          op: the reduction; a mean folds as a sum.
          source: what is reduced, of one length on all ranks.
          target: the result. All of it: may be the source. With ``chunks``, this rank's
            chunk alone. With ``root``, None on all other ranks.
          divisor: the last fold divides by it.
          chunks: chunk r of the source ends in the target of rank r.
          root: only this rank has a target.
        """
        kind = _Deliver.OWNER if chunks is not None else _Deliver.ALL
        self.channel.fold(
            digest,
            address_of(source),
            0 if target is None else address_of(target),
            row.numpy.num,
            # Complex numbers come viewed as floats, of which a mean may be taken as well.
            _OPS.index(ReduceOp.SUM if op.divides else op),
            source.size,
            divisor,
            chunks,
            kind if root is None else _Deliver.ROOT,
            root or 0,
        )
        return self.step

    def move(
        self,
        digest: int,
        source: Any,
        target: Any,
        pulls: Sequence[tuple[int, int, int]] | None,
    ) -> Callable[[], bool]:
        """Begin to take, from each rank's source, (offset, length, place in the target), in bytes.

        Args:
          digest: the fingerprint.
          source: flat bytes that others may take, or None.
          target: flat bytes, or None where nothing is taken.
          pulls: one for each rank; None: see ``gather``.
        """
        self.channel.move(
            digest,
            0 if source is None else address_of(source),
            0 if source is None else source.size,
            0 if target is None else address_of(target),
            pulls,
        )
        return self.step

    def gather(
        self, digest: int, source: Any, allocate: Callable[[list[int]], Any | None]
    ) -> Callable[[], bool]:
        """Begin to join all ranks' flat bytes, in rank order.

        ``allocate`` is called once with their lengths and returns flat bytes to write to, which
        the caller keeps, or None on a rank that takes nothing.
        """
        self.move(digest, source, None, None)

        def step() -> bool:
            status = self._status()
            if status == _SIZED:
                lengths = self.channel.offered()
                target = allocate(lengths)
                if target is None:
                    self.channel.set_target(0, sum(lengths))
                else:
                    self.channel.set_target(address_of(target), target.size)
                status = self._status()
            return status == _DONE

        return step

    def step(self) -> bool:
        """Go on with the begun call; return whether it has ended."""
        return self._status() == _DONE

    def _status(self) -> int:
        status = self.channel.step(self._patience())
        if status == _MISMATCH:
            raise MismatchError
        if status == _ABORTED:
            raise PeerError(self.lost(self.channel.aborted))
        return status

    @staticmethod
    def lost(rank: int) -> str:
        """Say that ``rank`` has given a call up."""
        return (
            f"rank {rank} of this host gave a collective call up (an interrupt, a timeout or "
            "a lost peer), so this one cannot finish. Look for the first rank that says why"
        )
