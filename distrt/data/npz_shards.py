"""Several .npz or .npy files as one dataset (data room, layer 5).

May import: files, sources, combining, pipeline. AutoShardPolicy.FILE gives each rank some of
them; otherwise a rank reads its own rows of each.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from distrt.data.combining import Concatenate
from distrt.data.files import FileSource
from distrt.data.pipeline import Epoch
from distrt.data.sources import NpzFile

__all__ = ["NpzShards"]


@final
@dataclass(frozen=True, eq=False)
class NpzShards(FileSource):
    """The rows of the arrays in several files, one file after the other."""

    paths: tuple[str, ...]
    listed: tuple[str, ...] = ()

    @cached_property
    def _rows(self) -> Concatenate:
        return Concatenate(tuple(NpzFile(path) for path in self.paths))

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        return self._rows.handles(epoch)

    def fetch(self, handle: Any) -> Any:
        return self._rows.fetch(handle)

    def gather(self, handles: Sequence[Any]) -> Any:
        return self._rows.gather(handles)

    @cached_property
    def _example(self) -> NpzFile:
        return NpzFile(next(self.sample(0), self.paths[0]))

    def example(self, variant: int) -> Any:
        return self._example.example(variant)

    @property
    def element_spec(self) -> Any:
        return self._example.element_spec

    def cardinality(self) -> int:
        # Counting the rows would open every file, of which a rank may have some only.
        return -2

    def describe(self) -> str:
        return f"from_npz({len(self.paths)} files)"
