"""Memory that the ranks of a host share (layer 2).

May import: errors, arrays, settings, transport.base, transport.heap, and the
extension ``distrt._shared``. No MPI: facts are exchanged through a Transport.

Each rank has an *arena*: an anonymous file (memfd) that the neighbours open
through /proc, or, where that is not allowed, a file in /dev/shm that is unlinked
as soon as all have opened it. Nothing is left behind in either case, however the
ranks end; a file that a rank killed in between left is swept at the next start.
The arena begins with a nonce. Ranks share memory only once they have read each
other's nonces: a host name proves nothing. Room is reserved before it is used
(fallocate), so a full /dev/shm is an error and never a SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

from distrt import _shared
from distrt.errors import DistrtError
from distrt.settings import Settings
from distrt.transport.base import Transport
from distrt.transport.heap import Heap

__all__ = ["Arena", "Node", "share"]

_SHM = Path("/dev/shm")
_PREFIX = "distrt-"


@final
class Arena:
    """A rank's own arena and the heap in it.

    Args:
      kind: "memfd" or "file".
      window_bytes: address space kept for it; memory is reserved as the heap grows.
      heap_bytes: reserved at once.

    Raises:
      OSError, MemoryError: there is no room.
    """

    def __init__(self, kind: str, window_bytes: int, heap_bytes: int) -> None:
        self.nonce = secrets.token_bytes(16)
        self.window_bytes = window_bytes
        if kind == "memfd":
            self.fd = os.memfd_create("distrt-arena", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        else:
            self.path = str(_SHM / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.fd, fcntl.LOCK_SH)  # as long as this rank lives: see _sweep
        self._named, self.base = kind != "memfd", 0
        try:
            self.base = _shared.map(self.fd, window_bytes)
            start = -(-_shared.arena_bytes // 4096) * 4096
            self._grow(0, start)
            self.heap = Heap(self.base, window_bytes, self._grow, start=start)
            if heap_bytes:
                self.heap.free(self.heap.allocate(heap_bytes))
        except BaseException:
            self.forget_name()
            self.close()
            raise
        ctypes.memmove(self.base, self.nonce, 16)

    def _grow(self, offset: int, nbytes: int) -> None:
        os.posix_fallocate(self.fd, offset, nbytes)
        _shared.populate(self.base + offset, nbytes)

    def close(self) -> None:
        """Give the memory back. Nothing in it may be used any more, by any rank."""
        if self.base:
            _shared.unmap(self.base, self.window_bytes)
        os.close(self.fd)

    def forget_name(self) -> None:
        """Remove the file's name; it lives on while it is mapped."""
        if self._named:
            self._named = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


class Node(NamedTuple):
    """The ranks that share memory with this one.

    Attributes:
      arena: this rank's own.
      bases: where this process sees the arena of each of them, in their order.
      world_ranks: which ranks of the world they are, in the same order.
    """

    arena: Arena
    bases: tuple[int, ...]
    world_ranks: tuple[int, ...]

    def among(self, world_ranks: Sequence[int]) -> Node:
        """Return the part of them that is in ``world_ranks``, in that order."""
        base_of = dict(zip(self.world_ranks, self.bases, strict=True))
        kept = tuple(rank for rank in world_ranks if rank in base_of)
        return Node(self.arena, tuple(base_of[rank] for rank in kept), kept)

    def close(self) -> None:
        """Give everything back, as ``Arena.close``."""
        for base in self.bases:
            if base != self.arena.base:
                _shared.unmap(base, self.arena.window_bytes)
        self.arena.close()


class _Shared(NamedTuple):
    path: str
    nonce: bytes
    problem: str


def share(transport: Transport, local_ranks: Sequence[int], settings: Settings) -> Node | None:
    """Map the arenas of this host's ranks, or return None where they cannot share memory.

    All ranks of ``transport`` must call it; all ranks of a host get the same answer.

    Warns:
      UserWarning: on the lowest rank of a host, where its ranks cannot share memory, with
        the reason and what it costs.
    """
    kinds = {"auto": ("memfd", "file"), "off": ()}.get(
        settings.shared_memory, (settings.shared_memory,)
    )
    _sweep()
    problem = ""
    for kind in kinds:
        node, problem = _share(transport, local_ranks, kind, settings)
        if not problem:
            return node
    if problem and transport.rank == local_ranks[0]:
        warnings.warn(
            f"the ranks {list(local_ranks)} of this host share no memory, so their collectives "
            f"go through messages and are several times slower: {problem}. "
            "DISTRT_SHARED_MEMORY=off makes this choice silently",
            UserWarning,
            stacklevel=2,
        )
    return None


def _share(
    transport: Transport, local_ranks: Sequence[int], kind: str, settings: Settings
) -> tuple[Node | None, str]:
    # Two exchanges, so that every rank of a host comes to the same verdict: the paths, then
    # what opening them gave. After the second all have opened all, and the names may go.
    arena: Arena | None = None
    window = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        arena = Arena(kind, max(window, 1 << 30), settings.heap_bytes)
        mine = _Shared(arena.path, arena.nonce, "")
    except (OSError, MemoryError) as error:
        need = settings.heap_bytes or 4096
        mine = _Shared("", b"", f"an arena ({kind}) of {need} bytes: {error}")
    everyone: list[_Shared] = transport.all_gather_object(mine)
    neighbours = [everyone[rank] for rank in local_ranks]
    problem = next((n.problem for n in neighbours if n.problem), "")
    bases: list[int] = []
    if not problem and arena is not None:
        try:
            for neighbour in neighbours:
                own = neighbour.nonce == arena.nonce
                bases.append(arena.base if own else _open(neighbour, arena.window_bytes))
        except (OSError, DistrtError) as error:
            problem = f"{kind}: {error}"
    problems: list[str] = transport.all_gather_object(problem)
    problem = next((problems[rank] for rank in local_ranks if problems[rank]), "")
    if arena is None:
        return None, problem
    arena.forget_name()
    node = Node(arena, tuple(bases), tuple(transport.world_ranks[r] for r in local_ranks))
    if problem:
        node.close()
        return None, problem
    return node, ""


def _open(neighbour: _Shared, window_bytes: int) -> int:
    # In another PID namespace the path may be anything of anyone's.
    if neighbour.path.startswith("/proc") and "distrt-arena" not in os.readlink(neighbour.path):
        raise DistrtError(f"{neighbour.path} is not the neighbour's memory")
    fd = os.open(neighbour.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        base = int(_shared.map(fd, window_bytes))
    finally:
        os.close(fd)
    if ctypes.string_at(base, 16) != neighbour.nonce:
        _shared.unmap(base, window_bytes)
        raise DistrtError(f"{neighbour.path} is not the neighbour's memory: another host's rank")
    return base


def _sweep() -> None:
    # Only files whose owner is gone: its process number is free, and nobody holds the lock that
    # it took (a process of another PID namespace would only seem to be gone).
    for path in _SHM.glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
