"""Calls in the background: Work, and the queues of the communicators (layer 4).

May import: poller, transport, errors. A call is a *program*: a generator that does what it
can, yields where it must wait, and returns the call's result. Each communicator has a
``Queue``, whose calls run strictly in the order in which they were made; the queues
take turns, so two of them may be used in opposite order on two ranks.

One thread of the process polls the first call of each queue. It starts with the first
asynchronous call, sleeps while nothing is pending and ends before MPI_Finalize. Where MPI
allows one thread only, whoever waits polls. A synchronous call needs neither:
its caller drives it, unless others are before it.

A call ends in one of three ways. Its result, or an error that all ranks come to together
(the calls differ, or ``Refused``), leaves the queue in order. Any other error (the
deadline, a lost peer, an interrupt, a bug) gives the queue up: its messages are still under
way, and every later call raises PeerError. Errors of calls that nobody waits for are
shown on stderr at exit; raised by the next call, they would come at a time of their own on
each rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar, cast, final

from distrt import poller
from distrt.errors import ContextError, DTypeError, InvalidArgumentError, PeerError
from distrt.transport.base import Transport, Watch

__all__ = ["Program", "Queue", "Refused", "Work"]

_T = TypeVar("_T")

Program = Generator[None, None, _T]
"""A call: does what it can, yields where it must wait, returns the result."""


@final
class Refused(NamedTuple):
    """What a program returns to end with an error, once it has told the other ranks."""

    error: Exception


# Errors that all ranks come to together, before anything moves.
_AGREED = (InvalidArgumentError, DTypeError, ContextError)

# A step that took longer has done something, or has waited itself.
_BUSY_SECONDS = 20e-6


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
        self._over = self._refused = self._held = False
        self._watch: Watch | None = None
        self._calls_before = 0
        # The thread that drives it now; guarded by the poller's lock.
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
        self._queue._poller.wait(self)
        return self._outcome()

    def _outcome(self) -> _T:
        if self._error is not None:
            self._queue._poller.heard(self)
            raise self._error.with_traceback(self._trace)
        return cast(_T, self._result)

    def _step(self) -> bool:
        try:
            next(self._program)
        except StopIteration as stop:
            if isinstance(stop.value, Refused):
                self._fail(stop.value.error)
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
        if self._queue.counts:
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
            self._watch = Watch(transport, self._queue.numbered(self.what))
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
      hold: called with 1 when a call in the background begins, with -1 when it has ended: in
        between, calls of this rank must not be made past the queue.
      counts: whether the transport counts the calls.
      missed: whether to say, when the program ends, which of its calls nobody waited for.

    Attributes:
      patience: seconds that a program may block in its next step, without the GIL; set
        before each.
    """

    def __init__(
        self,
        transport: Transport,
        abandon: Callable[[], None] = lambda: None,
        hold: Callable[[int], None] = lambda _: None,
        counts: bool = True,
        missed: bool = True,
    ) -> None:
        self.transport, self.counts, self.missed = transport, counts, missed
        self.patience = 0.0
        self._abandon, self._hold = abandon, hold
        self._pending: deque[Work] = deque()
        self._poller = poller.IN_THREAD if transport.threads else poller.IN_WAITS
        self._poller.know(self)

    def numbered(self, what: str) -> str:
        """Return the call that begins now in words, with its number."""
        return f"call #{self.transport.calls + 1} {what}" if self.counts else what

    @property
    def ended(self) -> bool:
        """Whether the program is ending, so that no call can be made in the background."""
        return self._poller.stopping

    def drain(self) -> None:
        """Wait until all calls made so far have ended, well or not. Not collective."""
        while True:
            try:
                last = self._pending[-1]
            except IndexError:
                return
            self._poller.wait(last)

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
        self._poller.add(work)
        return work

    def run(self, program: Program[_T], what: str) -> _T:
        """Make a call and return its result. See ``submit`` for the arguments.

        Raises:
          Exception: what the program raises.
          PeerError: this call, or an earlier one, was given up.
          ContextError: it was made from inside another one of this queue.
        """
        work = Work(self, program, what)
        if not self._poller.add(work, here=True):
            return work.wait()

        def step() -> bool:
            self.patience = self._poller.aside()
            return work._step()

        work._calls_before = self.transport.calls
        try:
            self.transport.drive(step, self.numbered(what))
        except BaseException:
            work._forget()
            self._abandon()
            raise
        finally:
            work._over = True
            self._poller.release(work, told=True)
        return work._outcome()
