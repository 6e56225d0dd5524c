"""What every transport offers: non-blocking bytes between ranks (layer 2).

May import: errors. An algorithm posts sends and receives and polls them; those that
wait are ``Transport.drive`` and, for calls under way in the background, progress.py.
Both let a ``Watch`` look after the clock and the peers.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import os
import pickle
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from distrt.errors import CollectiveTimeoutError, ContextError, PeerError

__all__ = ["Bytes", "Request", "Tag", "Transport", "Watch", "pause"]

Bytes = npt.NDArray[np.uint8]
_T = TypeVar("_T")

# Polls before a waiter sleeps between polls. A yield in between keeps the ranks
# of an oversubscribed host alive; the sleep keeps a long wait cheap.
_EAGER_POLLS = 4000
_NAP_SECONDS = 100e-6
_LOOK_SECONDS = 0.1


def pause(polls: int, eager: int = _EAGER_POLLS) -> None:
    """Let others run after ``polls`` polls in vain: yield the core, after ``eager`` of them nap."""
    if polls < eager:
        os.sched_yield()
    else:
        time.sleep(_NAP_SECONDS)


class Tag:
    """Message tags: one for each kind of traffic, so that kinds never mix."""

    RING = 1
    FINGERPRINT = 2
    OBJECT = 3
    EXCHANGE = 4
    PAIRS = 5
    # A program's own: this one and those above.
    USER = 64


class Request(abc.ABC):
    """A send or a receive under way."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it is complete; never blocks. The buffer is free from then on."""


