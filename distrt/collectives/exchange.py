"""Messages straight from rank to rank (layer 3): all_to_all, gather, scatter.

May import: kernels, transport. Each rank lists what it sends and what it
receives; every send of one rank is a receive of another. All of them are under
way at once, so no pattern of them can lock. One step, each byte sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from distrt.kernels import kernels_for
from distrt.transport.base import Tag, Transport

__all__ = ["Exchange", "Move"]


class Move(NamedTuple):
    """``view``, flat bytes, goes to ``peer`` or comes from it. No bytes, no message."""

    peer: int
    view: Any


@final
class Exchange:
    """Sends and receives that belong to one call; a resumable ``step()`` that never blocks.

    Args:
      transport: the ranks.
      sends: what this rank sends.
      receives: what it receives.
    """

    def __init__(
        self, transport: Transport, sends: Sequence[Move], receives: Sequence[Move]
    ) -> None:
        self._landings: list[tuple[Any, Any, Any]] = []
        self._requests: list[Any] = []
        limit = transport.max_message_bytes
        for peer, view in receives:
            kernels = kernels_for(view)
            for start in range(0, view.size, limit):
                piece = view[start : start + limit]
                buffer = kernels.landing(piece)
                self._requests.append(transport.irecv(buffer, peer, Tag.EXCHANGE))
                self._landings.append((kernels, piece, buffer))
        for peer, view in sends:
            for start in range(0, view.size, limit):
                buffer = kernels_for(view).stage_out(view[start : start + limit])
                self._requests.append(transport.isend(buffer, peer, Tag.EXCHANGE))

    def step(self) -> bool:
        """Look which messages are done; return whether all are, and have been put in place."""
        self._requests = [request for request in self._requests if not request.done()]
        if self._requests:
            return False
        for kernels, piece, buffer in self._landings:
            kernels.land(piece, buffer)
        return True
