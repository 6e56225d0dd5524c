"""What moves the calls in the background: a thread, or those who wait (layer 4).

May import: transport, errors. progress.py is the only user. The poller takes the first call of
each queue one step on, in turns, so no queue waits for another. Its lock guards the queues'
pending calls and who drives which; a call is driven by one thread at a time.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING, Any, cast, final

from distrt.errors import ContextError
from distrt.transport.base import Transport, pause

if TYPE_CHECKING:
    from distrt.progress import Queue, Work

__all__ = ["IN_THREAD", "IN_WAITS", "Poller"]

# How long the only program under way may block in its step, without the GIL.
_PATIENCE_SECONDS = 0.02
# How often a waiting thread comes back to Python for signals.
_SLICE_SECONDS = 0.1
# Polls in vain before the thread naps between polls: few while the program computes,
# as it needs the core and the GIL; ``pause``'s own number while it waits for a call.
_EAGER_POLLS = 50
_JOIN_SECONDS = 5.0


@final
class Poller:
    """What moves the queues: a thread of its own, or the threads that wait."""

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded  # until ``stop``
        self.queues: list[Queue] = []  # those that have pending calls
        self._known: weakref.WeakSet[Queue] = weakref.WeakSet()
        self._background = 0  # calls of all queues that no caller drives
        self._changed = threading.Condition()  # its lock guards the queues' pending calls
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self.stopping = False
        self._waiting = 0
        self._unheard: list[Work[Any]] = []

    def know(self, queue: Queue) -> None:
        """Take in a new queue."""
        with self._changed:
            self._known.add(queue)
            if not self.threaded and self._background:
                queue._hold(self._background)

    def _hold(self, queue: Queue, number: int) -> None:
        # Without a thread, calls in the background of any queue need whoever waits, so no
        # rank may wait in what does not poll them.
        self._background += number
        for held in (queue,) if self.threaded else tuple(self._known):
            held._hold(number)

    def add(self, work: Work[Any], here: bool = False) -> bool:
        """Append a call; tell whether its caller, who would (``here``), is to drive it himself."""
        queue = work._queue
        with self._changed:
            self._refuse_inner(queue)
            here = here and not queue._pending
            if here:
                work._driver = threading.get_ident()
            else:
                self._start(queue.transport)
                self._hold(queue, 1)
                work._held = True
            queue._pending.append(work)
            if len(queue._pending) == 1:
                self.queues.append(queue)
            if not here:
                self._changed.notify_all()
        return here

    def wait(self, work: Work[Any]) -> None:
        """Return once the call has ended."""
        if work.done():
            return
        with self._changed:
            self._refuse_inner(work._queue)
            self._waiting += 1
        try:
            while self.threaded and not work._ended.wait(_SLICE_SECONDS):
                pass
            polls = 0
            while not work.done():
                polls = 0 if self.poll() else polls + 1
                pause(polls)
        finally:
            with self._changed:
                self._waiting -= 1

    def aside(self) -> float:
        """Poll before a step that a caller drives itself, and return the patience for it."""
        if not self.threaded:
            self.poll()
        return _PATIENCE_SECONDS if self.threaded else self._patience()

    def poll(self) -> bool:
        """Take the first call of each queue one step on; return whether something happened."""
        happened = False
        for queue in tuple(self.queues):
            work = self._take(queue)
            if work is not None:
                queue.patience = self._patience()
                try:
                    happened |= work._advance()
                finally:
                    self.release(work)
        return happened

    def release(self, work: Work[Any], told: bool = False) -> None:
        """Leave the call to others or, if over, begin the next; ``told``: the caller knows."""
        queue = work._queue
        with self._changed:
            work._driver = None
            if work._over:
                queue._pending.popleft()
                if work._held:
                    self._hold(queue, -1)
                if not queue._pending:
                    self.queues.remove(queue)
                heard = told or work._refused or not queue.missed
                if work._error is not None and not heard:
                    self._unheard.append(work)
                work._ended.set()
            if told and queue._pending:
                self._changed.notify_all()

    def heard(self, work: Work[Any]) -> None:
        """Forget a failure that has been raised."""
        with self._changed:
            if work in self._unheard:
                self._unheard.remove(work)

    def _take(self, queue: Queue) -> Work[Any] | None:
        with self._changed:
            work = queue._pending[0] if queue._pending else None
            if work is None or work._driver is not None:
                return None
            work._driver = threading.get_ident()
            return work

    def _patience(self) -> float:
        return _PATIENCE_SECONDS if len(self.queues) <= 1 else 0.0

    def _refuse_inner(self, queue: Queue) -> None:
        me = threading.get_ident()
        inner = bool(queue._pending) and queue._pending[0]._driver == me
        if inner or (self._thread is not None and self._thread.ident == me):
            raise ContextError(
                f"a collective call was made, or waited for, from inside another one of rank "
                f"{queue.transport.rank}, which cannot end before it"
            )

    def _start(self, transport: Transport) -> None:
        if self._pid is None:
            self._pid = os.getpid()
            # Registered after the transport's own, so it runs before that one.
            atexit.register(self.stop)
            if not self.threaded and transport.rank == 0:
                warnings.warn(
                    "MPI allows one thread only, so asynchronous calls go on inside wait() and "
                    "synchronous calls only. Let distrt start MPI, or start it with "
                    "mpi4py.rc.thread_level = 'multiple', and use an MPI that supports it",
                    UserWarning,
                    stacklevel=4,
                )
        if self.threaded and self._thread is None:
            thread = threading.Thread(target=self._loop, name="distrt progress", daemon=True)
            thread.start()
            self._thread = thread

    def _loop(self) -> None:
        polls = 0
        while True:
            with self._changed:
                while not self.stopping and all(q._pending[0]._driver for q in self.queues):
                    self._changed.wait()
                    polls = 0
                if self.stopping:
                    return
                waited_for = self._waiting > 0
            try:
                polls = 0 if self.poll() else polls + 1
            except BaseException:  # a program's SystemExit: its Work has it
                polls = 0
            pause(polls, *(() if waited_for else (_EAGER_POLLS,)))

    def stop(self) -> None:
        """End the thread, drop what is pending, and say so. At exit, before MPI_Finalize."""
        if os.getpid() != self._pid:
            return  # a forked child has neither the thread nor the calls
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        self.threaded = False
        dropped = [work for queue in self.queues for work in self._drop(queue)]
        for work in self._unheard:
            error = cast(BaseException, work._error)
            print(f"{_name(work)}: nobody waited for {work.what}, which failed:", file=sys.stderr)
            traceback.print_exception(type(error), error, work._trace)
        dropped = [work for work in dropped if work._queue.missed]
        if dropped:
            were = "calls were" if len(dropped) > 1 else "call was"
            text = f"{len(dropped)} collective {were} never waited for and did not end"
            advice = f"(the first: {dropped[0].what}). Call wait() on every Work"
            print(f"{_name(dropped[0])}: {text} {advice}", file=sys.stderr)

    def _drop(self, queue: Queue) -> list[Work[Any]]:
        with self._changed:
            dropped = [work for work in queue._pending if work._driver is None]
            if dropped and dropped[0]._watch is not None:
                queue.transport.give_up(dropped[0]._step)
                dropped[0]._forget()
        return dropped


def _name(work: Work[Any]) -> str:
    transport = work._queue.transport
    return f"rank {transport.world_ranks[transport.rank]}"


IN_THREAD = Poller(threaded=True)
IN_WAITS = Poller(threaded=False)
