"""Sources that read files: what the sharder may divide by file (data room, layer 5).

May import: errors, arrays, elements, pipeline. A ``FileSource`` knows its files by
path; AutoShardPolicy.FILE gives each rank some of them. Formats: text_lines, tfrecord.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from distrt.data.pipeline import Node

__all__ = ["FileSource"]


class FileSource(Node):
    """A source whose elements come from files, one file after the other.

    Attributes:
      paths: the files, in order.
    """

    paths: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The files' own names; the folder may differ between hosts."""
        return tuple(PurePath(path).name for path in self.paths)

    def with_paths(self, paths: Sequence[str]) -> FileSource:
        """Return the same source over other files."""
        changed: Any = self  # a dataclass, which the abstract class cannot say
        replaced: FileSource = dataclasses.replace(changed, paths=tuple(paths))
        return replaced
