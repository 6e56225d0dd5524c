"""Ranks as threads of one process, and the world of one rank (layer 2).

May import: errors, transport.base. Sends complete only when they are matched,
as an MPI's long messages do, so an algorithm that deadlocks between processes
deadlocks here too. The tests run every algorithm on it; a program that was
started without mpirun and without an MPI library runs on ``single()``.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, final

from distrt.errors import PeerError
from distrt.transport.base import Bytes, Request, Transport

__all__ = ["LoopbackTransport", "LoopbackWorld", "single"]


@final
class _Message(Request):
    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        self.matched = False

    def done(self) -> bool:
        return self.matched


@final
class LoopbackWorld:
    """``size`` ranks in this process.

    Args:
      size: number of ranks.
      parent: the world of which this one has some ranks, or all.
      world_ranks: which ranks of the outermost world they are; by default all of ``size``.
    """

    def __init__(
        self,
        size: int,
        parent: LoopbackWorld | None = None,
        world_ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.size = size
        self.world_ranks = tuple(range(size)) if world_ranks is None else world_ranks
        self._root: LoopbackWorld = self if parent is None else parent._root
        self._failed: int | None = None
        self._lock = threading.Lock()
        self._derivations = [0] * size
        self._children: dict[tuple[int, int], LoopbackWorld] = {}
        self._sends: dict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self._receives: dict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)

    @property
    def failed(self) -> int | None:
        """A rank of the outermost world that has failed, or None."""
        return self._root._failed

    def child(self, rank: int, color: int, members: Sequence[int]) -> LoopbackWorld:
        """Return the world of ``members``, made by the first of them that asks.

        The ranks' requests are matched by their order.
        """
        with self._lock:
            number = self._derivations[rank]
            self._derivations[rank] += 1
            if (number, color) not in self._children:
                named = tuple(self.world_ranks[member] for member in members)
                self._children[number, color] = LoopbackWorld(len(members), self, named)
            return self._children[number, color]

    def transport(self, rank: int) -> LoopbackTransport:
        """Return the end of ``rank``."""
        return LoopbackTransport(self, rank)

    def post(self, buffer: Bytes, source: int, dest: int, tag: int, sends: bool) -> _Message:
        """Post one half of a message and match what can be matched."""
        message, key = _Message(buffer), (source, dest, tag)
        with self._lock:
            (self._sends if sends else self._receives)[key].append(message)
            outgoing, incoming = self._sends[key], self._receives[key]
            while outgoing and incoming:
                sent, received = outgoing.popleft(), incoming.popleft()
                assert sent.buffer.size <= received.buffer.size, (
                    f"{source} -> {dest}, tag {tag}: {sent.buffer.size} bytes sent, "
                    f"room for {received.buffer.size}"
                )
                received.buffer[: sent.buffer.size] = sent.buffer
                sent.matched = received.matched = True
        return message

    def run(self, program: Callable[[Transport], Any], timeout: float = 60.0) -> list[Any]:
        """Run ``program(transport)`` on every rank and return the results in rank order.

        The first exception of any rank is raised here; the other ranks get a PeerError.
        """
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = program(self.transport(rank))
            except BaseException as error:
                errors[rank] = error
                self._failed = rank if self._failed is None else self._failed

        threads = [
            threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True)
            for r in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        if self.failed is not None:
            raise errors[self.failed]
        alive = [t.name for t in threads if t.is_alive()]
        if alive:
            raise TimeoutError(f"still running after {timeout} s: {', '.join(alive)}")
        return results


@final
class LoopbackTransport(Transport):
    """One rank of a ``LoopbackWorld``."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.rank, self.size, self.name = rank, world.size, "loopback"
        self.world_ranks = world.world_ranks
        self._world = world

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        """See ``Transport.isend``."""
        return self._world.post(buffer, self.rank, dest, tag, sends=True)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        """See ``Transport.irecv``."""
        return self._world.post(buffer, source, self.rank, tag, sends=False)

    def check_peers(self, what: str) -> None:
        """See ``Transport.check_peers``."""
        failed, own = self._world.failed, self.world_ranks[self.rank]
        if failed not in (None, own):
            raise PeerError(f"rank {failed} failed while rank {own} was in {what}")

    def dup(self) -> LoopbackTransport:
        """See ``Transport.dup``."""
        return self._derived(self._world.child(self.rank, 0, range(self.size)), self.rank)

    def split(self, color: int | None, key: int = 0) -> LoopbackTransport | None:
        """See ``Transport.split``."""
        given = self.all_gather_object((color, key))
        mine = -1 if color is None else color
        members = [r for r in range(self.size) if given[r][0] == color]
        members.sort(key=lambda r: given[r][1])
        world = self._world.child(self.rank, mine, members)
        return None if color is None else self._derived(world, members.index(self.rank))

    def free(self) -> None:
        """See ``Transport.free``."""
        self.freed = True

    def _derived(self, world: LoopbackWorld, rank: int) -> LoopbackTransport:
        transport = world.transport(rank)
        transport.inherit(self)
        return transport


def single() -> LoopbackTransport:
    """Return the transport of a world of one rank."""
    return LoopbackWorld(1).transport(0)