class Transport(abc.ABC):
    """Ordered, reliable messages between ``size`` ranks.

    Messages of one (source, tag) arrive in the order in which they were sent.
    A receive must be posted with room for its message; shorter ones leave the rest as it was.

    Attributes:
      rank, size: this rank and the number of ranks.
      name: what it is, for people ("loopback", the MPI library's name).
      world_ranks: which rank of the world each of the ranks is, for messages.
      threads: whether several threads of a rank may use it, and its relatives, at once.
      counter: counts the collective calls begun by this rank; compiled code adds to it too.
      timeout_seconds: how long a wait may go on without an answer.
      freed: whether ``free`` has been called.
      max_message_bytes: pickled objects longer than this travel in pieces.
    """

    rank: int
    size: int
    name: str
    world_ranks: tuple[int, ...]
    threads: bool = True
    timeout_seconds: float = 1800.0
    max_message_bytes: int = 1 << 30
    freed: bool = False
    _given_up: Callable[[], bool] | None = None
    _cause: BaseException | None = None

    @abc.abstractmethod
    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        """Start to send ``buffer`` (uint8, 1-D, contiguous); it must live until done."""

    @abc.abstractmethod
    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        """Start to receive a message of at most ``buffer.size`` bytes into ``buffer``."""

    @abc.abstractmethod
    def dup(self) -> Transport:
        """Return the same ranks again, with messages of their own. All ranks must call."""

    @abc.abstractmethod
    def split(self, color: int | None, key: int = 0) -> Transport | None:
        """Return the ranks that gave this ``color``, in order of (key, rank). All ranks must call.

        Args:
          color: 0 or more; None: this rank belongs to none, and gets None.
          key: the order in the new group; ranks of equal keys keep theirs.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """Give back what the library keeps for it. All ranks must call, and none uses it again."""

    @final
    def inherit(self, parent: Transport) -> None:
        """Take over what a ``dup`` or a ``split`` has in common with its parent."""
        self.threads, self.timeout_seconds = parent.threads, parent.timeout_seconds
        self.max_message_bytes = parent.max_message_bytes

    @functools.cached_property
    def counter(self) -> ctypes.c_int64:
        """Counts the collective calls begun by this rank."""
        return ctypes.c_int64()

    @property
    def calls(self) -> int:
        """Collective calls begun by this rank."""
        return self.counter.value

    @final
    def begin(self) -> int:
        """Count one more collective call of this rank, and return its number, from 1.

        A call that is given up, or refused because an earlier one was, is not made:
        were it counted, this rank could leave as if it had done its part of it, and
        the others would wait.
        """
        self.counter.value += self._given_up is None
        return self.calls

    @property
    def _self(self) -> str:
        world_rank = self.world_ranks[self.rank]
        return f"rank {self.rank}" + ("" if world_rank == self.rank else f" (world: {world_rank})")

    @abc.abstractmethod
    def check_peers(self, what: str) -> None:
        """Raise PeerError where a rank is known never to answer; ``what`` is the waiting call."""

    @final
    def drive(self, step: Callable[[], bool], what: str) -> None:
        """Call ``step`` until it returns True.

        Comes back to Python between polls, so Ctrl-C works, and looks for lost
        peers and the deadline every 100 ms.

        Raises:
          PeerError: a peer has left, or failed, or an earlier wait was given up.
          CollectiveTimeoutError: ``timeout_seconds`` passed without completion.
        """
        self.refuse(what)
        try:
            watch, polls = Watch(self, what), 0
            while not step():
                polls += 1
                pause(polls)
                watch.look()
        except BaseException as error:
            self.give_up(step, error)
            raise

    @final
    def refuse(self, what: str) -> None:
        """Raise where ``what``, a call, cannot be made any more.

        Raises:
          ContextError: the transport has been freed.
          PeerError: an earlier call was given up.
        """
        if self.freed:
            raise ContextError(f"{self._self} cannot make {what}: its communicator was freed")
        if self._given_up is not None:
            raise PeerError(
                f"{self._self} cannot make {what}: an earlier call was given up (an interrupt, "
                "a timeout or a lost peer) and its messages are still under way. End the job and "
                "start it again from the last checkpoint"
            ) from self._cause

    @property
    def given_up(self) -> bool:
        """Whether a call was given up, so that every later one is refused."""
        return self._given_up is not None

    @final
    def give_up(self, step: Callable[[], bool], cause: BaseException | None = None) -> None:
        """Refuse every later call, because of ``cause``, and never free what ``step`` holds.

        MPI may still write into its buffers, even in MPI_Finalize, when Python's
        memory has gone.
        """
        self._given_up, self._cause = step, cause
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((step, cause)))

    @final
    def look(self, what: str, waited_seconds: float) -> None:
        """Raise where a wait is in vain: a peer is lost, or the deadline has passed."""
        self.check_peers(what)
        if waited_seconds > self.timeout_seconds:
            raise CollectiveTimeoutError(
                f"{self._self} of {self.size} waited {self.timeout_seconds:g} s in "
                f"{what} without an answer: some rank is stuck, or did not make this call. "
                "Raise DISTRT_TIMEOUT (seconds) if a rank may be this slow"
            )

    @final
    def complete(self, program: Generator[None, None, _T], what: str) -> _T:
        """Drive a generator that yields where it must wait, and return its result."""
        results: list[_T] = []

        def step() -> bool:
            try:
                next(program)
            except StopIteration as stop:
                results.append(stop.value)
            return bool(results)

        self.drive(step, what)
        return results[0]

    @final
    def wait(self, requests: Sequence[Request], what: str) -> None:
        """Wait until all ``requests`` are done."""
        self.complete(self.waiting(requests), what)

    @final
    def waiting(self, requests: Sequence[Request]) -> Generator[None, None, None]:
        """Yield until all ``requests`` are done."""
        pending = [request for request in requests if not request.done()]
        while pending:
            yield
            pending = [request for request in pending if not request.done()]

    @final
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``, in rank order. All ranks must call.

        For small things at start-up: rank 0 collects and sends the list to all.
        """
        payloads = self.all_gather_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        return [pickle.loads(payload) for payload in payloads]

    @final
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return ``root``'s picklable ``value`` on every rank. All ranks must call."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if self.rank == root else b""
        return pickle.loads(self.broadcast_bytes(payload, root))

    @final
    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's ``payload``, in rank order. All ranks must call."""
        return self.complete(self.gathering(payload), "all_gather_object")

    @final
    def broadcast_bytes(self, payload: bytes, root: int) -> memoryview | bytes:
        """Return ``root``'s ``payload`` on every rank. All ranks must call."""
        return self.complete(self.broadcasting(payload, root), "broadcast_object")

    @final
    def gathering(
        self, payload: bytes, tag: int = Tag.OBJECT
    ) -> Generator[None, None, list[bytes]]:
        """As ``all_gather_bytes``; yields where it must wait. ``tag``: of its messages."""
        if self.rank != 0:
            yield from self._send(payload, [0], tag)
            gathered: list[bytes] = pickle.loads((yield from self._receive(0, tag)))
            return gathered
        payloads = [payload]
        for source in range(1, self.size):
            payloads.append(bytes((yield from self._receive(source, tag))))
        everything = pickle.dumps(payloads, pickle.HIGHEST_PROTOCOL)
        yield from self._send(everything, range(1, self.size), tag)
        return payloads

    @final
    def broadcasting(self, payload: bytes, root: int) -> Generator[None, None, memoryview | bytes]:
        """As ``broadcast_bytes``; yields where it must wait."""
        if self.rank != root:
            return (yield from self._receive(root))
        yield from self._send(payload, [r for r in range(self.size) if r != root])
        return payload

    def _send(
        self, payload: bytes, dests: Sequence[int], tag: int = Tag.OBJECT
    ) -> Generator[None, None, None]:
        length = np.array([len(payload)], np.int64).view(np.uint8)
        pieces = [length, *self._pieces(np.frombuffer(payload, np.uint8))]
        sends = [self.isend(piece, dest, tag) for dest in dests for piece in pieces]
        yield from self.waiting(sends)

    def _receive(self, source: int, tag: int = Tag.OBJECT) -> Generator[None, None, memoryview]:
        length = np.empty(1, np.int64)
        yield from self.waiting([self.irecv(length.view(np.uint8), source, tag)])
        payload = np.empty(int(length[0]), np.uint8)
        pieces = self._pieces(payload)
        yield from self.waiting([self.irecv(piece, source, tag) for piece in pieces])
        return payload.data

    def _pieces(self, payload: Bytes) -> list[Bytes]:
        limit = self.max_message_bytes
        return [payload[i : i + limit] for i in range(0, payload.size, limit)]


@final
class Watch:
    """Looks after one wait for ``what``, which begins now."""

    def __init__(self, transport: Transport, what: str) -> None:
        self._transport, self._what = transport, what
        self._started = self._looked = time.monotonic()

    def look(self) -> None:
        """See ``Transport.look``; call it between polls, for it only does so every 100 ms."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._transport.look(self._what, now - self._started)
