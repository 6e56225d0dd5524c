"""Lines of text files (data room, layer 5).

May import: errors, elements, files, pipeline. A scan finds where the lines are; a rank reads
and cuts out only its own. Compressed files can only be read from the start, so there the
lines are their own handles.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from distrt.data.elements import boxed
from distrt.data.files import RecordSource, decompressed, read_at
from distrt.data.pipeline import Epoch

__all__ = ["TextLines"]

_Handle = tuple[str, int, int] | bytes


@final
@dataclass(frozen=True, eq=False)
class TextLines(RecordSource):
    """The lines of text files, without their ends (``\\n`` or ``\\r\\n``); see TextLineDataset."""

    paths: tuple[str, ...]
    compression: str = ""
    listed: tuple[str, ...] = ()
    scan_bytes: int = 1 << 20

    def handles(self, epoch: Epoch) -> Iterator[_Handle]:
        for path in self.paths:
            yield from self._lines(path) if self.compression else self._places(path)

    def _places(self, path: str) -> Iterator[_Handle]:
        start = at = 0
        while block := read_at(path, at, self.scan_bytes):
            end = block.find(b"\n")
            while end >= 0:
                yield path, start, at + end - start
                start = at + end + 1
                end = block.find(b"\n", end + 1)
            at += len(block)
        if start < at:
            yield path, start, at - start

    def _lines(self, path: str) -> Iterator[_Handle]:
        with decompressed(path, self.compression) as stream:
            for line in stream:
                yield line.removesuffix(b"\n")

    def fetch(self, handle: _Handle) -> Any:
        line = handle if isinstance(handle, bytes) else read_at(*handle)
        return boxed(line.removesuffix(b"\r"))

    def describe(self) -> str:
        return f"text_lines({len(self.paths)} files)"
