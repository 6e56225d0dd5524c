"""Calls in the background: Work, the queues, and the thread that moves them (layer 4).

May import: transport, errors. A call is a *program*: a generator that does what it
can, yields where it must wait, and returns the call's result. Each communicator has a
``Queue``, whose calls run strictly in the order in which they were made; the queues
take turns, so two of them may be used in opposite order on two ranks.

One thread of the process polls the first call of each queue. It starts with the first
asynchronous call, sleeps while nothing is pending and ends before MPI_Finalize. Where MPI
allows one thread only, whoever waits polls. A synchronous call needs neither:
its caller drives it, unless others are before it.

A call ends in one of three ways. Its result, or an error that all ranks agree on (the
arguments differ, or are refused), leaves the queue in order. Any other error (the
deadline, a lost peer, an interrupt, a bug) gives the queue up: its messages are still under
way, and every later call raises PeerError. Errors of calls that nobody waits for are
shown on stderr at exit; raised by the next call, they would come at a time of their own on
each rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Generic, TypeVar, cast, final

from distrt.errors import ContextError, DTypeError, InvalidArgumentError, PeerError
from distrt.transport.base import Transport, Watch, pause

__all__ = ["Program", "Queue", "Work"]

_T = TypeVar("_T")

Program = Generator[None, None, _T]
"""A call: does what it can, yields where it must wait, returns the result."""

# Errors that all ranks come to together, before anything moves.
_AGREED = (InvalidArgumentError, DTypeError, ContextError)

# How long the only program under way may block in its step, without the GIL.
_PATIENCE_SECONDS = 0.02
# How often a waiting thread comes back to Python for signals.
_SLICE_SECONDS = 0.1
# Polls in vain before the thread naps between polls: few while the program computes,
# as it needs the core and the GIL; ``pause``'s own number while it waits for a call.
_EAGER_POLLS = 50
# A step that took longer has done something, or has waited itself.
_BUSY_SECONDS = 20e-6
_JOIN_SECONDS = 5.0


@final
class Work(Generic[_T]):
    """A collective call that goes on in the background; ``what``: the call in words."""

    def __init__(self, queue: Queue, program: Program[_T], what: str) -> None:
        self.what = what
        self._queue, self._program = queue, program
        self._ended = threading.Event()
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._over = self._refused = False
        self._watch: Watch | None = None
        self._calls_before = 0
        # The thread that drives it now; guarded by the lock of the progress.
        self._driver: int | None = None

    def done(self) -> bool:
        """Return whether the call has ended, well or not. Never blocks. Not collective."""
        return self._ended.is_set()

    def wait(self) -> _T:
        """Wait for the end of the call and return its result; may be called again.

        An interrupt (Ctrl-C) ends the waiting and not the call, which goes on in the
        background; where there is no thread for it, see ``Queue``, it is given up.

        Raises:
          Exception: what the call raised, with its traceback.
          PeerError: it was given up, or an earlier call of its communicator was.
        """
        self._queue._progress.wait(self)
        return self._outcome()

    def _outcome(self) -> _T:
        if self._error is not None:
            self._queue._progress.heard(self)
            raise self._error.with_traceback(self._trace)
        return cast(_T, self._result)

    def _step(self) -> bool:
        try:
            next(self._program)
        except StopIteration as stop:
            self._result = stop.value
            self._over = True
        except _AGREED as error:
            self._fail(error)
        return self._over

    def _fail(self, error: BaseException) -> None:
        self._error, self._trace = error, error.__traceback__
        self._over = True

    def _forget(self) -> None:
        # This rank will never complete the call that it has begun. It does not count as made,
        # so that the others are told, when this rank leaves, and do not wait for their deadline.
        self._queue.transport.counter.value = self._calls_before

    def _advance(self) -> bool:
        """Go one step on, as ``Transport.drive`` does; return whether something happened.

        Interrupts are raised here as well as in ``wait``, all else there only.
        """
        transport, began = self._queue.transport, time.monotonic()
        if self._watch is None:
            try:
                transport.refuse(self.what)
            except PeerError as error:
                self._refused = True
                self._fail(error)
                return True
            self._calls_before = transport.calls
            self._watch = Watch(transport, self.what)
        try:
            if not self._step():
                self._watch.look()
        except BaseException as error:
            self._fail(error)
            transport.give_up(self._step, error)
            self._forget()
            self._queue._abandon()
            if not isinstance(error, Exception):
                raise
        return self._over or time.monotonic() - began > _BUSY_SECONDS


@final
class Queue:
    """The calls of one communicator, one after the other.

    Args:
      transport: what the programs talk through. Where its ``threads`` is False, calls
        make progress only while this rank waits for one, or makes a synchronous one.
      abandon: called, maybe more than once, when a call has been given up: tells those
        that the transport does not reach.

    Attributes:
      patience: seconds that a program may block in its next step, without the GIL; set
        before each.
    """

    def __init__(self, transport: Transport, abandon: Callable[[], None] = lambda: None) -> None:
        self.transport = transport
        self.patience = 0.0
        self._abandon = abandon
        self._pending: deque[Work] = deque()
        self._progress = _IN_THREAD if transport.threads else _IN_WAITS

    @property
    def idle(self) -> bool:
        """Whether a call may be made past the queue, because no other one needs this thread."""
        return not self._pending and (self._progress.threaded or not self._progress.queues)

    def submit(self, program: Program[_T], what: str) -> Work[_T]:
        """Make a call in the background; it begins once those before it have ended.

        Args:
          program: the call.
          what: the call in words.

        Raises:
          PeerError: an earlier call was given up.

        Warns:
          UserWarning: once, where nothing can go on in the background.
        """
        self.transport.refuse(what)
        work = Work(self, program, what)
        self._progress.add(work)
        return work

    def run(self, program: Program[_T], what: str) -> _T:
        """Make a call and return its result. See ``submit`` for the arguments.

        Raises:
          Exception: what the program raises.
          PeerError: this call, or an earlier one, was given up.
          ContextError: it was made from inside another one of this queue.
        """
        work = Work(self, program, what)
        if not self._progress.add(work, here=True):
            return work.wait()

        def step() -> bool:
            self.patience = self._progress.aside()
            return work._step()

        work._calls_before = self.transport.calls
        try:
            self.transport.drive(step, what)
        except BaseException:
            work._forget()
            self._abandon()
            raise
        finally:
            work._over = True
            self._progress.release(work, told=True)
        return work._outcome()


@final
class _Progress:
    """What moves the queues: a thread of its own, or the threads that wait."""

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded  # until ``stop``
        self.queues: list[Queue] = []  # those that have pending calls
        self._changed = threading.Condition()  # its lock guards the queues' pending calls
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self._stopping = False
        self._waiting = 0
        self._unheard: list[Work] = []

    def add(self, work: Work, here: bool = False) -> bool:
        """Append a call; tell whether its caller, who would (``here``), is to drive it himself."""
        queue = work._queue
        with self._changed:
            self._refuse_inner(queue)
            here = here and not queue._pending
            if here:
                work._driver = threading.get_ident()
            else:
                self._start(queue.transport)
            queue._pending.append(work)
            if len(queue._pending) == 1:
                self.queues.append(queue)
            if not here:
                self._changed.notify_all()
        return here

    def wait(self, work: Work) -> None:
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

    def release(self, work: Work, told: bool = False) -> None:
        """Leave the call to others or, if over, begin the next; ``told``: the caller knows."""
        queue = work._queue
        with self._changed:
            work._driver = None
            if work._over:
                queue._pending.popleft()
                if not queue._pending:
                    self.queues.remove(queue)
                if work._error is not None and not (told or work._refused):
                    self._unheard.append(work)
                work._ended.set()
            if told and queue._pending:
                self._changed.notify_all()

    def heard(self, work: Work) -> None:
        """Forget a failure that has been raised."""
        with self._changed:
            if work in self._unheard:
                self._unheard.remove(work)

    def _take(self, queue: Queue) -> Work | None:
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
                while not self._stopping and all(q._pending[0]._driver for q in self.queues):
                    self._changed.wait()
                    polls = 0
                if self._stopping:
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
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        self.threaded = False
        dropped = [work for queue in self.queues for work in self._drop(queue)]
        for work in self._unheard:
            error = cast(BaseException, work._error)
            print(f"{_name(work)}: nobody waited for {work.what}, which failed:", file=sys.stderr)
            traceback.print_exception(type(error), error, work._trace)
        if dropped:
            were = "calls were" if len(dropped) > 1 else "call was"
            text = f"{len(dropped)} collective {were} never waited for and did not end"
            advice = f"(the first: {dropped[0].what}). Call wait() on every Work"
            print(f"{_name(dropped[0])}: {text} {advice}", file=sys.stderr)

    def _drop(self, queue: Queue) -> list[Work]:
        with self._changed:
            dropped = [work for work in queue._pending if work._driver is None]
            if dropped and dropped[0]._watch is not None:
                queue.transport.give_up(dropped[0]._step)
                dropped[0]._forget()
        return dropped


def _name(work: Work) -> str:
    transport = work._queue.transport
    return f"rank {transport.world_ranks[transport.rank]}"


_IN_THREAD = _Progress(threaded=True)
_IN_WAITS = _Progress(threaded=False)
