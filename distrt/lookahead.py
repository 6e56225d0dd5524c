"""What the ranks tell each other one step ahead (layer 4).

May import: progress, transport, errors. The data room is the user: while a rank works on
step t, it has already said, in the background, how it stands with step t + 1 (data, the
end, an error), so nobody waits for an answer that is still to be made, and all ranks
take the same number of steps and fail together.

A ``Lookahead`` belongs to one pass over one dataset. Passes have tags of their own, so
one that a rank leaves early does not disturb the next.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
from typing import NamedTuple, final

from distrt.errors import DistrtError, InvalidArgumentError, PeerError
from distrt.progress import Program, Queue, Work
from distrt.transport.base import Tag, Transport

__all__ = ["Lookahead", "State", "Status", "over"]

# Passes that may be under way at once; their tags repeat after so many.
_PASSES = 1024


@final
class State(enum.Enum):
    """How a rank stands with a step."""

    DATA = "data"
    END = "end"
    CLOSED = "closed"
    FAILED = "failed"


class Status(NamedTuple):
    """What a rank says about its next step.

    Attributes:
      state: whether it has data for it.
      digest: of all that it has read so far; equal on all ranks where they read the same.
      problem: where it failed, why, with the traceback; ``kind`` is the error's class.
    """

    state: State
    digest: int = 0
    problem: str = ""
    kind: type[DistrtError] = InvalidArgumentError


@final
class Lookahead:
    """The statuses of one pass, step by step. All ranks must post the same steps.

    Args:
      transport: the ranks; see ``Communicator.channel``.
      number: of the pass.
    """

    def __init__(self, transport: Transport, number: int) -> None:
        self._queue = Queue(transport, counts=False, missed=False)
        self._transport, self._number = transport, number
        self._tag = Tag.USER + number % _PASSES
        self._last: Work[list[Status]] | None = None
        self._steps = 0

    def post(self, status: Status) -> None:
        """Say how this rank stands with the next step. Returns at once."""
        self._last = self._queue.submit(self._exchange(status), self._what)
        self._steps += 1

    def wait(self) -> list[Status]:
        """Return what every rank said about the step that was posted last, in rank order.

        Raises:
          PeerError: a rank has left; CollectiveTimeoutError: it did not answer in time.
        """
        assert self._last is not None
        return self._last.wait()

    def close(self) -> None:
        """Say that this rank leaves the pass before its end; the others then go on alone.

        Local, never blocks; called by the collector too. Only the first call counts.
        """
        last, self._last = self._last, None
        if last is None or self._queue.ended:
            return
        # Where the channel is lost the others know, or have gone.
        with contextlib.suppress(PeerError):
            self._queue.submit(self._closing(last), self._what)

    @property
    def _what(self) -> str:
        return f"step {self._steps} of pass {self._number} over a distributed dataset"

    def _exchange(self, status: Status) -> Program[list[Status]]:
        payload = pickle.dumps(status, pickle.HIGHEST_PROTOCOL)
        gathered = yield from self._transport.gathering(payload, self._tag)
        return [pickle.loads(other) for other in gathered]

    def _closing(self, last: Work[list[Status]]) -> Program[None]:
        # Runs when the last step has been exchanged. Where that was the end for all, or
        # another rank left, the others post no further step.
        if last._error is None and not over(last.wait()):
            yield from self._exchange(Status(State.CLOSED))


def over(statuses: list[Status]) -> bool:
    """Return whether no rank posts another step after these."""
    states = {status.state for status in statuses}
    return states == {State.END} or bool(states & {State.CLOSED, State.FAILED})
