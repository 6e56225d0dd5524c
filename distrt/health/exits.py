"""A failing rank ends the whole job; a leaving one is noticed (layer 3).

May import: errors, arrays, mpi4py, and the extension distrt._exits. Plain
``python`` is enough: nobody needs ``python -m mpi4py``.

What a rank does            what the job does
--------------------------  ------------------------------------------------------
raises (main thread)        traceback, then MPI_Abort(1) at once: living threads and
                            atexit functions do not hold it up
Ctrl-C                      one line, MPI_Abort(130)
sys.exit(n), n != 0         MPI_Abort(n) after the interpreter has gone
ends with status 0          waits until all ranks end (the leave barrier), MPI_Finalize;
                            ranks that still wait for it learn it from ``departed()``
os._exit, a signal          the launcher ends the job

Two limits. Python joins non-daemon threads before it exits, so ``sys.exit(n)``
beside a living one takes effect when that thread ends. And where the program
imported ``mpi4py.MPI`` before distrt started MPI, mpi4py finalizes it before the
exit status is known: ``sys.exit(n)`` then counts as leaving, and the job ends
with the PeerError of the ranks that wait (code 1) unless all of them are leaving.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from distrt import _exits

__all__ = ["LEAVE_TAG", "counter", "departed", "install"]

LEAVE_TAG = 1000
"""Tag of the first round of the leave barrier; round k has LEAVE_TAG + k."""

INTERRUPTED = 130
_FUNCTIONS = ("Abort", "Finalize", "Finalized", "Start", "Test", "Request_free")

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def leave_rounds(rank: int, size: int) -> list[tuple[int, int]]:
    """Return (rank to send to, rank to hear from) of each round of the leave barrier.

    ceil(log2(size)) rounds of one empty message. Source: the dissemination
    barrier of Hensgen, Finkel and Manber (1988).
    """
    steps = (1 << k for k in range((size - 1).bit_length()))
    return [((rank + step) % size, (rank - step) % size) for step in steps]


@final
class _Leaving:
    """The exit hooks of this rank, and what they need to stay alive."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.pid = os.getpid()
        self.previous: _ExceptHook = sys.excepthook
        rounds = leave_rounds(self.rank, self.size)
        self.predecessor = rounds[0][1] if rounds else None
        addresses = _exits.calls()
        self.own_calls, self.previous_calls = map(ctypes.c_int64.from_address, addresses)
        self.heard = False
        self.listening = threading.Lock()
        self.requests: list[tuple[Any, Any]] = []
        self.prepare(rounds, addresses)

    def prepare(self, rounds: list[tuple[int, int]], addresses: tuple[int, int]) -> None:
        """Make the persistent requests of the leave barrier.

        The first round carries the number of calls made, the others nothing.
        """
        from mpi4py import MPI

        for k, (target, source) in enumerate(rounds):
            own, previous = (MPI.buffer.fromaddress(a, 0 if k else 8) for a in addresses)
            send = self.comm.Send_init((own, MPI.BYTE), target, LEAVE_TAG + k)
            receive = self.comm.Recv_init((previous, MPI.BYTE), source, LEAVE_TAG + k)
            self.requests.append((send, receive))

    def listen(self) -> bool:
        """Take in the message that the rank before has left, if it has."""
        # One thread asks at a time: two would receive the one message twice.
        with self.listening:
            if not self.heard and self.comm.Iprobe(source=self.predecessor, tag=LEAVE_TAG):
                receive = self.requests[0][1]
                receive.Start()
                receive.Wait()
                _exits.heard()
                self.heard = True
        return self.heard

    def arm(self, MPI: Any, mpi4py_finalizes: bool) -> None:
        library = ctypes.CDLL(MPI.__file__)
        addresses = [
            ctypes.cast(getattr(library, f"MPI_{name}"), ctypes.c_void_p).value or 0
            for name in _FUNCTIONS
        ]
        sends, receives = ([MPI._handleof(pair[i]) for pair in self.requests] for i in (0, 1))
        # COMM_WORLD makes MPICH tell the launcher, which then ends the job with this very
        # code; for any other communicator it tells that one's ranks only.
        world = MPI._handleof(MPI.COMM_WORLD)
        _exits.arm(tuple(addresses), world, sends, receives, mpi4py_finalizes)
        if self.size > 1:
            sys.excepthook = self.excepthook

    def excepthook(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        """Show the exception as before, then end the job."""
        # A forked child is no rank, and an interactive session goes on after an error.
        if os.getpid() != self.pid or sys.flags.interactive or hasattr(sys, "ps1"):
            self.previous(kind, value, trace)
            return
        code = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        try:
            if code == INTERRUPTED:
                # Ctrl-C reaches all ranks at once: one of them says so for all, and
                # another one speaks only where it was the only one interrupted.
                time.sleep(0.3 if self.rank else 0)
                print(f"rank {self.rank}: interrupted, ending the job", file=sys.stderr)
            else:
                self.previous(kind, value, trace)
                print(
                    f"rank {self.rank} of {self.size} raised {kind.__name__}: ending the job",
                    file=sys.stderr,
                )
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            _exits.abort(code)


_leaving: _Leaving | None = None


def install(comm: Any) -> None:
    """Make any rank's failure end the whole job, and finalize MPI at exit.

    All ranks of ``comm`` must call it, once MPI has started; later calls do
    nothing. In a world of one rank only MPI_Finalize is added to Python's ways.

    Args:
      comm: an ``mpi4py.MPI.Intracomm`` over all ranks; it is duplicated.
    """
    global _leaving
    if _leaving is not None:
        return
    import mpi4py
    from mpi4py import MPI

    # mpi4py reads its rc when MPI is first imported; None follows ``initialize``.
    finalizes = mpi4py.rc.initialize if mpi4py.rc.finalize is None else mpi4py.rc.finalize
    leaving = _Leaving(comm.Dup())
    leaving.arm(MPI, finalizes in (True, "yes"))
    _leaving = leaving


def counter() -> ctypes.c_int64:
    """Return what counts this rank's collective calls; peers learn its value when it leaves."""
    return ctypes.c_int64() if _leaving is None else _leaving.own_calls


def departed() -> tuple[int, int] | None:
    """Return a rank that ended its program with status 0 and its calls, or None. Not collective.

    A rank that has made the call in which others still wait has done its part
    of it; one that has made fewer will never come. Each rank watches the one
    before it, so that someone always sees a rank leave while others stay. Cheap
    enough for every 100 ms of a wait, not for every poll.
    """
    if _leaving is None or _leaving.predecessor is None or not _leaving.listen():
        return None
    return _leaving.predecessor, _leaving.previous_calls.value
