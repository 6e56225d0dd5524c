"""The communicator: the verbs (layer 4).

May import: arguments, collectives, health, kernels, transport, settings, arrays,
reduce_op, errors. A verb checks its arguments once, agrees with the other ranks that they
are making the same call, picks an algorithm and runs it. Nothing below it
raises for bad input; nothing above it sends a byte.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, final

import numpy as np

from distrt.arguments import Leaf, describe, front_of, leaves_of, outs_of, untangled
from distrt.arrays import (
    DType,
    Tree,
    address_of,
    array_namespace,
    copy_to,
    dtype_of,
    flatten,
    share_memory,
)
from distrt.collectives import schedule
from distrt.collectives.ring import Ring, Slots
from distrt.errors import ContextError, DistrtError, InvalidArgumentError, by_rank
from distrt.health.fingerprint import Fingerprints
from distrt.kernels import kernels_for
from distrt.reduce_op import ReduceOp
from distrt.settings import Settings
from distrt.transport.base import Transport

__all__ = ["Communicator"]

_T = TypeVar("_T")
_P = ParamSpec("_P")


def _verb(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Refuse a call while another thread of this rank is in one.

    Two threads would pair their messages with each other's: wrong results, no error.
    """

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        self: Any = args[0]
        if not self._busy.acquire(blocking=False):
            raise ContextError(
                f"{method.__name__} was called while another thread of rank {self.rank} is in a "
                "collective call: make all collective calls of a rank from one thread"
            )
        try:
            return method(*args, **kwargs)
        finally:
            self._busy.release()

    return call


