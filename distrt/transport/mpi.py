"""The bytes over MPI (layer 2). May import: errors, transport.base, mpi4py.

MPI only ever moves bytes here; every reduction is ours. That makes half types,
bfloat16, NaN and the order of the folds the same under every MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import sys
from collections.abc import Callable
from typing import Any, final

from distrt.errors import PeerError
from distrt.transport.base import Bytes, Request, Transport

__all__ = ["MpiTransport", "library_version", "start"]


def _mpi(initialize: bool) -> Any:
    # The exit hooks finalize MPI themselves, after they have seen the exit code.
    # mpi4py reads its rc only when MPI is imported: where the program did that
    # first, mpi4py keeps its own ways, and the hooks must be able to see so.
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    from mpi4py import MPI

    if initialize and not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def library_version() -> str:
    """Return the MPI library's description without starting MPI.

    Raises:
      ImportError or RuntimeError: there is no usable MPI library.
    """
    return str(_mpi(initialize=False).Get_library_version())


def _short_name(version: str) -> str:
    # "MPICH Version:      5.0.2\nMPICH Release date: ..." becomes "MPICH 5.0.2".
    found = re.match(r"\s*(.*?MPI[A-Z]*)\D*([0-9][0-9.]*)", version)
    return " ".join(found.groups()) if found else version.split("\n")[0]


def start() -> Any:
    """Start MPI (once) and return a duplicate of COMM_WORLD that is distrt's own. Collective."""
    comm = _mpi(initialize=True).COMM_WORLD.Dup()
    comm.Set_name("distrt")
    return comm


@final
class _PeerErrors:
    """Turns what MPI says of a lost rank into a PeerError; as cheap as a ``with`` can be."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None and kind.__module__.startswith("mpi4py"):
            raise PeerError(
                f"MPI lost a rank, or failed: {error}. Look for the first rank that says why"
            ) from error


_peer_errors = _PeerErrors()


@final
class _MpiRequest(Request):
    __slots__ = ("_buffer", "_request")

    def __init__(self, request: Any, buffer: Bytes) -> None:
        self._request, self._buffer = request, buffer

    def done(self) -> bool:
        with _peer_errors:
            return bool(self._request.Test())


@final
class _Calls:
    """The calls of this rank in which all ranks of the world take part.

    Each communicator numbers its own, for only they come in the same order on all ranks.
    What a rank that leaves tells the others is the sum over the world's communicator and
    its duplicates: a rank that has left normally has made as many of these calls as any
    other one ever will. The calls of a part of the ranks tell nothing, and are not counted.

    Args:
      told: the counter of the world's communicator, and what the others learn at exit.
      departed: see ``MpiTransport``.
    """

    def __init__(
        self, told: ctypes.c_int64, departed: Callable[[], tuple[int, int] | None]
    ) -> None:
        self.departed = departed
        self._counters = [told]
        atexit.register(self.settle)

    def counter(self) -> ctypes.c_int64:
        """Return the counter of another communicator of all ranks."""
        self._counters.append(ctypes.c_int64())
        return self._counters[-1]

    def total(self) -> int:
        """Return the calls begun so far."""
        return sum(counter.value for counter in self._counters)

    def settle(self) -> None:
        """Put the sum where the others will read it; what follows is not counted any more."""
        self._counters[0].value = self.total()
        del self._counters[1:]


@final
class MpiTransport(Transport):
    """Messages of an mpi4py communicator.

    Args:
      comm: the communicator; nothing else may use it.
      counter: where calls are counted, so that other ranks can learn it when this one leaves.
      departed: returns a rank that has left the program and how many calls it had
        made, or None; asked every 100 ms of a wait.
      calls: those of the transport that this one is derived from.
    """

    def __init__(
        self,
        comm: Any,
        counter: ctypes.c_int64 | None = None,
        departed: Callable[[], tuple[int, int] | None] = lambda: None,
        calls: _Calls | None = None,
    ) -> None:
        MPI = _mpi(initialize=True)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.name = _short_name(MPI.Get_library_version())
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.world_ranks = tuple(range(self.size))
        self._comm, self._byte = comm, MPI.BYTE
        self.counter = ctypes.c_int64() if counter is None else counter
        self._calls = _Calls(self.counter, departed) if calls is None else calls
        self._everyone = True

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        """See ``Transport.isend``."""
        with _peer_errors:
            return _MpiRequest(self._comm.Isend((buffer, self._byte), dest, tag), buffer)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        """See ``Transport.irecv``."""
        with _peer_errors:
            return _MpiRequest(self._comm.Irecv((buffer, self._byte), source, tag), buffer)

    def dup(self) -> MpiTransport:
        """See ``Transport.dup``. Waits inside MPI: let the ranks agree on the call before."""
        with _peer_errors:
            comm = self._comm.Dup()
        return self._derived(comm, self.world_ranks, self._everyone)

    def split(self, color: int | None, key: int = 0) -> MpiTransport | None:
        """See ``Transport.split``. Waits inside MPI: let the ranks agree on the call before."""
        MPI = _mpi(initialize=True)
        with _peer_errors:
            comm = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        members = comm.allgather(self.world_ranks[self.rank])
        return self._derived(comm, tuple(members), everyone=False)

    def free(self) -> None:
        """See ``Transport.free``."""
        self.freed = True
        with _peer_errors:
            self._comm.Free()

    def _derived(self, comm: Any, world_ranks: tuple[int, ...], everyone: bool) -> MpiTransport:
        counter = self._calls.counter() if everyone else None
        derived = MpiTransport(comm, counter, calls=self._calls)
        derived.world_ranks, derived._everyone = world_ranks, everyone
        derived.inherit(self)
        return derived

    def check_peers(self, what: str) -> None:
        """See ``Transport.check_peers``."""
        gone = self._calls.departed()
        # A rank that has made as many calls of all ranks has done its part of each of them.
        if gone is not None and gone[1] < self._calls.total():
            raise PeerError(
                f"rank {gone[0]} has left: its program ended after {gone[1]} collective calls, "
                f"and rank {self.world_ranks[self.rank]} waits in {what}. "
                "Every rank must make the same collective calls; look for an early exit or a "
                "loop that is shorter on that rank"
            )
