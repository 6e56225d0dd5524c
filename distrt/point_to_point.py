"""Messages from one rank to another: send and recv (layer 4).

May import: arguments, progress, collectives.exchange, kernels, transport, arrays, errors.
communicator.py is the only user. These calls are no collectives: they have queues of
their own, one for each partner, direction and tag, so none waits for a collective, nor for
a message that it does not follow. A header says what is sent, so a receiver that
expects something else raises instead of taking it for what it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from distrt.arguments import Leaf, describe, leaves_of, outs_of
from distrt.arrays import Tree, copy_to, flatten
from distrt.collectives.exchange import Exchange, Move
from distrt.errors import InvalidArgumentError
from distrt.kernels import kernels_for
from distrt.progress import Program, Queue, Refused
from distrt.transport.base import Tag, Transport

__all__ = ["PointToPoint"]

_HEADER_BYTES = 256
# MPI promises tags up to 32767; those below Tag.USER are ours.
_TAGS = 32768 - Tag.USER


@final
class PointToPoint:
    """The sends and receives of one rank.

    Args:
      transport: the ranks.
      abandon: see ``Queue``.
    """

    def __init__(self, transport: Transport, abandon: Callable[[], None]) -> None:
        self._transport, self._abandon = transport, abandon
        self._queues: dict[tuple[str, int, int], Queue] = {}

    def send(self, value: Any, dest: int, tag: int, async_op: bool) -> Any:
        """See ``Communicator.send``."""
        self._check("send", "dest", dest, tag)
        tree = flatten(value)
        leaves = leaves_of(tree, None)
        text = _text(tree, leaves)
        total = sum(leaf.flat.size for leaf in leaves)
        header = np.zeros(_HEADER_BYTES, np.uint8)
        header[:8].view(np.int64)[0] = total
        words = text.encode()[: _HEADER_BYTES - 8]
        header[8 : 8 + len(words)] = np.frombuffer(words, np.uint8)

        def program() -> Program[None]:
            moves = [Move(dest, flat) for flat in (header, *(leaf.flat for leaf in leaves))]
            yield from self._exchange(moves, [], tag)

        return self._run(("send", dest, tag), program(), f"send {text} to rank {dest}", async_op)

    def recv(self, out: Any, source: int, tag: int, async_op: bool) -> Any:
        """See ``Communicator.recv``."""
        self._check("recv", "source", source, tag)
        tree = flatten(out)
        leaves = leaves_of(tree, None)
        outs = outs_of(out, tree, leaves)
        text = _text(tree, leaves)
        expected = text.encode()[: _HEADER_BYTES - 8]

        def program() -> Program[Any]:
            header = np.empty(_HEADER_BYTES, np.uint8)
            yield from self._exchange([], [Move(source, header)], tag)
            words = header[8:].tobytes().rstrip(b"\0")
            if words != expected:
                # What comes is taken, so that the next message finds its place.
                rest = np.empty(int(header[:8].view(np.int64)[0]), np.uint8)
                yield from self._exchange([], [Move(source, rest)], tag)
                return Refused(self._other(source, tag, text, words.decode(errors="replace")))
            targets = [_target(leaf, array) for leaf, array in zip(leaves, outs, strict=True)]
            yield from self._exchange([], [Move(source, flat) for flat in targets], tag)
            for leaf, array, flat in zip(leaves, outs, targets, strict=True):
                if not array.flags.c_contiguous:
                    copy_to(array, flat.view(leaf.dtype).reshape(leaf.shape))
            return out

        what = f"recv {text} from rank {source}"
        return self._run(("recv", source, tag), program(), what, async_op)

    def _run(self, key: tuple[str, int, int], program: Any, what: str, async_op: bool) -> Any:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = Queue(self._transport, self._abandon, counts=False)
        return (queue.submit if async_op else queue.run)(program, what)

    def _exchange(self, sends: Sequence[Move], receives: Sequence[Move], tag: int) -> Program[None]:
        exchange = Exchange(self._transport, sends, receives, tag=Tag.USER + tag)
        while not exchange.step():
            yield

    def _check(self, verb: str, name: str, rank: int, tag: int) -> None:
        me, size = self._transport.rank, self._transport.size
        if not isinstance(rank, int | np.integer) or not 0 <= rank < size or rank == me:
            raise InvalidArgumentError(
                f"{verb}: expected {name} to be another rank than this one ({me}), from 0 to "
                f"{size - 1}, got {rank!r}"
            )
        if not isinstance(tag, int | np.integer) or not 0 <= tag < _TAGS:
            raise InvalidArgumentError(f"{verb}: expected a tag from 0 to {_TAGS - 1}, got {tag!r}")

    def _other(self, source: int, tag: int, expected: str, got: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"rank {self._transport.rank}: recv from rank {source} (tag {tag}): expected "
            f"{expected}, got {got}. Its elements are lost; let both ranks name the same"
        )


def _text(tree: Tree, leaves: Sequence[Leaf]) -> str:
    # Where the memory is, each end decides alone.
    return describe(tree, leaves).replace(" on the GPU", "")


def _target(leaf: Leaf, array: Any) -> Any:
    """Return flat bytes to receive into: those of ``array`` where they lie in a row."""
    if array.flags.c_contiguous:
        return array.reshape(-1).view(leaf.row.numpy)
    return kernels_for(leaf.flat).empty(leaf.flat.size, leaf.row.numpy)
