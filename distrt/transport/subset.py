"""Some ranks of a transport, numbered from 0, with no messages of their own (layer 2).

May import: transport.base. For algorithms that work among some of the ranks of one
call: their messages are ordered with the call's other ones, so nothing need be agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

from distrt.transport.base import Bytes, Request, Transport

__all__ = ["Subset"]


@final
class Subset(Transport):
    """The ranks ``members`` of ``parent``, in this order; this rank is one of them.

    Args:
      parent: what carries the messages.
      members: ranks of the parent.
    """

    def __init__(self, parent: Transport, members: Sequence[int]) -> None:
        self._parent, self._members = parent, tuple(members)
        self.rank, self.size, self.name = members.index(parent.rank), len(members), parent.name
        self.world_ranks = tuple(parent.world_ranks[member] for member in members)
        self.inherit(parent)

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        """See ``Transport.isend``."""
        return self._parent.isend(buffer, self._members[dest], tag)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        """See ``Transport.irecv``."""
        return self._parent.irecv(buffer, self._members[source], tag)

    def check_peers(self, what: str) -> None:
        """See ``Transport.check_peers``."""
        self._parent.check_peers(what)

    def dup(self) -> NoReturn:
        """Nobody needs it."""
        raise NotImplementedError("a Subset has no messages of its own")

    def split(self, color: int | None, key: int = 0) -> NoReturn:
        """Nobody needs it."""
        raise NotImplementedError("a Subset has no messages of its own")

    def free(self) -> None:
        """It keeps nothing."""
