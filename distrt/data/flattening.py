"""Transformations whose function returns datasets: flat_map and interleave (data room, layer 5).

May import: errors, elements, pipeline, mapping. A handle is a dataset and a handle of
it, so a rank fetches only its own rows of each. Shuffles in them that nobody gave a seed get
theirs from this node's, which the ranks agree on.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from distrt.arrays import array_namespace, map_structure
from distrt.data.elements import ArraySpec, spec_text, widened
from distrt.data.parallel import call
from distrt.data.pipeline import Epoch, Node, nodes_of, seeded, seeds_of
from distrt.errors import InvalidArgumentError

__all__ = ["FlatMap", "Interleave"]

_Handle = tuple[Node, Any]


class _Flattening(Node):
    """The elements of the datasets that ``function`` makes of the elements of ``upstream``.

    Attributes:
      function: returns the node of a dataset.
      seed, drawn: for the shuffles inside that have none.
    """

    upstream: Node
    function: Callable[..., Node]
    seed: int
    drawn: bool

    def _opened(self, epoch: Epoch) -> Iterator[Iterator[_Handle]]:
        """Yield an iterator over the handles of each dataset."""
        for index, handle in enumerate(self.upstream.handles(epoch)):
            node = self._node(self.upstream.fetch(handle), index)
            yield zip(itertools.repeat(node), node.handles((*epoch, index)), strict=False)

    def _node(self, element: Any, index: int) -> Node:
        node: Node = call(self.function, element)
        drawn = len(seeds_of(node))
        if drawn:
            seeds = np.random.SeedSequence((self.seed % 2**64, index)).generate_state(drawn)
            node = seeded(node, seeds.tolist())
        mine = node.element_spec
        try:
            widened(self.element_spec, mine)
        except ValueError:
            raise InvalidArgumentError(
                "the datasets that the function returns must have elements of one structure, rank "
                f"and dtype: expected {spec_text(self.element_spec)}, got {spec_text(mine)} for "
                f"element {index}"
            ) from None
        return node

    def fetch(self, handle: _Handle) -> Any:
        return handle[0].fetch(handle[1])

    def gather(self, handles: Sequence[_Handle]) -> Any:
        if len(handles) == 0:
            return self._nothing
        # Rows of one dataset are gathered at once.
        runs = itertools.groupby(handles, key=lambda handle: handle[0])
        parts = [node.gather([inner for _, inner in run]) for node, run in runs]
        if len(parts) == 1:
            return parts[0]
        try:
            return map_structure(
                lambda *leaves: array_namespace(leaves[0]).concatenate(leaves), *parts
            )
        except ValueError:
            # Of unequal shapes: the general way says so.
            return super().gather(handles)

    def _example_node(self, variant: int) -> Node:
        node: Node = call(self.function, self.upstream.example(variant))
        return node

    def example(self, variant: int) -> Any:
        return self._example_node(variant).example(variant)

    @property
    def batched(self) -> bool:
        return any(node.batched for node in nodes_of(self._example_node(0)))

    @cached_property
    def element_spec(self) -> Any:
        spec = self._example_node(0).element_spec
        try:
            return widened(spec, self._example_node(1).element_spec)
        except Exception:
            # The function works for real elements only: nothing is known of its first dimension.
            return map_structure(
                lambda leaf: ArraySpec((None, *leaf.shape[1:])[: len(leaf.shape)], leaf.dtype), spec
            )

    def cardinality(self) -> int:
        return 0 if self.upstream.cardinality() == 0 else -2


@final
@dataclass(frozen=True, eq=False)
class FlatMap(_Flattening):
    """The datasets one after the other; see ``Dataset.flat_map``."""

    upstream: Node
    function: Callable[..., Node]
    seed: int
    drawn: bool = True

    def handles(self, epoch: Epoch) -> Iterator[_Handle]:
        return itertools.chain.from_iterable(self._opened(epoch))

    def describe(self) -> str:
        return f"{self.upstream.describe()}.flat_map({self.function.__qualname__})"


@final
@dataclass(frozen=True, eq=False)
class Interleave(_Flattening):
    """``cycle_length`` datasets at a time, in turns; see ``Dataset.interleave``."""

    upstream: Node
    function: Callable[..., Node]
    seed: int
    cycle_length: int
    block_length: int
    drawn: bool = True

    def handles(self, epoch: Epoch) -> Iterator[_Handle]:
        unopened = self._opened(epoch)
        slots: list[Iterator[_Handle] | None] = [None] * self.cycle_length
        # As in tf.data: a dataset that ended leaves its slot empty until its next turn.
        while True:
            for slot, current in enumerate(slots):
                taken = current if current is not None else next(unopened, None)
                slots[slot] = taken
                if taken is None:
                    continue
                block = 0
                for handle in itertools.islice(taken, self.block_length):
                    block += 1
                    yield handle
                if block < self.block_length:
                    slots[slot] = None
            if not any(slots):
                # All slots are empty, and it may be that nothing is left to open.
                following = next(unopened, None)
                if following is None:
                    return
                unopened = itertools.chain([following], unopened)

    def describe(self) -> str:
        return (
            f"{self.upstream.describe()}.interleave({self.function.__qualname__}, "
            f"{self.cycle_length}, {self.block_length})"
        )
