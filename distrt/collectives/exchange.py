"""Messages straight from rank to rank (layer 3): all_to_all, gather, scatter, send, recv.

May import: kernels, transport, collectives.schedule. Each rank lists what it sends
and what it receives; every send of one rank is a receive of another. Each byte is sent once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from distrt.collectives.schedule import Span, segments
from distrt.kernels import kernels_for
from distrt.kernels.base import Kernels
from distrt.transport.base import Bytes, Request, Tag, Transport

__all__ = ["Exchange", "Move"]


class Move(NamedTuple):
    """``view``, flat bytes, goes to ``peer`` or comes from it. No bytes, no message."""

    peer: int
    view: Any


class _Sent(NamedTuple):
    """A segment on its way; it holds what it is read from."""

    request: Request
    buffer: Bytes


class _Coming(NamedTuple):
    """A segment that is expected."""

    request: Request
    kernels: Kernels
    view: Any
    buffer: Bytes


@final
class Exchange:
    """Sends and receives that belong to one call; a resumable ``step()`` that never blocks.

    The k-th move from one rank to another is the k-th that the other one expects from it, of
    the same size. What is received never lies in what is sent, nor in other receives.

    No pattern of moves can lock, however small the window: every rank takes its moves,
    both ways, in order of their distance (receiver - sender, around the ring of ranks).
    Of all messages that are not done yet, one of the least distance has
    nothing before it on either side. The order also spreads an all_to_all: at
    each distance every rank sends to another one.

    Args:
      transport: the ranks.
      sends: what this rank sends; to itself too.
      receives: what it receives.
      window: segments under way at once, each way; bounds the staging memory of a GPU.
      segment_bytes: the longest message, equal on all ranks; by default the transport's.
      tag: keeps the messages apart from those of other calls under way.
    """

    def __init__(
        self,
        transport: Transport,
        sends: Sequence[Move],
        receives: Sequence[Move],
        window: int = 16,
        *,
        segment_bytes: int | None = None,
        tag: int = Tag.EXCHANGE,
    ) -> None:
        self._transport, self._window, self._tag = transport, window, tag
        self._limit = segment_bytes or transport.max_message_bytes
        rank, size = transport.rank, transport.size
        self._own = [
            [move.view for move in moves if move.peer == rank] for moves in (receives, sends)
        ]
        self._to_send = self._pieces(sends, lambda peer: (peer - rank) % size)
        self._to_receive = self._pieces(receives, lambda peer: (rank - peer) % size)
        self._sent: list[_Sent] = []
        self._coming: list[_Coming] = []

    def _pieces(
        self, moves: Sequence[Move], distance: Callable[[int], int]
    ) -> deque[tuple[int, Any]]:
        others = [move for move in moves if move.peer != self._transport.rank]
        return deque(
            (peer, view[span.slice])
            for peer, view in sorted(others, key=lambda move: distance(move.peer))
            for span in segments(Span(0, view.size), self._limit)
        )

    def step(self) -> bool:
        """Do what can be done now; return whether all is done. Never blocks."""
        self._copy_own()
        self._post()
        while self._settle():
            self._post()
        return not (self._to_send or self._to_receive or self._sent or self._coming)

    def _copy_own(self) -> None:
        for into, out in zip(*self._own, strict=True):
            into[...] = out
        self._own = [[], []]

    def _post(self) -> None:
        while self._to_receive and len(self._coming) < self._window:
            peer, view = self._to_receive.popleft()
            kernels = kernels_for(view)
            buffer = kernels.landing(view)
            request = self._transport.irecv(buffer, peer, self._tag)
            self._coming.append(_Coming(request, kernels, view, buffer))
        while self._to_send and len(self._sent) < self._window:
            peer, view = self._to_send.popleft()
            buffer = kernels_for(view).stage_out(view)
            self._sent.append(_Sent(self._transport.isend(buffer, peer, self._tag), buffer))

    def _settle(self) -> bool:
        """Put in place what has arrived and forget what has gone; return whether there was any."""
        under_way = len(self._sent) + len(self._coming)
        self._sent = [sent for sent in self._sent if not sent.request.done()]
        expected, self._coming = self._coming, []
        for coming in expected:
            if coming.request.done():
                coming.kernels.land(coming.view, coming.buffer)
            else:
                self._coming.append(coming)
        return len(self._sent) + len(self._coming) < under_way
