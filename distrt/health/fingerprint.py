"""Fingerprints: are all ranks making the same call? (layer 3)

May import: errors, transport. Every collective first agrees on a 16-byte digest
of what it is (number, verb, op, dtype, shape, root). A rank that asks for
something else makes *every* rank raise the same error, instead of a hang or a
silently wrong sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import final

import numpy as np

from distrt.errors import CollectiveMismatchError, by_rank
from distrt.transport.base import Bytes, Tag, Transport

__all__ = ["Fingerprints"]

_DIGEST = 16
_HEADER = _DIGEST + 1


@final
class Fingerprints:
    """Compares the calls of all ranks of ``transport``, in call order.

    Args:
      transport: the ranks.
      carried_bytes: how much the messages of a call may carry; equal on all ranks.

    Attributes:
      call: the latest call, in words; what a rank is doing while it waits.
    """

    def __init__(self, transport: Transport, carried_bytes: int = 0) -> None:
        self._transport, self._carried_bytes = transport, carried_bytes
        self.call = "start-up"

    def agree(self, call: str, own: Bytes | None = None) -> Generator[None, None, Bytes | None]:
        """End once all ranks have described the same ``call``. All ranks must call.

        Yields where it must wait. ``ceil(log2(n))`` messages of 17 bytes, and what they carry.
        It is also a barrier: it ends for nobody before everybody has come. Source: the
        dissemination barrier of Hensgen, Finkel and Manber, 1988; what is carried goes
        the ways of Bruck et al., "Efficient algorithms for all-to-all communications in
        multiport message-passing systems", 1997.

        Args:
          call: the call in words.
          own: [b] of uint8, a short message of this rank that all ranks get with it, n * b <=
            ``carried_bytes``; where the calls are equal, so must be b.

        Returns:
          [n, b] of uint8, row r is rank r's own; None where ``own`` is.

        Raises:
          CollectiveMismatchError: on every rank, listing rank -> call.
        """
        transport = self._transport
        size, rank = transport.size, transport.rank
        text = self.call = f"call #{transport.begin()} {call}"
        mine = hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()
        length = 0 if own is None else own.size
        message = np.empty(_HEADER + size * length, np.uint8)
        message[:_HEADER] = np.frombuffer(mine + b"\x01", np.uint8)
        if own is not None:
            message[_HEADER : _HEADER + length] = own

        # In round k a rank hears from the 2^k ranks before those that it knows of,
        # and "equal" means: all that I know of, directly or by hearsay, equal me.
        # After the last round every rank knows of all, so all come to one verdict.
        # What it carries lies behind the verdict: its own, its left neighbour's, and so on.
        equal, distance = True, 1
        while distance < size:
            known = min(distance, size - distance) * length
            outgoing = message[: _HEADER + known]
            # The other rank may be making another call, which carries more.
            incoming = np.empty(_HEADER + self._carried_bytes, np.uint8)
            left, right = (rank - distance) % size, (rank + distance) % size
            received = transport.irecv(incoming, left, Tag.FINGERPRINT)
            sent = transport.isend(outgoing, right, Tag.FINGERPRINT)
            yield from transport.waiting([received, sent])
            equal = equal and incoming[:_HEADER].tobytes() == mine + b"\x01"
            message[_DIGEST] = equal
            if equal and known:
                start = _HEADER + distance * length
                message[start : start + known] = incoming[_HEADER : _HEADER + known]
            distance *= 2
        if not equal:
            yield from self.explain(text)
        if own is None:
            return None
        rows = message[_HEADER:].reshape(size, length)
        result: Bytes = rows[(rank - np.arange(size)) % size]
        return result

    def explain(self, text: str) -> Generator[None, None, None]:
        """Raise what the ranks called. All ranks must call it, once they know that they differ."""
        payloads = yield from self._transport.gathering(text.encode())
        calls = {rank: payload.decode() for rank, payload in enumerate(payloads)}
        raise CollectiveMismatchError(
            f"the ranks made different calls:\n{by_rank(calls)}\n"
            "All ranks must make the same collective calls in the same order, with equal "
            "structures, shapes and dtypes"
        )
