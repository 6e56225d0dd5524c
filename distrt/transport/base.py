"""What every transport offers: non-blocking bytes between ranks (layer 2).

May import: errors. An algorithm posts sends and receives and polls them; the
only place that waits is ``Transport.drive``, which therefore is the only place
that must watch the clock, the signals and the peers.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import os
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from distrt.errors import CollectiveTimeoutError, PeerError

__all__ = ["Bytes", "Request", "Tag", "Transport"]

Bytes = npt.NDArray[np.uint8]

# Polls before a waiter sleeps between polls. A yield in between keeps the ranks
# of an oversubscribed host alive; the sleep keeps a long wait cheap.
_EAGER_POLLS = 4000
_NAP_SECONDS = 100e-6
_LOOK_SECONDS = 0.1


class Tag:
    """Message tags: one for each kind of traffic, so that kinds never mix."""

    RING = 1
    FINGERPRINT = 2
    OBJECT = 3
    EXCHANGE = 4


class Request(abc.ABC):
    """A send or a receive under way."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it is complete; never blocks. The buffer is free from then on."""


class Transport(abc.ABC):
    """Ordered, reliable messages between ``size`` ranks.

    Messages of one (source, tag) arrive in the order in which they were sent.
    A receive must be posted with exactly the size of its message.

    Attributes:
      rank, size: this rank and the number of ranks.
      name: what it is, for people ("loopback", the MPI library's name).
      counter: counts the collective calls begun by this rank; compiled code adds to it too.
      timeout_seconds: how long a wait may go on without an answer.
      max_message_bytes: pickled objects longer than this travel in pieces.
    """

    rank: int
    size: int
    name: str
    timeout_seconds: float = 1800.0
    max_message_bytes: int = 1 << 30
    _given_up: Callable[[], bool] | None = None

    @abc.abstractmethod
    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        """Start to send ``buffer`` (uint8, 1-D, contiguous); it must live until done."""

    @abc.abstractmethod
    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        """Start to receive exactly ``buffer.size`` bytes into ``buffer``."""

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
        if self._given_up is not None:
            raise PeerError(
                f"rank {self.rank} cannot make {what}: an earlier call was given up (an interrupt, "
                "a timeout or a lost peer) and its messages are still under way. End the job and "
                "start it again from the last checkpoint"
            )
        try:
            self._poll(step, what)
        except BaseException:
            self.counter.value -= 1
            self.give_up(step)
            raise

    @final
    def give_up(self, step: Callable[[], bool]) -> None:
        """Refuse every later call. MPI may still write into the buffers that ``step`` holds."""
        self._given_up = step

    @final
    def look(self, what: str, waited_seconds: float) -> None:
        """Raise where a wait is in vain: a peer is lost, or the deadline has passed."""
        self.check_peers(what)
        if waited_seconds > self.timeout_seconds:
            raise CollectiveTimeoutError(
                f"rank {self.rank} of {self.size} waited {self.timeout_seconds:g} s in "
                f"{what} without an answer: some rank is stuck, or did not make this call. "
                "Raise DISTRT_TIMEOUT (seconds) if a rank may be this slow"
            )

    def _poll(self, step: Callable[[], bool], what: str) -> None:
        polls = 0
        started = looked = time.monotonic()
        while not step():
            polls += 1
            if polls < _EAGER_POLLS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                self.look(what, now - started)

    @final
    def wait(self, requests: Sequence[Request], what: str) -> None:
        """Wait until all ``requests`` are done."""
        pending = list(requests)

        def step() -> bool:
            pending[:] = [request for request in pending if not request.done()]
            return not pending

        self.drive(step, what)

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
        what = "all_gather_object"
        if self.rank != 0:
            self._send(payload, [0], what)
            gathered: list[bytes] = pickle.loads(self._receive(0, what))
            return gathered
        payloads = [payload, *(bytes(self._receive(r, what)) for r in range(1, self.size))]
        everything = pickle.dumps(payloads, pickle.HIGHEST_PROTOCOL)
        self._send(everything, range(1, self.size), what)
        return payloads

    @final
    def broadcast_bytes(self, payload: bytes, root: int) -> memoryview | bytes:
        """Return ``root``'s ``payload`` on every rank. All ranks must call."""
        what = "broadcast_object"
        if self.rank != root:
            return self._receive(root, what)
        self._send(payload, [r for r in range(self.size) if r != root], what)
        return payload

    def _send(self, payload: bytes, dests: Sequence[int], what: str) -> None:
        length = np.array([len(payload)], np.int64).view(np.uint8)
        pieces = [length, *self._pieces(np.frombuffer(payload, np.uint8))]
        sends = [self.isend(piece, dest, Tag.OBJECT) for dest in dests for piece in pieces]
        self.wait(sends, what)

    def _receive(self, source: int, what: str) -> memoryview:
        length = np.empty(1, np.int64)
        self.wait([self.irecv(length.view(np.uint8), source, Tag.OBJECT)], what)
        payload = np.empty(int(length[0]), np.uint8)
        pieces = self._pieces(payload)
        self.wait([self.irecv(piece, source, Tag.OBJECT) for piece in pieces], what)
        return payload.data

    def _pieces(self, payload: Bytes) -> list[Bytes]:
        limit = self.max_message_bytes
        return [payload[i : i + limit] for i in range(0, payload.size, limit)]
