"""What the verbs make of their arguments (layer 4).

May import: arguments, engine, progress, collectives, kernels, arrays, reduce_op, errors. Each
method checks the arguments of its verb, in the caller's thread, makes them flat, whatever
their layout, structure or kind of memory, and returns a ``Call``, which general.py has
all ranks agree on and run. Communicator's docstrings say what each verb does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

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
from distrt.collectives import indexed_slices, schedule
from distrt.collectives.direct import Direct
from distrt.collectives.indexed_slices import IndexedSlices
from distrt.engine import Engine
from distrt.errors import InvalidArgumentError
from distrt.kernels import kernels_for
from distrt.progress import Program
from distrt.reduce_op import ReduceOp

__all__ = ["Call", "Verbs"]


class Call(NamedTuple):
    """A checked call.

    Attributes:
      text: what all ranks must say alike, without the verb.
      program: what to run once they have.
      quick: how the quick way would say it, or None where it would not take it.
      source: the flat array, where it is an all_reduce of one.
    """

    text: str
    program: Program[Any]
    quick: Callable[[Direct], int] | None = None
    source: Any = None


@final
class Verbs:
    """The verbs of a Communicator of ``size`` ranks."""

    def __init__(self, engine: Engine, rank: int, size: int) -> None:
        self.engine, self.rank, self.size = engine, rank, size

    def all_reduce(self, value: Any, op: Any, out: Any) -> Call:
        """See ``Communicator.all_reduce``."""
        parsed, tree = ReduceOp.parse(op), flatten(value)
        if any(isinstance(leaf, IndexedSlices) for leaf in tree.leaves):
            return self._sparse(tree, parsed, out)
        leaves = leaves_of(tree, parsed)
        outs = outs_of(out, tree, leaves)

        def run(leaf: Leaf, target: Any) -> Program[None]:
            divisor = self._divisor(parsed)
            return self.engine.all_reduce(leaf.row, leaf.flat, target, parsed, divisor)

        program = self._each(tree, untangled(leaves, outs), outs, run)
        text = f"op={parsed.value} {describe(tree, leaves)}"
        source = leaves[0].flat if tree.spec.is_leaf() else None
        return Call(text, program, _quick("all_reduce", tree, leaves, parsed), source)

    def _sparse(self, tree: Tree, op: ReduceOp, out: Any) -> Call:
        """As ``all_reduce``, where some leaves are IndexedSlices."""
        if out is not None:
            raise InvalidArgumentError(
                "all_reduce of IndexedSlices: expected no out, because the number of rows is "
                "known only when all ranks have sent theirs"
            )
        calls = [
            self._slices(leaf, op)
            if isinstance(leaf, IndexedSlices)
            else self.all_reduce(leaf, op, None)
            for leaf in tree.leaves
        ]

        def program() -> Program[Any]:
            results = []
            for call in calls:
                results.append((yield from call.program))
            return tree.rebuild(results)

        return Call(f"{tree.spec} {' '.join(call.text for call in calls)}", program())

    def _slices(self, slices: IndexedSlices, op: ReduceOp) -> Call:
        indexed_slices.check(slices, op)

        def program() -> Program[IndexedSlices]:
            values = yield from self.all_gather(slices.values, 0, None).program
            indices = yield from self.all_gather(slices.indices, 0, None).program
            return indexed_slices.combined(slices, op, values, indices, self.size)

        return Call(indexed_slices.describe(slices, op), program())

    def reduce(self, value: Any, op: Any, root: int) -> Call:
        """See ``Communicator.reduce``."""
        parsed, chosen, tree = ReduceOp.parse(op), self._root(root), flatten(value)
        leaves = leaves_of(tree, parsed)
        divisor = self._divisor(parsed)

        def run(leaf: Leaf, target: Any) -> Program[None]:
            return self.engine.reduce(leaf.row, leaf.flat, target, parsed, divisor, chosen)

        def program() -> Program[Any]:
            if self.rank == chosen:
                return (yield from self._each(tree, leaves, [None] * len(leaves), run))
            for leaf in leaves:
                yield from run(leaf, None)
            return None

        return Call(f"op={parsed.value} root={chosen} {describe(tree, leaves)}", program())

    def reduce_scatter(self, value: Any, op: Any, out: Any) -> Call:
        """See ``Communicator.reduce_scatter``."""
        parsed, tree = ReduceOp.parse(op), flatten(value)
        leaves = leaves_of(tree, parsed)
        parts = [parts_of("reduce_scatter", leaf, self.size)[self.rank] for leaf in leaves]
        outs = outs_of(out, tree, parts)
        # An ``out`` may lie in any of the values, its own too.
        wholes = iter(untangled(leaves, outs, own=True))

        def run(part: Leaf, target: Any) -> Program[None]:
            whole = next(wholes)
            width = whole.flat.size // max(1, whole.shape[0])
            rows = schedule.chunks(whole.shape[0], self.size)
            chunks = [schedule.Span(r.offset * width, r.length * width) for r in rows]
            divisor = self._divisor(parsed)
            return self.engine.reduce_scatter(part.row, whole.flat, target, parsed, divisor, chunks)

        program = self._each(tree, parts, outs, run)
        text = f"op={parsed.value} {describe(tree, leaves)}"
        return Call(text, program, _quick("reduce_scatter", tree, leaves, parsed))

    def broadcast(self, value: Any, root: int, out: Any) -> Call:
        """See ``Communicator.broadcast``."""
        chosen, tree = self._root(root), flatten(value)
        leaves = leaves_of(tree, None)
        outs = outs_of(out, tree, leaves)

        def run(leaf: Leaf, target: Any) -> Program[None]:
            return self.engine.broadcast(leaf.flat, target, chosen)

        program = self._each(tree, untangled(leaves, outs), outs, run)
        text = f"root={chosen} {describe(tree, leaves)}"
        return Call(text, program, _quick("broadcast", tree, leaves, None, chosen))

    def all_gather(self, value: Any, axis: int, out: Any) -> Call:
        """See ``Communicator.all_gather``."""
        tree, parts, text = _fronts("all_gather", value, axis)

        def program() -> Program[Any]:
            results = []
            for leaf, place in parts:
                flat, lengths = yield from self.engine.all_gather(leaf.flat)
                rows = yield from self._rows(leaf, lengths)
                results.append(_joined(flat, rows, leaf, place))
            return _filled(out, tree, results)

        leaves, place = [leaf for leaf, _ in parts], parts[0][1] if parts else 0
        return Call(text, program(), _quick("all_gather", tree, leaves, None, place))

    def gather(self, value: Any, root: int, axis: int) -> Call:
        """See ``Communicator.gather``."""
        chosen, (tree, parts, text) = self._root(root), _fronts("gather", value, axis)

        def program() -> Program[Any]:
            results = []
            for leaf, place in parts:
                flat, lengths = yield from self.engine.gather(leaf.flat, chosen)
                rows = yield from self._rows(leaf, lengths)
                results.append(None if flat is None else _joined(flat, rows, leaf, place))
            return tree.rebuild(results) if self.rank == chosen else None

        return Call(f"root={chosen} {text}", program())

    def scatter(self, value: Any, root: int) -> Call:
        """See ``Communicator.scatter``."""
        chosen, tree = self._root(root), flatten(value)
        leaves = leaves_of(tree, None)
        parts = [parts_of("scatter", leaf, self.size) for leaf in leaves]
        each = iter(zip(leaves, parts, strict=True))

        def run(part: Leaf, target: Any) -> Program[None]:
            whole, shares = next(each)
            table = np.zeros((self.size, self.size), np.int64)
            table[chosen] = [share.flat.size for share in shares]
            return self.engine.pairs("scatter", whole.flat, target, table)

        own = [shares[self.rank] for shares in parts]
        program = self._each(tree, own, [None] * len(own), run)
        return Call(f"root={chosen} {describe(tree, leaves)}", program)

    def all_to_all(self, value: Any, counts: Sequence[int] | None, out: Any) -> Call:
        """See ``Communicator.all_to_all``."""
        tree = flatten(value)
        leaves = leaves_of(tree, None)
        quick, rows = None, None
        if counts is None:
            for leaf in leaves:
                parts_of("all_to_all", leaf, self.size, equal=True)
            text, quick = describe(tree, leaves), _quick("all_to_all", tree, leaves, None)
        else:
            rows = counts_of(leaves, counts, self.size)
            texts = [f"{leaf.dtype.name}{['*', *leaf.shape[1:]]}" for leaf in leaves]
            text = f"with counts {tree.spec} {' '.join(texts)}"

        def program() -> Program[Any]:
            results = []
            # Rows that each rank (first index) has for each (second index).
            table = None if rows is None else (yield from self.engine.table(rows))
            for leaf in leaves:
                moved = table
                if moved is None:
                    moved = np.full((self.size, self.size), leaf.shape[0] // self.size, np.int64)
                received = int(moved[:, self.rank].sum())
                nbytes = received * row_bytes(leaf)
                flat = kernels_for(leaf.flat).empty(nbytes, leaf.flat.dtype)
                yield from self.engine.pairs("all_to_all", leaf.flat, flat, moved * row_bytes(leaf))
                results.append(_joined(flat, received, leaf, 0))
            return _filled(out, tree, results)

        return Call(text, program(), quick)

    def barrier(self) -> Call:
        """See ``Communicator.barrier``."""
        return Call("", _nothing())

    def objects(self, text: str, root: int | None, payload: Callable[[], bytes]) -> Call:
        """Gather all ranks' payloads or, with a root, take the root's."""
        chosen = None if root is None else self._root(root)
        sends = chosen is None or chosen == self.rank
        return Call(text, self.engine.objects(chosen, payload() if sends else b""))

    def derive(self, make: Callable[[], Any], text: str = "") -> Call:
        """Have all ranks come before ``make``, in which they wait for each other."""

        def program() -> Program[Any]:
            yield from ()
            return make()

        return Call(text, program())

    def free(self) -> Call:
        """See ``Communicator.free``."""
        return Call("", self.engine.free())

    # -------------------------------------------------------------- their parts

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
        run: Callable[[Leaf, Any], Program[None]],
    ) -> Program[Any]:
        results = []
        for out, leaf in zip(outs, leaves, strict=True):
            results.append((yield from self._into(out, leaf, run)))
        return tree.rebuild(results)

    def _into(
        self, out: Any, leaf: Leaf, run: Callable[[Leaf, Any], Program[None]]
    ) -> Program[Any]:
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
        yield from run(leaf, target)
        if direct:
            return out
        result = target.view(leaf.dtype).reshape(leaf.shape)
        if out is None:
            return result
        copy_to(out, result)
        return out

    def _rows(self, leaf: Leaf, lengths: Sequence[int]) -> Program[int]:
        """Return how many rows all ranks have, of which they gave ``lengths`` bytes."""
        if width := row_bytes(leaf):
            return sum(lengths) // width
        # Rows without bytes cannot be told from what was gathered.
        return int((yield from self.engine.table([leaf.shape[0]])).sum())


def _nothing() -> Program[None]:
    yield from ()


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


def _fronts(verb: str, value: Any, axis: int) -> tuple[Tree, list[tuple[Leaf, int]], str]:
    """Return the structure, its leaves with ``axis`` to the front, and both in words."""
    tree = flatten(value)
    parts = [front_of(verb, v, axis) for v in tree.leaves]
    texts = [f"{leaf.dtype.name}{['*', *leaf.shape[1:]]}" for leaf, _ in parts]
    return tree, parts, f"axis={axis} {tree.spec} {' '.join(texts)}"
