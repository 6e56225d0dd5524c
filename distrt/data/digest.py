"""Digests of what a rank reads, where nothing else proves that all read the same (layer 5).

May import: arrays, pipeline, movers. iterator.py compares them between the ranks,
one step ahead: an unseeded shuffle of somebody else's loader is found before the
batch that it would have spoiled.
"""

# The methods that Node declares are documented there, once.

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from distrt.arrays import flatten, to_numpy
from distrt.data.movers import Prefetch
from distrt.data.pipeline import Epoch, Node, Stream, nodes_of, rewrite

__all__ = ["Digest", "digested"]


@final
class Digest:
    """A running checksum (CRC-32) of elements: their dtypes, shapes and bytes."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, element: Any) -> None:
        """Take in one more element."""
        for leaf in flatten(element).leaves:
            array = to_numpy(leaf)
            data = repr(array.tolist()) if array.dtype.kind == "O" else array.tobytes()
            head = f"{array.dtype}{array.shape}"
            for part in (head, data):
                self.value = zlib.crc32(
                    part.encode() if isinstance(part, str) else part, self.value
                )


@final
@dataclass(frozen=True, eq=False)
class _Watched(Stream):
    upstream: Node
    digest: Digest

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        for handle in self.upstream.handles(epoch):
            element = self.upstream.fetch(handle)
            self.digest.add(element)
            yield element

    def example(self, variant: int) -> Any:
        return self.upstream.example(variant)

    @property
    def element_spec(self) -> Any:
        return self.upstream.element_spec

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        return self.upstream.describe()


def digested(node: Node, digest: Digest) -> Node:
    """Return the pipeline with the elements of its unproven nodes added to ``digest``.

    It makes nothing ahead, so that the digest stops where the part does; a pipeline without
    such nodes is returned as it is.
    """
    if not any(old.unproven for old in nodes_of(node)):
        return node

    def watch(old: Node) -> Node:
        if isinstance(old, Prefetch):
            return old.upstream
        return _Watched(old, digest) if old.unproven else old

    return rewrite(node, watch)
