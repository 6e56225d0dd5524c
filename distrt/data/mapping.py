"""Transformations that call a function of the user's (data room, layer 5).

May import: errors, arrays, elements, pipeline, parallel. ``Map`` is applied to the rows that
a rank needs, whoever has the others, so its function must depend on its element only; where
a state goes along, ``scan`` says so and every rank makes all elements below it.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from distrt.arrays import map_structure, to_numpy
from distrt.data.elements import ArraySpec, components, spec_of, stack, widened
from distrt.data.parallel import Workers, call
from distrt.data.pipeline import Epoch, Node, Stream
from distrt.errors import DTypeError, InvalidArgumentError

__all__ = ["Filter", "Map", "Scan", "TakeWhile", "spec_of_examples"]


def spec_of_examples(node: Node) -> Any:
    """Return the spec that the two examples of a node have in common."""
    spec = spec_of(node.example(0))
    try:
        return widened(spec, spec_of(node.example(1)))
    except Exception:
        # The function works for real elements only: nothing is known of its first dimension.
        return map_structure(
            lambda leaf: ArraySpec((None, *leaf.shape[1:])[: len(leaf.shape)], leaf.dtype), spec
        )


@final
@dataclass(frozen=True, eq=False)
class Map(Node):
    """``function`` of every element; see ``Dataset.map``.

    Attributes:
      workers: what runs it for several rows of a batch at once, or None.
    """

    upstream: Node
    function: Callable[..., Any]
    workers: Workers | None = None

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        return self.upstream.handles(epoch)

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[Any]:
        return self.upstream.handles_from(epoch, start)

    def blocks(self, epoch: Epoch, start: int, size: int) -> Iterator[Sequence[Any]]:
        return self.upstream.blocks(epoch, start, size)

    def fetch(self, handle: Any) -> Any:
        element = self.upstream.fetch(handle)
        if self.workers is not None and self.workers.processes:
            return components(self.workers.map(self.function, [element])[0])
        return components(call(self.function, element))

    def gather(self, handles: Sequence[Any]) -> Any:
        if self.workers is None or len(handles) == 0:
            return super().gather(handles)
        elements = [self.upstream.fetch(handle) for handle in handles]
        return stack([components(made) for made in self.workers.map(self.function, elements)])

    def example(self, variant: int) -> Any:
        return components(call(self.function, self.upstream.example(variant)))

    @cached_property
    def element_spec(self) -> Any:
        return spec_of_examples(self)

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        return f"{self.upstream.describe()}.map({_name(self.function)})"


class _Chosen(Stream):
    """Some of the elements of ``upstream``, chosen by ``predicate``."""

    upstream: Node
    predicate: Callable[..., Any]

    def example(self, variant: int) -> Any:
        return self.upstream.example(variant)

    @property
    def element_spec(self) -> Any:
        return self.upstream.element_spec

    def cardinality(self) -> int:
        return 0 if self.upstream.cardinality() == 0 else -2

    def _holds(self, element: Any, what: str) -> bool:
        answer = to_numpy(components(call(self.predicate, element)))
        if answer.shape != () or answer.dtype != np.bool_:
            raise InvalidArgumentError(
                f"{what}: expected {_name(self.predicate)} to return a bool, got "
                f"{answer.dtype}{list(answer.shape)}"
            )
        return bool(answer)


@final
@dataclass(frozen=True, eq=False)
class Filter(_Chosen):
    """The elements for which ``predicate`` holds; see ``Dataset.filter``."""

    upstream: Node
    predicate: Callable[..., Any]

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        for handle in self.upstream.handles(epoch):
            element = self.upstream.fetch(handle)
            if self._holds(element, "filter"):
                yield element

    def describe(self) -> str:
        return f"{self.upstream.describe()}.filter({_name(self.predicate)})"


@final
@dataclass(frozen=True, eq=False)
class TakeWhile(_Chosen):
    """The elements before the first for which ``predicate`` does not hold."""

    upstream: Node
    predicate: Callable[..., Any]

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        for handle in self.upstream.handles(epoch):
            element = self.upstream.fetch(handle)
            if not self._holds(element, "take_while"):
                return
            yield element

    def describe(self) -> str:
        return f"{self.upstream.describe()}.take_while({_name(self.predicate)})"


@final
@dataclass(frozen=True, eq=False)
class Scan(Stream):
    """``function`` of a state and every element; see ``Dataset.scan``."""

    upstream: Node
    initial_state: Any
    function: Callable[..., Any]

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        state = self.initial_state
        for handle in self.upstream.handles(epoch):
            state, output = self._step(state, self.upstream.fetch(handle))
            yield output

    def _step(self, state: Any, element: Any) -> tuple[Any, Any]:
        result = self.function(state, element)
        if type(result) is not tuple or len(result) != 2:
            raise DTypeError(
                f"scan: expected {_name(self.function)} to return (new_state, output), got "
                f"{result!r}"
            )
        after, output = components(result[0]), components(result[1])
        before, now = spec_of(state), spec_of(after)
        if before != now:
            raise InvalidArgumentError(
                f"scan: expected the state to stay {before}, as initial_state is, got {now}"
            )
        return after, output

    def example(self, variant: int) -> Any:
        return self._step(self.initial_state, self.upstream.example(variant))[1]

    @cached_property
    def element_spec(self) -> Any:
        return spec_of_examples(self)

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        return f"{self.upstream.describe()}.scan({_name(self.function)})"


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
