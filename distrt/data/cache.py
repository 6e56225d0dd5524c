"""``cache``: elements made once (data room, layer 5).

May import: arrays, pipeline, cache_file. What a rank keeps is what it made, so each rank keeps
its own rows. The order is that of a pass whose epoch is 0 throughout: a shuffle below a cache
gives the same order ever after. A stream below is walked to its end once.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from distrt.arrays import map_structure
from distrt.data.cache_file import CacheFile
from distrt.data.pipeline import Epoch, Node, Stream, nodes_of

__all__ = ["Cache"]


@final
@dataclass(frozen=True, eq=False)
class Cache(Node):
    """The elements of ``upstream``, each made at most once; see ``Dataset.cache``.

    Attributes:
      filename: where they are kept between runs; "" keeps them in memory only.
      suffix: of this rank's file.
    """

    settled = True
    splits = True
    upstream: Node
    filename: str = ""
    suffix: str = ""

    @cached_property
    def _store(self) -> _Store:
        file = None
        if self.filename:
            file = CacheFile(self.filename + self.suffix, self.upstream)
        return _Store(file)

    @cached_property
    def _streams(self) -> bool:
        return any(isinstance(node, Stream) for node in nodes_of(self.upstream))

    def handles(self, epoch: Epoch) -> Iterator[tuple[int, Any]]:
        store, frozen = self._store, tuple(0 for _ in epoch)
        if not self._streams:
            yield from enumerate(self.upstream.handles(frozen))
            return
        # Here the handles are elements: they are kept once a pass has come to its end; one that
        # is left early is made again, as in tf.data.
        if store.order is None:
            order = []
            for number, handle in enumerate(self.upstream.handles(frozen)):
                order.append(handle)
                yield number, handle
            store.finish(order)
            return
        yield from enumerate(store.order)

    def fetch(self, handle: tuple[int, Any]) -> Any:
        number, inner = handle
        element = self._store.get(number)
        if element is None:
            if inner is None:
                # A file from another run knows how many there are, not each of them.
                frozen = self.upstream.handles((0,))
                inner = next(itertools.islice(frozen, number, None))
            element = self._store.put(number, self.upstream.fetch(inner))
        # The caller may change what it gets.
        return map_structure(lambda leaf: leaf.copy(), element)

    def example(self, variant: int) -> Any:
        return self.upstream.example(variant)

    @property
    def element_spec(self) -> Any:
        return self.upstream.element_spec

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        return f"{self.upstream.describe()}.cache({'file' if self.filename else ''})"


@final
class _Store:
    """Elements by number; several threads may use it.

    Attributes:
      order: the handles of a stream that has come to its end, else None.
    """

    def __init__(self, file: CacheFile | None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._elements: dict[int, Any] = {} if file is None else file.read()
        count = None if file is None else file.count
        self.order: list[Any] | None = None if count is None else [None] * count

    def get(self, number: int) -> Any:
        with self._lock:
            return self._elements.get(number)

    def put(self, number: int, element: Any) -> Any:
        """Keep ``element`` and return it, or what another thread kept before."""
        with self._lock:
            if number not in self._elements:
                self._elements[number] = element
                if self._file is not None:
                    self._file.append(number, element)
            return self._elements[number]

    def finish(self, order: list[Any]) -> None:
        """Take down the handles of a complete pass."""
        with self._lock:
            self.order = order
            if self._file is not None:
                self._file.finish(len(order))