@final
class Communicator:
    """The collective verbs over the ranks of a transport.

    Every verb takes a NumPy or CuPy array, a Python number, or a nested
    structure (tuples, lists, dicts, named tuples; the order of a dict's keys
    never matters), must be called by all ranks in the same order, and gives all
    ranks the same bits. Arguments are never changed; results are new arrays, or
    ``out``. Any layout (strided, Fortran-ordered, read-only, empty) will do.
    Element types: float16/32/64, bfloat16, all integers; complex for SUM and
    MEAN; bool for MIN and MAX. The mean of integers is a float (true division).

    Where ranks disagree on the call, or one of them passes what cannot be
    taken, every rank raises CollectiveMismatchError naming rank -> call. A rank
    makes its calls from one thread at a time; another one gets a ContextError.

    Attributes:
      rank, size: this rank and the number of ranks.
      transport: what carries the bytes.
      algorithm: the name of the algorithm in use.
    """

    algorithm = "ring"

    def __init__(self, transport: Transport, settings: Settings | None = None) -> None:
        self.rank, self.size, self.transport = transport.rank, transport.size, transport
        self.settings = settings or Settings()
        transport.timeout_seconds = self.settings.timeout_seconds
        self._fingerprints = Fingerprints(transport)
        self._slots = Slots()
        self._busy = threading.RLock()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size} over {self.transport.name}>"

    # ------------------------------------------------------------------ verbs

    @_verb
    def all_reduce(self, value: Any, op: ReduceOp | str = ReduceOp.SUM, *, out: Any = None) -> Any:
        """Combine the ranks' values; every rank gets the result. All ranks must call.

        Args:
          value: equal structure, shapes and dtypes on all ranks.
          op: SUM, MEAN, PROD, MIN or MAX; a ReduceOp or its name.
          out: arrays, structured as ``value``, that receive the result; may be ``value``.

        Returns:
          The result, structured as ``value``; ``out`` where it was given.

        Source: MPI_Allreduce, tf.distribute.ReplicaContext.all_reduce.
        """

        def prepare() -> tuple[str, tuple[ReduceOp, Tree, list[Leaf], list[Any]]]:
            parsed = ReduceOp.parse(op)
            tree = flatten(value)
            leaves = leaves_of(tree, parsed)
            outs = outs_of(out, tree, leaves)
            leaves = untangled(leaves, outs)
            return f"op={parsed.value} {describe(tree, leaves)}", (parsed, tree, leaves, outs)

        parsed, tree, leaves, outs = self._agree("all_reduce", prepare)
        divisor = float(self.size) if parsed.divides else 1.0

        def run(leaf: Leaf, target: Any) -> None:
            self._ring(
                schedule.all_reduce(self.size, self.rank),
                schedule.chunks(leaf.flat.size, self.size),
                leaf.row,
                source=leaf.flat,
                target=target,
                op=parsed,
                divisor=divisor,
            )

        return tree.rebuild(
            [self._into(o, leaf, run) for o, leaf in zip(outs, leaves, strict=True)]
        )

    @_verb
    def reduce(self, value: Any, op: ReduceOp | str = ReduceOp.SUM, root: int = 0) -> Any:
        """As ``all_reduce``, but only ``root`` gets the result; the others get None.

        Source: MPI_Reduce.
        """

        def prepare() -> tuple[str, tuple[ReduceOp, Tree, list[Leaf]]]:
            parsed, chosen = ReduceOp.parse(op), self._root(root)
            tree = flatten(value)
            leaves = leaves_of(tree, parsed)
            return f"op={parsed.value} root={chosen} {describe(tree, leaves)}", (
                parsed,
                tree,
                leaves,
            )

        parsed, tree, leaves = self._agree("reduce", prepare)
        divisor = float(self.size) if parsed.divides else 1.0

        def run(leaf: Leaf, target: Any) -> None:
            self._ring(
                schedule.reduce(self.size, self.rank, root),
                schedule.chunks(leaf.flat.size, 1),
                leaf.row,
                source=leaf.flat,
                target=target,
                op=parsed,
                divisor=divisor,
            )

        if self.rank == root:
            return tree.rebuild([self._into(None, leaf, run) for leaf in leaves])
        for leaf in leaves:
            run(leaf, None)
        return None

    @_verb
    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Give every rank ``root``'s value. All ranks must call.

        Args:
          value: equal structure, shapes and dtypes on all ranks; only root's contents count.
          root: the rank whose value it is.

        Source: MPI_Bcast.
        """

        def prepare() -> tuple[str, tuple[Tree, list[Leaf]]]:
            chosen, tree = self._root(root), flatten(value)
            leaves = leaves_of(tree, None)
            return f"root={chosen} {describe(tree, leaves)}", (tree, leaves)

        tree, leaves = self._agree("broadcast", prepare)
        program = schedule.broadcast(self.size, self.rank, root)

        def run(leaf: Leaf, target: Any) -> None:
            if self.rank == root:
                target[...] = leaf.flat
            chunks = schedule.chunks(leaf.flat.size, 1)
            self._ring(program, chunks, leaf.row, source=leaf.flat, target=target)

        return tree.rebuild([self._into(None, leaf, run) for leaf in leaves])

    @_verb
    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate the ranks' values along ``axis``, in rank order. All ranks must call.

        Args:
          value: at least one dimension; shapes may differ along ``axis`` only, parts may be empty.
          axis: counted from the end where negative.

        Source: MPI_Allgatherv, tf.distribute.ReplicaContext.all_gather.
        """

        def prepare() -> tuple[str, tuple[Tree, list[tuple[Leaf, int]]]]:
            tree = flatten(value)
            parts = [front_of(v, axis) for v in tree.leaves]
            texts = [f"{leaf.dtype.name}{['*', *leaf.shape[1:]]}" for leaf, _ in parts]
            return f"axis={axis} {tree.spec} {' '.join(texts)}", (tree, parts)

        tree, parts = self._agree("all_gather", prepare)
        lengths = self._gather_flat(np.array([leaf.shape[0] for leaf, _ in parts], np.int64))
        rows = lengths.reshape(self.size, len(parts))
        results = []
        for (leaf, place), counts in zip(parts, rows.T, strict=True):
            row_bytes = leaf.dtype.itemsize * int(np.prod(leaf.shape[1:], dtype=np.int64))
            flat = self._gather_flat(leaf.flat, [int(c) * row_bytes for c in counts])
            array = flat.view(leaf.dtype).reshape(int(counts.sum()), *leaf.shape[1:])
            results.append(array_namespace(array).moveaxis(array, 0, place))
        return tree.rebuild(results)

    @_verb
    def barrier(self) -> None:
        """Return once all ranks have called it. Source: MPI_Barrier."""
        self._fingerprints.agree("barrier")

    @_verb
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value`` in rank order. All ranks must call.

        For small things; arrays belong to ``all_gather``.
        """
        payload = self._agree("all_gather_object", lambda: ("", _pickled(value)))
        return [pickle.loads(p) for p in self.transport.all_gather_bytes(payload)]

    @_verb
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return ``root``'s picklable ``value`` on every rank. All ranks must call."""

        def prepare() -> tuple[str, bytes]:
            chosen = self._root(root)
            return f"root={chosen}", _pickled(value) if self.rank == chosen else b""

        payload = self._agree("broadcast_object", prepare)
        received = self.transport.broadcast_bytes(payload, root)
        return value if self.rank == root else pickle.loads(received)

    @_verb
    def together(
        self, what: str, action: Callable[[], _T], ranks: Sequence[int] | None = None
    ) -> _T | None:
        """Run ``action`` and raise on every rank where it failed on any. All ranks must call.

        For work that can fail on one rank only (opening a file, writing a
        checkpoint): no rank goes on, and none waits, when another could not.

        Args:
          what: what is being done, for the message.
          action: called on ``ranks``, by default on all.
          ranks: the ranks that do it; the others only learn how it went.

        Returns:
          The action's result on the ranks that did it, else None.

        Raises:
          DistrtError: of the class of the first failing rank's error, where that
            is one of distrt's, naming rank -> error; on the failing ranks the
            original error is its cause.
        """
        result, failure = None, None
        if ranks is None or self.rank in ranks:
            try:
                result = action()
            except Exception as error:
                failure = error
        kind = type(failure) if isinstance(failure, DistrtError) else DistrtError
        report = None if failure is None else (kind, f"{type(failure).__name__}: {failure}")
        reports = dict(enumerate(self.all_gather_object(report)))
        failed = {rank: report for rank, report in reports.items() if report is not None}
        if not failed:
            return result
        first = next(iter(failed.values()))[0]
        texts = {rank: text for rank, (_, text) in failed.items()}
        raise first(f"{what} failed:\n{by_rank(texts)}") from failure

    # ---------------------------------------------------------------- the way

    def _agree(self, verb: str, prepare: Callable[[], tuple[str, _T]]) -> _T:
        """Check the arguments and compare the call with the other ranks'.

        A rank whose arguments are refused still takes part, so that the others
        learn why instead of waiting for it.
        """
        with self.refusing(verb):
            text, plan = prepare()
        self._fingerprints.agree(f"{verb} {text}")
        return plan

    @contextlib.contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """Prepare a collective call: an exception inside is told to all ranks, then raised.

        The others, who make the call, raise CollectiveMismatchError instead of waiting.
        """
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, DistrtError) else f"{type(error).__name__}: "
            self._fingerprints.agree(f"{call} refused: {kind}{error}")
            raise

    def _root(self, root: int) -> int:
        if isinstance(root, int | np.integer) and 0 <= root < self.size:
            return int(root)
        raise InvalidArgumentError(f"root={root!r}: expected a rank from 0 to {self.size - 1}")

    def _into(self, out: Any, leaf: Leaf, run: Callable[[Leaf, Any], None]) -> Any:
        """Run with a target for ``leaf`` and return the result as the user sees it.

        ``out`` is written directly where its memory is flat; ``run`` gets the
        very source object as the target where they are the same memory, which
        is how the algorithms recognise an in-place call.
        """
        kernels = kernels_for(leaf.flat)
        direct = out is not None and out.flags.c_contiguous and type(out) is type(leaf.flat)
        if not direct:
            target = kernels.empty(leaf.flat.size, leaf.row.numpy)
        else:
            target = out.reshape(-1).view(leaf.row.numpy)
            if address_of(target) == address_of(leaf.flat):
                target = leaf.flat
            elif share_memory(target, leaf.flat):
                leaf = leaf._replace(flat=leaf.flat.copy())
        run(leaf, target)
        if direct:
            return out
        result = target.view(leaf.dtype).reshape(leaf.shape)
        if out is None:
            return result
        copy_to(out, result)
        return out

    def _ring(
        self,
        program: tuple[schedule.Hop, ...],
        chunks: Sequence[schedule.Span],
        row: DType,
        *,
        source: Any,
        target: Any,
        op: ReduceOp | None = None,
        divisor: float = 1.0,
    ) -> None:
        if self.size == 1:
            if target is not source:
                target[...] = source
            return
        ring = Ring(
            self.transport,
            kernels_for(source),
            program,
            chunks,
            row=row,
            op=op,
            source=source,
            target=target,
            divisor=divisor,
            slots=self._slots,
            segment_bytes=self.settings.segment_bytes,
        )
        self.transport.drive(ring.step, self._fingerprints.call)

    def _gather_flat(self, flat: Any, counts: list[int] | None = None) -> Any:
        """Concatenate the ranks' 1-D arrays, of ``counts`` elements (default: equal ones)."""
        counts = counts or [flat.size] * self.size
        starts = np.concatenate(([0], np.cumsum(counts))).tolist()
        spans = [schedule.Span(a, b - a) for a, b in itertools.pairwise(starts)]
        target = kernels_for(flat).empty(starts[-1], flat.dtype)
        target[spans[self.rank].slice] = flat
        program = schedule.all_gather(self.size, self.rank)
        self._ring(program, spans, dtype_of(flat), source=target, target=target)
        return target


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
