"""The pipeline: what every source and transformation can do (data room, layer 5).

May import: errors, arrays, elements. A dataset is a chain of nodes. What flows
along it are not elements but *handles*: whatever a node needs to make an
element later, for a source a row number. Shuffling, taking and repeating then
move integers, a batch is one gather, and a rank makes only its own rows. Where an
element must be made to know what follows (a filter, a generator), the element is its
own handle: such a node is a ``Stream``, and every rank makes all elements below it.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from distrt.arrays import map_structure
from distrt.data.elements import stack

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Epoch",
    "Mover",
    "Node",
    "Stream",
    "nodes_of",
    "rewrite",
    "runs_of",
    "seeded",
    "seeds_of",
    "upstreams",
    "with_upstreams",
]

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

# Which pass over the data: the number of the iteration, then that of each repetition around.
Epoch = tuple[int, ...]


class Node(abc.ABC):
    """A source or transformation; immutable, so that pipelines can share it.

    Attributes:
      settled: its own work cannot fail, nor give ranks that run the same program other
        elements. Only pipelines of such nodes are walked without asking the other ranks.
      splits: whole elements pass through it, so it makes a part of its element from the same
        part of its upstreams' elements.
      unproven: nothing says that all ranks read the same from it, so they compare digests.
    """

    settled: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    unproven: ClassVar[bool] = False

    @property
    def batched(self) -> bool:
        """Whether it makes batches, or elements that may be batches; see ``check_batched``."""
        return False

    @abc.abstractmethod
    def handles(self, epoch: Epoch) -> Iterator[Any]:
        """Yield the handles of one pass, in order; the same ones for the same epoch."""

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[Any]:
        """Yield the handles of one pass after the first ``start``, which are not fetched."""
        return itertools.islice(self.handles(epoch), start, None)

    def blocks(self, epoch: Epoch, start: int, size: int) -> Iterator[Sequence[Any]]:
        """Yield the handles of one pass after the first ``start`` in runs of ``size``.

        The last run may be shorter. Nodes whose handles are row numbers yield arrays of them.
        """
        handles = self.handles_from(epoch, start)
        while run := list(itertools.islice(handles, size)):
            yield run

    @abc.abstractmethod
    def fetch(self, handle: Any) -> Any:
        """Return the element of ``handle``, as arrays that the caller may change."""

    def gather(self, handles: Sequence[Any]) -> Any:
        """Return the batch of the elements of ``handles``; none give first dimensions of 0."""
        if len(handles) == 0:
            return self._nothing
        return stack([self.fetch(handle) for handle in handles])

    @cached_property
    def _nothing(self) -> Any:
        return map_structure(lambda leaf: leaf[:0], stack([self.example(0)]))

    @abc.abstractmethod
    def example(self, variant: int) -> Any:
        """Return an element made from the first rows; what ``variant`` 0 and 1 differ in, varies.

        Both exist for an empty dataset too (zeros). They take the place of
        TensorFlow's tracing: the spec of a mapped dataset is read off them.
        """

    def example_after(self, start: int, variant: int) -> Any:
        """As ``example``, of what follows the first ``start`` elements where that matters."""
        return self.example(variant)

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The structure of ``ArraySpec`` that describes every element."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return the pipeline as text; equal on all ranks that run the same program."""


def runs_of(numbers: Any, size: int) -> Iterator[Any]:
    """Yield slices of ``size`` of an array, the last one shorter."""
    return (numbers[at : at + size] for at in range(0, len(numbers), size))


class Mover(Node):
    """A transformation that only moves whole elements: same handles, another order or number."""

    settled = True
    splits = True
    upstream: Node

    def fetch(self, handle: Any) -> Any:
        return self.upstream.fetch(handle)

    def gather(self, handles: Sequence[Any]) -> Any:
        return self.upstream.gather(handles)

    def example(self, variant: int) -> Any:
        return self.upstream.example(variant)

    @property
    def element_spec(self) -> Any:
        return self.upstream.element_spec


class Stream(Node):
    """A node whose elements are their own handles; each handle is fetched once."""

    def fetch(self, handle: Any) -> Any:
        return handle


def upstreams(node: Any) -> dict[str, tuple[Node, ...]]:
    """Return the nodes in the fields of ``node``: one, or a tuple of them."""
    found = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    several = {n: value if isinstance(value, tuple) else (value,) for n, value in found.items()}
    return {n: v for n, v in several.items() if v and all(isinstance(x, Node) for x in v)}


def nodes_of(node: Node) -> Iterator[Node]:
    """Yield every node of the pipeline, sources first."""
    for upstream in itertools.chain.from_iterable(upstreams(node).values()):
        yield from nodes_of(upstream)
    yield node


def rewrite(node: Any, rule: Callable[[Any], Node]) -> Node:
    """Return the pipeline with ``rule`` applied to every node, in the order of ``nodes_of``."""
    old = upstreams(node)
    new = {name: tuple(rewrite(n, rule) for n in nodes) for name, nodes in old.items()}
    # An unchanged node is kept, with the file it has opened and the spec it has found.
    return rule(node if new == old else with_upstreams(node, new))


def with_upstreams(node: Any, new: Mapping[str, tuple[Node, ...]]) -> Node:
    """Return the same transformation of other nodes, given as ``upstreams`` does."""
    changed = {
        name: nodes if isinstance(getattr(node, name), tuple) else nodes[0]
        for name, nodes in new.items()
    }
    replaced: Node = dataclasses.replace(node, **changed)
    return replaced


def seeds_of(node: Node) -> list[int]:
    """Return the seeds of the nodes that nobody gave one, in order."""
    return [old.seed for old in _unseeded(node)]


def _unseeded(node: Node) -> list[Any]:
    return [old for old in nodes_of(node) if getattr(old, "drawn", False)]


def seeded(node: Node, seeds: Iterable[int]) -> Node:
    """Return the pipeline with ``seeds`` in the nodes that nobody gave one."""
    rest = iter(seeds)

    def seed(old: Any) -> Any:
        drawn = getattr(old, "drawn", False)
        return dataclasses.replace(old, seed=next(rest)) if drawn else old

    return rewrite(node, seed)
