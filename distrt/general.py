"""The general way of every verb: any layout, structure or kind of memory (layer 4).

May import: arguments, engine, collectives.schedule, kernels, arrays, reduce_op,
errors. communicator.py is the only user: it says what a verb means, and tries the
quick way first. Here a verb's arguments are checked and made flat, the call is
agreed on by all ranks, the engine runs it, and the results get their shapes back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, final

import numpy as np

from distrt.arguments import (
    Leaf,
    counts_of,
    describe,
    front_of,
    leaves_of,
    outs_of,
    parts_of,
    row_bytes,
    untangled,
)
from distrt.arrays import (
    Tree,
    address_of,
    array_namespace,
    copy_to,
    dtype_of,
    flatten,
    is_cupy,
    share_memory,
)
from distrt.collectives import schedule
from distrt.collectives.direct import Direct
from distrt.engine import Engine
from distrt.errors import ContextError, DistrtError, InvalidArgumentError
from distrt.kernels import kernels_for
from distrt.reduce_op import ReduceOp

__all__ = ["General"]

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Call(NamedTuple, Generic[_T]):
    """A checked call: in words, how the quick way would say it (or None), and what to run."""

    text: str
    quick: Callable[[Direct], int] | None
    plan: _T


def one_thread(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make ``General.method`` refuse a call while another thread of this rank is in one."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        self: Any = args[0]
        with self.alone(method.__name__):
            return method(*args, **kwargs)

    return call


@final
class General:
    """The verbs of a Communicator, whose docstrings say what each one does.

    ``tried`` is what the quick way answered: None where the call is not plain, False
    where the ranks' calls differ, which remains to be explained.
    """

    def __init__(self, engine: Engine, rank: int, size: int) -> None:
        self.engine, self.rank, self.size = engine, rank, size
        self._busy = threading.RLock()

    @one_thread
    def all_reduce(self, value: Any, op: Any, out: Any, tried: bool | None = None) -> Any:
        """See ``Communicator.all_reduce``."""

        def prepare() -> Call[tuple[ReduceOp, Tree, list[Leaf], list[Any]]]:
            parsed, tree = ReduceOp.parse(op), flatten(value)
            leaves = leaves_of(tree, parsed)
            outs = outs_of(out, tree, leaves)
            quick = _quick("all_reduce", tree, leaves, parsed)
            text = f"op={parsed.value} {describe(tree, leaves)}"
            return Call(text, quick, (parsed, tree, untangled(leaves, outs), outs))

        parsed, tree, leaves, outs = self.agree("all_reduce", prepare, tried)

        def run(leaf: Leaf, target: Any) -> None:
            self.engine.all_reduce(leaf.row, leaf.flat, target, parsed, self._divisor(parsed))

        return self._each(tree, leaves, outs, run)

    @one_thread
    def reduce(self, value: Any, op: Any, root: int) -> Any:
        """See ``Communicator.reduce``."""

        def prepare() -> Call[tuple[ReduceOp, Tree, list[Leaf]]]:
            parsed, chosen, tree = ReduceOp.parse(op), self._root(root), flatten(value)
            leaves = leaves_of(tree, parsed)
            text = f"op={parsed.value} root={chosen} {describe(tree, leaves)}"
            return Call(text, None, (parsed, tree, leaves))

        parsed, tree, leaves = self.agree("reduce", prepare)
        divisor = self._divisor(parsed)

        def run(leaf: Leaf, target: Any) -> None:
            self.engine.reduce(leaf.row, leaf.flat, target, parsed, divisor, root)

        if self.rank == root:
            return self._each(tree, leaves, [None] * len(leaves), run)
        for leaf in leaves:
            run(leaf, None)
        return None

    @one_thread
    def reduce_scatter(self, value: Any, op: Any, out: Any, tried: bool | None = None) -> Any:
        """See ``Communicator.reduce_scatter``."""

        def prepare() -> Call[tuple[ReduceOp, Tree, list[Leaf], list[Leaf], list[Any]]]:
            parsed, tree = ReduceOp.parse(op), flatten(value)
            leaves = leaves_of(tree, parsed)
            parts = [parts_of("reduce_scatter", leaf, self.size)[self.rank] for leaf in leaves]
            outs = outs_of(out, tree, parts)
            quick = _quick("reduce_scatter", tree, leaves, parsed)
            text = f"op={parsed.value} {describe(tree, leaves)}"
            # An ``out`` may lie in any of the values, its own too.
            return Call(text, quick, (parsed, tree, untangled(leaves, outs, own=True), parts, outs))

        parsed, tree, leaves, parts, outs = self.agree("reduce_scatter", prepare, tried)
        wholes = iter(leaves)

        def run(part: Leaf, target: Any) -> None:
            whole = next(wholes)
            width = whole.flat.size // max(1, whole.shape[0])
            rows = schedule.chunks(whole.shape[0], self.size)
            chunks = [schedule.Span(r.offset * width, r.length * width) for r in rows]
            divisor = self._divisor(parsed)
            self.engine.reduce_scatter(part.row, whole.flat, target, parsed, divisor, chunks)

        return self._each(tree, parts, outs, run)

    @one_thread
    def broadcast(self, value: Any, root: int, out: Any, tried: bool | None = None) -> Any:
        """See ``Communicator.broadcast``."""

        def prepare() -> Call[tuple[Tree, list[Leaf], list[Any]]]:
            chosen, tree = self._root(root), flatten(value)
            leaves = leaves_of(tree, None)
            outs = outs_of(out, tree, leaves)
            quick = _quick("broadcast", tree, leaves, None, chosen)
            text = f"root={chosen} {describe(tree, leaves)}"
            return Call(text, quick, (tree, untangled(leaves, outs), outs))

        tree, leaves, outs = self.agree("broadcast", prepare, tried)

        def run(leaf: Leaf, target: Any) -> None:
            self.engine.broadcast(leaf.flat, target, root)

        return self._each(tree, leaves, outs, run)

    @one_thread
    def all_gather(self, value: Any, axis: int, out: Any, tried: bool | None = None) -> Any:
        """See ``Communicator.all_gather``."""
        prepare = functools.partial(_fronts, "all_gather", value, axis)
        tree, parts = self.agree("all_gather", prepare, tried)
        results = [
            _joined(flat, self._rows(leaf, lengths), leaf, place)
            for leaf, place in parts
            for flat, lengths in [self.engine.all_gather(leaf.flat)]
        ]
        return _filled(out, tree, results)

    @one_thread
    def gather(self, value: Any, root: int, axis: int) -> Any:
        """See ``Communicator.gather``."""

        def prepare() -> Call[tuple[Tree, list[tuple[Leaf, int]]]]:
            chosen, call = self._root(root), _fronts("gather", value, axis)
            return Call(f"root={chosen} {call.text}", None, call.plan)

        tree, parts = self.agree("gather", prepare)
        results = []
        for leaf, place in parts:
            flat, lengths = self.engine.gather(leaf.flat, root)
            rows = self._rows(leaf, lengths)
            results.append(None if flat is None else _joined(flat, rows, leaf, place))
        return tree.rebuild(results) if self.rank == root else None

    @one_thread
    def scatter(self, value: Any, root: int) -> Any:
        """See ``Communicator.scatter``."""

        def prepare() -> Call[tuple[Tree, list[Leaf], list[list[Leaf]]]]:
            chosen, tree = self._root(root), flatten(value)
            leaves = leaves_of(tree, None)
            parts = [parts_of("scatter", leaf, self.size) for leaf in leaves]
            return Call(f"root={chosen} {describe(tree, leaves)}", None, (tree, leaves, parts))

        tree, leaves, parts = self.agree("scatter", prepare)
        each = iter(zip(leaves, parts, strict=True))

        def run(part: Leaf, target: Any) -> None:
            whole, shares = next(each)
            table = np.zeros((self.size, self.size), np.int64)
            table[root] = [share.flat.size for share in shares]
            self.engine.pairs(whole.flat, target, table)

        own = [shares[self.rank] for shares in parts]
        return self._each(tree, own, [None] * len(own), run)

    @one_thread
    def all_to_all(
        self, value: Any, counts: Sequence[int] | None, out: Any, tried: bool | None = None
    ) -> Any:
        """See ``Communicator.all_to_all``."""

        def prepare() -> Call[tuple[Tree, list[Leaf], list[int] | None]]:
            tree = flatten(value)
            leaves = leaves_of(tree, None)
            if counts is None:
                for leaf in leaves:
                    parts_of("all_to_all", leaf, self.size, equal=True)
                quick = _quick("all_to_all", tree, leaves, None)
                return Call(describe(tree, leaves), quick, (tree, leaves, None))
            rows = counts_of(leaves, counts, self.size)
            texts = [f"{leaf.dtype.name}{['*', *leaf.shape[1:]]}" for leaf in leaves]
            return Call(f"with counts {tree.spec} {' '.join(texts)}", None, (tree, leaves, rows))

        tree, leaves, rows = self.agree("all_to_all", prepare, tried)
        results = []
        # Rows that each rank (first index) has for each (second index).
        table = None if rows is None else self.engine.table(rows)
        for leaf in leaves:
            if table is None:
                moved = np.full((self.size, self.size), leaf.shape[0] // self.size, np.int64)
            else:
                moved = table
            received = int(moved[:, self.rank].sum())
            nbytes = received * row_bytes(leaf)
            flat = kernels_for(leaf.flat).empty(nbytes, leaf.flat.dtype)
            self.engine.pairs(leaf.flat, flat, moved * row_bytes(leaf))
            results.append(_joined(flat, received, leaf, 0))
        return _filled(out, tree, results)

    @one_thread
    def barrier(self) -> None:
        """See ``Communicator.barrier``."""
        self.engine.agree("barrier")

    @one_thread
    def objects(self, verb: str, text: str, root: int | None, payload: Callable[[], bytes]) -> Any:
        """Gather all ranks' payloads or, with a root, take the root's."""

        def prepare() -> Call[tuple[int | None, bytes]]:
            chosen = None if root is None else self._root(root)
            sends = chosen is None or chosen == self.rank
            return Call(text, None, (chosen, payload() if sends else b""))

        chosen, own = self.agree(verb, prepare)
        return self.engine.objects(chosen, own)

    # ---------------------------------------------------------------- the way

    def agree(self, verb: str, prepare: Callable[[], Call[_T]], tried: bool | None = None) -> _T:
        """Check the arguments and compare the call with the other ranks'.

        A rank whose arguments are refused still takes part, so that the others
        learn why instead of waiting for it.
        """
        with self.refusing(verb):
            call = prepare()
        text = f"{verb} {call.text}"
        if tried is False:
            self.engine.explain(text)
        self.engine.agree(text, call.quick)
        return call.plan

    @contextlib.contextmanager
    def alone(self, verb: str) -> Iterator[None]:
        """Refuse to begin ``verb`` while another thread of this rank is in a call.

        Two threads would pair their messages with each other's: wrong results, no
        error. Until it ends no call takes the quick way, which would not notice it.
        """
        quick = self.engine.quick
        if quick.busy or not self._busy.acquire(blocking=False):
            raise ContextError(
                f"{verb} was called while another thread of rank {self.rank} is in a "
                "collective call: make all collective calls of a rank from one thread"
            )
        quick.held += 1
        try:
            yield
        finally:
            quick.held -= 1
            self._busy.release()

    @contextlib.contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """See ``Communicator.refusing``."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, DistrtError) else f"{type(error).__name__}: "
            self.engine.agree(f"{call} refused: {kind}{error}")
            raise

    def _root(self, root: int) -> int:
        if isinstance(root, int | np.integer) and 0 <= root < self.size:
            return int(root)
        raise InvalidArgumentError(f"root={root!r}: expected a rank from 0 to {self.size - 1}")

    def _divisor(self, op: ReduceOp) -> float:
        return float(self.size) if op.divides else 1.0

    def _each(
        self,
        tree: Tree,
        leaves: Sequence[Leaf],
        outs: Sequence[Any],
        run: Callable[[Leaf, Any], None],
    ) -> Any:
        results = [self._into(out, leaf, run) for out, leaf in zip(outs, leaves, strict=True)]
        return tree.rebuild(results)

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

    def _rows(self, leaf: Leaf, lengths: Sequence[int]) -> int:
        """Return how many rows all ranks have, of which they gave ``lengths`` bytes."""
        width = row_bytes(leaf)
        # Rows without bytes cannot be told from what was gathered.
        return sum(lengths) // width if width else int(self.engine.table([leaf.shape[0]]).sum())


