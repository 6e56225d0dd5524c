"""The engine: which algorithm a call takes, and how it is run (layer 4).

May import: choice, messages, progress, collectives, health, kernels, transport, settings, arrays,
reduce_op, errors. verbs.py and general.py are its users. Every method of a verb is a *program*
(progress.py): a generator that yields where it must wait, driven by the queue. The choice
depends on what is equal on all ranks only: the layout, rank 0's table, and the call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from distrt.arrays import DType, is_cupy
from distrt.choice import ALGORITHMS, Choice
from distrt.collectives import schedule
from distrt.collectives.direct import VERBS, Direct, MismatchError
from distrt.collectives.hierarchical import Hierarchical
from distrt.collectives.ring import Slots
from distrt.collectives.schedule import Span
from distrt.errors import PeerError
from distrt.health.fingerprint import Fingerprints
from distrt.kernels import kernels_for
from distrt.messages import Messages
from distrt.progress import Program, Queue
from distrt.reduce_op import ReduceOp
from distrt.settings import Settings
from distrt.transport.base import Transport
from distrt.transport.shared_memory import Node

__all__ = ["Engine", "Quick"]


def _never(*_: Any) -> None:
    """Stand for a quick way that there is not: answer None, as for a call that is not plain."""


@final
class Quick(NamedTuple):
    """The quick ways of the verbs: one call into compiled code, from arguments to result."""

    all_reduce: Callable[[Any, Any, Any], Any] = _never
    reduce_scatter: Callable[[Any, Any, Any], Any] = _never
    all_gather: Callable[[Any, Any, Any], Any] = _never
    broadcast: Callable[[Any, Any, Any], Any] = _never
    all_to_all: Callable[[Any, Any, Any], Any] = _never


@final
class Engine:
    """The algorithms over the ranks of a transport. All ranks must construct it.

    Every call begins with ``agree``; what follows it is equal on all ranks. All
    arrays are flat and contiguous, of a kernel row's dtype (bytes where they only move).

    Attributes:
      groups: the ranks that share memory with each other, in order of their lowest one.
      direct: the shared-memory algorithms, where all ranks share memory.
      quick: the quick ways, of the verbs that ``direct`` always does.
      queue: this communicator's calls, in order.
      choice: the table, and what overrides it.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        node: Node | None,
        choice: Choice | None = None,
    ) -> None:
        self._transport, self._settings = transport, settings
        self._fingerprints = Fingerprints(transport, settings.carried_bytes)
        self._carried: np.ndarray | None = None
        slots, self._first = Slots(), 0
        self._messages = Messages(transport, settings, slots)
        self._node = node
        self._lock = threading.Lock()
        self._held = 0
        self.queue = Queue(transport, self.abandon, self.hold)
        self.groups = _groups(transport, node)
        self.direct: Direct | None = None
        self._hierarchical: Hierarchical | None = None
        if node is not None and len(self.groups) == 1 < transport.size:
            self.direct = Direct(transport, node, settings, self._look, self._patience)
        elif 1 < len(self.groups) < transport.size:
            own = None if node is None or len(node.bases) == 1 else node
            self._hierarchical = Hierarchical(
                transport, self.groups, own, settings, slots, self._patience
            )
        self._choose(Choice(forced=settings.algorithm) if choice is None else choice)

    # ------------------------------------------------------------------ choice

    def _choose(self, choice: Choice) -> None:
        self.choice = choice
        self.quick = Quick()
        if self.direct is not None:
            channel = self.direct.channel
            always = [verb for verb in VERBS[1:] if choice.always(verb, *self._layout) == "direct"]
            self.quick = Quick(**{verb: getattr(channel, f"quick_{verb}") for verb in always})

    @property
    def _layout(self) -> tuple[int, int]:
        return self._transport.size, len(self.groups)

    def algorithms(self, verb: str) -> tuple[str, ...]:
        """Return the names of all algorithms that NumPy arrays can take in ``verb``."""
        lacking = set()
        if self.direct is None:
            lacking.add("direct")
        if self._hierarchical is None:
            lacking.add("hierarchical")
        return tuple(name for name in ALGORITHMS[verb] if name not in lacking)

    def ranges(self, verb: str) -> tuple[tuple[int | None, str], ...]:
        """Return what calls with NumPy arrays take: see ``Choice.ranges``."""
        return self.choice.ranges(verb, *self._layout, self.algorithms(verb))

    def algorithm_for(self, verb: str, nbytes: int = 0, like: Any = None) -> str:
        """Return the name of the algorithm that such a call takes."""
        available = self.algorithms(verb)
        if is_cupy(like):
            available = tuple(n for n in available if n not in ("direct", "hierarchical"))
        return self.choice.choose(verb, nbytes, *self._layout, available)

    @contextlib.contextmanager
    def using(self, algorithm: str) -> Iterator[None]:
        """Take ``algorithm`` in all calls inside that can, those in the background too."""
        # A call chooses when it begins, which in the background may be any time.
        before, inside = self.choice, self.choice.forcing(algorithm)
        self.queue.drain()
        self._choose(inside)
        try:
            yield
        finally:
            self.queue.drain()
            self._choose(before)

    def empty(self, like: Any, count: int, dtype: Any) -> Any:
        """Return a flat array that this engine's algorithms use where it lies."""
        if self._node is None or is_cupy(like):
            return kernels_for(like).empty(count, np.dtype(dtype))
        return self._node.arena.heap.empty(count, dtype)

    def derived(self, transport: Transport) -> tuple[Node | None, Choice]:
        """Return the memory and the table of a communicator of some of the ranks, or all."""
        node = None if self._node is None else self._node.among(transport.world_ranks)
        return node, self.choice

    def free(self) -> Program[None]:
        """Give back what the communicator holds. No rank can use it any more."""
        # Once all ranks have sent a message, none looks at another one's flags any more.
        yield from self._transport.gathering(b"")
        self.hold(1)
        for direct in (self.direct, self._hierarchical and self._hierarchical.direct):
            if direct is not None:
                direct.free()
        self.direct = self._hierarchical = None
        self._transport.free()

    # ------------------------------------------------------------- the channel

    @property
    def busy(self) -> bool:
        """Whether a thread of this rank is in a quick call."""
        return self.direct is not None and self.direct.channel.busy

    def hold(self, number: int) -> None:
        """Let no call take the quick way until the numbers add up to 0 again."""
        with self._lock:
            self._held += number
            if self.direct is not None:
                self.direct.channel.held = self._held

    def notice(self) -> None:
        """Let the transport learn that a quick call was given up, so that it refuses others."""
        given_up = self.direct is not None and self.direct.channel.given_up
        if given_up and not self._transport.given_up:
            self._transport.give_up(lambda: False)

    def abandon(self) -> None:
        """Tell the neighbours that this rank has given a call up."""
        for direct in (self.direct, self._hierarchical and self._hierarchical.direct):
            if direct is not None:
                direct.channel.give_up()

    def _patience(self) -> float:
        return self.queue.patience

    def _look(self, seconds: float, aborted: int, verb: int, value: np.ndarray) -> None:
        if aborted >= 0:
            raise PeerError(Direct.lost(aborted))
        shape = f"{value.dtype.name}{list(value.shape)}"
        self._transport.look(f"call #{self._transport.calls} {VERBS[verb]} {shape}", seconds)

    # ----------------------------------------------------------------- checks

    def agree(
        self,
        verb: str,
        text: str,
        quick: Callable[[Direct], int] | None = None,
        source: Any = None,
    ) -> Program[None]:
        """Compare the call with the other ranks'.

        Args:
          verb: the verb.
          text: the rest of the call in words.
          quick: given where the call is one that the quick way may make as well: its
            fingerprint, which then travels with the collective that follows.
          source: given where it is an all_reduce of one array: if it is short, it travels
            with the fingerprint.
        """
        direct, call = self.direct, f"{verb} {text}".rstrip()
        if direct is None:
            own = source.view(np.uint8) if self._short(verb, source) else None
            self._carried = yield from self._fingerprints.agree(call, own)
            return
        self._fingerprints.call = f"call #{self._transport.calls + 1} {call}"
        if quick is not None and getattr(self.quick, verb) is not _never:
            self._first = quick(direct)
        else:
            yield from self._steps(direct.agree(call))

    def _short(self, verb: str, source: Any) -> bool:
        return (
            source is not None
            and 0 < source.nbytes * self._transport.size <= self._settings.carried_bytes
            and self._transport.size > 1
            and not is_cupy(source)
            and self.algorithm_for(verb, source.nbytes) == "halving_doubling"
        )

    def explain(self, call: str) -> Program[None]:
        """Raise what all ranks called; after a quick call that found them different."""
        yield from self._fingerprints.explain(f"call #{self._transport.calls} {call}")

    def _digest(self) -> int:
        digest, self._first = self._first, 0
        return digest

    def _steps(self, step: Callable[[], bool]) -> Program[None]:
        # All ranks see a mismatch at the same barrier and none goes on, so the call has
        # ended, and the next one finds everything in order.
        try:
            while not step():
                yield
        except MismatchError:
            pass
        else:
            return
        yield from self._fingerprints.explain(self._fingerprints.call)

    # -------------------------------------------------------------- reductions

    def all_reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float
    ) -> Program[None]:
        """Reduce ``source`` into ``target``, which may be the same object."""
        if self._carried is not None:
            blocks, self._carried = self._carried, None
            self._messages.carried(blocks, row, source, target, op, divisor)
            return
        name = self.algorithm_for("all_reduce", source.nbytes, source)
        yield from _ALL_REDUCE[name](self, row, source, target, op, divisor)

    def _direct_all_reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float
    ) -> Program[None]:
        assert self.direct is not None
        return self._steps(self.direct.fold(self._digest(), row, op, source, target, divisor))

    def _hierarchical_all_reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float
    ) -> Program[None]:
        assert self._hierarchical is not None
        return self._hierarchical.all_reduce(row, op, source, target, divisor)

    def reduce(
        self, row: DType, source: Any, target: Any, op: ReduceOp, divisor: float, root: int
    ) -> Program[None]:
        """As ``all_reduce``, but only ``root`` has a target."""
        if direct := self._direct_for("reduce", source.nbytes, source):
            fold = direct.fold(self._digest(), row, op, source, target, divisor, root=root)
            return self._steps(fold)
        return self._messages.reduce(row, source, target, op, divisor, root)

    def reduce_scatter(
        self,
        row: DType,
        source: Any,
        target: Any,
        op: ReduceOp,
        divisor: float,
        chunks: Sequence[Span],
    ) -> Program[None]:
        """Reduce chunk r of ``source`` into the target of rank r."""
        if direct := self._direct_for("reduce_scatter", source.nbytes, source):
            digest = self._digest()
            fold = direct.fold(digest, row, op, source, target, divisor, chunks=chunks)
            return self._steps(fold)
        return self._messages.reduce_scatter(row, source, target, op, divisor, chunks)

    # ------------------------------------------------------------------- moves

    def broadcast(self, source: Any, target: Any, root: int) -> Program[None]:
        """Copy the bytes of ``root``'s source into every target."""
        rank, size = self._transport.rank, self._transport.size
        if direct := self._direct_for("broadcast", source.nbytes, source):
            pulls = [(0, target.size if other == root else 0, 0) for other in range(size)]
            offered = source if rank == root else None
            return self._steps(direct.move(self._digest(), offered, target, pulls))
        return self._messages.broadcast(source, target, root)

    def all_gather(self, source: Any) -> Program[tuple[Any, list[int]]]:
        """Return all ranks' bytes, joined in rank order, and how many each had."""
        if direct := self._direct_for("all_gather", 0, source):
            return (yield from self._gathered(direct, source, wanted=True))
        lengths = (yield from self.table([source.size]))[:, 0].tolist()
        return (yield from self._messages.all_gather(source, lengths)), lengths

    def gather(self, source: Any, root: int) -> Program[tuple[Any, list[int]]]:
        """As ``all_gather``, but only ``root`` gets the bytes; the others None."""
        if direct := self._direct_for("gather", 0, source):
            wanted = self._transport.rank == root
            return (yield from self._gathered(direct, source, wanted))
        lengths = (yield from self.table([source.size]))[:, 0].tolist()
        return (yield from self._messages.gather(source, lengths, root)), lengths

    def pairs(self, verb: str, source: Any, target: Any, table: np.ndarray) -> Program[None]:
        """Move ``table[s, d]`` bytes from the source of s to the target of d, in rank order."""
        rank, size = self._transport.rank, self._transport.size
        if direct := self._direct_for(verb, int(table.max(initial=0)) * size, source):
            starts = np.cumsum(table, axis=1) - table
            into = schedule.joined(table[:, rank].tolist())
            pulls = [
                (int(starts[other, rank]), into[other].length, into[other].offset)
                for other in range(size)
            ]
            offered = source if table[rank].any() else None
            return self._steps(direct.move(self._digest(), offered, target, pulls))
        return self._messages.pairs(source, target, table)

    def objects(self, root: int | None, payload: bytes) -> Program[Any]:
        """Return all ranks' payloads or, with a root, the root's."""
        if root is None:
            return self._transport.gathering(payload)
        return self._transport.broadcasting(payload, root)

    def table(self, own: Sequence[int]) -> Program[np.ndarray]:
        """Return all ranks' rows of int64: [size, len(own)]."""
        size = self._transport.size
        row = np.array(own, np.int64).view(np.uint8)
        if self.direct is not None:
            table, _ = yield from self._gathered(self.direct, row, wanted=True)
        else:
            table = yield from self._messages.all_gather(row, [row.size] * size)
        return np.asarray(table.view(np.int64).reshape(size, len(own)))

    def _direct_for(self, verb: str, nbytes: int, source: Any) -> Direct | None:
        return self.direct if self.algorithm_for(verb, nbytes, source) == "direct" else None

    def _gathered(
        self, direct: Direct, source: Any, wanted: bool
    ) -> Program[tuple[Any, list[int]]]:
        lengths: list[int] = []
        targets: list[Any] = []

        def allocate(offered: list[int]) -> Any:
            lengths[:] = offered
            targets.append(np.empty(sum(offered), np.uint8) if wanted else None)
            return targets[0]

        yield from self._steps(direct.gather(self._digest(), source, allocate))
        return targets[0], lengths


_ALL_REDUCE: dict[str, Callable[..., Program[None]]] = {
    "direct": Engine._direct_all_reduce,
    "hierarchical": Engine._hierarchical_all_reduce,
    "halving_doubling": lambda engine, *fold: engine._messages.halving_doubling(*fold),
    "ring": lambda engine, *fold: engine._messages.all_reduce(*fold),
}


def _groups(transport: Transport, node: Node | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, as the ranks see it."""
    if transport.size == 1:
        return ((0,),)
    known = {world_rank: rank for rank, world_rank in enumerate(transport.world_ranks)}
    own = (transport.rank,) if node is None else tuple(known[r] for r in node.world_ranks)
    return tuple(sorted(set(transport.all_gather_object(own))))
