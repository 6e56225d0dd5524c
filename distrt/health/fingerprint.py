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
from distrt.transport.base import Tag, Transport

__all__ = ["Fingerprints"]

_DIGEST = 16


@final
class Fingerprints:
    """Compares the calls of all ranks of ``transport``, in call order.

    Attributes:
      call: the latest call, in words; what a rank is doing while it waits.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.call = "start-up"

    def agree(self, call: str) -> Generator[None, None, None]:
        """End once all ranks have described the same ``call``. All ranks must call.

        Yields where it must wait. ``ceil(log2(n))`` messages of 17 bytes. It is also a
        barrier: it ends for nobody before everybody has come. Source: the dissemination
        barrier of Hensgen, Finkel and Manber, 1988.

        Raises:
          CollectiveMismatchError: on every rank, listing rank -> call.
        """
        transport = self._transport
        text = self.call = f"call #{transport.begin()} {call}"
        mine = hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()

        # In round k a rank hears from the 2^k ranks before those that it knows of,
        # and "equal" means: all that I know of, directly or by hearsay, equal me.
        # After the last round every rank knows of all, so all come to one verdict.
        equal, distance = True, 1
        while distance < transport.size:
            outgoing = np.frombuffer(mine + bytes([equal]), np.uint8)
            incoming = np.empty(_DIGEST + 1, np.uint8)
            left = (transport.rank - distance) % transport.size
            right = (transport.rank + distance) % transport.size
            received = transport.irecv(incoming, left, Tag.FINGERPRINT)
            sent = transport.isend(outgoing, right, Tag.FINGERPRINT)
            yield from transport.waiting([received, sent])
            equal = equal and incoming.tobytes() == mine + b"\x01"
            distance *= 2
        if not equal:
            yield from self.explain(text)

    def explain(self, text: str) -> Generator[None, None, None]:
        """Raise what the ranks called. All ranks must call it, once they know that they differ."""
        payloads = yield from self._transport.gathering(text.encode())
        calls = {rank: payload.decode() for rank, payload in enumerate(payloads)}
        raise CollectiveMismatchError(
            f"the ranks made different calls:\n{by_rank(calls)}\n"
            "All ranks must make the same collective calls in the same order, with equal "
            "structures, shapes and dtypes"
        )