def _joined(flat: Any, rows: int, leaf: Leaf, place: int) -> Any:
    array = flat.view(leaf.dtype).reshape(rows, *leaf.shape[1:])
    return array_namespace(array).moveaxis(array, 0, place)


def _filled(out: Any, tree: Tree, results: Sequence[Any]) -> Any:
    """Return ``results`` as the structure of ``tree``, or ``out`` with them copied in."""
    if out is None:
        return tree.rebuild(results)
    leaves = leaves_of(Tree(list(results), tree.spec), None)
    for target, result in zip(outs_of(out, tree, leaves), results, strict=True):
        copy_to(target, result)
    return out


def _quick(
    verb: str, tree: Tree, leaves: Sequence[Leaf], op: ReduceOp | None, root: int = 0
) -> Callable[[Direct], int] | None:
    """Return how the quick way would say a call, where it is one plain array on the host."""
    if not tree.spec.is_leaf() or is_cupy(leaves[0].flat):
        return None
    leaf = leaves[0]
    shape = leaf.shape[1:] if verb == "all_gather" else leaf.shape
    return lambda direct: direct.quick_digest(verb, dtype_of(leaf), shape, op, root)


def _fronts(verb: str, value: Any, axis: int) -> Call[tuple[Tree, list[tuple[Leaf, int]]]]:
    tree = flatten(value)
    parts = [front_of(verb, v, axis) for v in tree.leaves]
    texts = [f"{leaf.dtype.name}{['*', *leaf.shape[1:]]}" for leaf, _ in parts]
    places = [place for _, place in parts]
    quick = _quick(verb, tree, [leaf for leaf, _ in parts], None, places[0] if places else 0)
    return Call(f"axis={axis} {tree.spec} {' '.join(texts)}", quick, (tree, parts))
