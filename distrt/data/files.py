"""Sources that read files: what the sharder may divide by file (data room, layer 5).

May import: errors, arrays, elements, pipeline. A ``FileSource`` knows its files by
path; AutoShardPolicy.FILE gives each rank some of them. Formats: lines, tfrecord. Also here:
how they read, so that a missing or damaged file is said once and in one way.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import gzip
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO, final

import numpy as np

from distrt.data.elements import ArraySpec, boxed
from distrt.data.pipeline import UNKNOWN_CARDINALITY, Epoch, Node
from distrt.errors import DataLossError, DTypeError, InvalidArgumentError, NotFoundError

__all__ = [
    "FileNames",
    "FileSource",
    "RecordSource",
    "checked_compression",
    "decompressed",
    "matches",
    "paths_of",
    "read_at",
]

# Files that a rank keeps open, because its next row is likely to be in one of them.
_OPEN_FILES = 16


class FileSource(Node):
    """A source whose elements come from files, one file after the other.

    Attributes:
      paths: the files, in order.
      listed: all files, where ``paths`` are some of them; examples come from any.
    """

    paths: tuple[str, ...]
    listed: tuple[str, ...]

    @final
    def sample(self, variant: int) -> Iterator[str]:
        """Yield the paths of files that are there and not empty, each variant in its order."""
        paths = self.listed or self.paths
        start = variant % max(len(paths), 1)
        for path in paths[start:] + paths[:start]:
            # Under FILE a host may hold its own files only.
            if os.path.isfile(path) and os.path.getsize(path):
                yield path

    @property
    def names(self) -> tuple[str, ...]:
        """The files' own names; the folder may differ between hosts."""
        return tuple(PurePath(path).name for path in self.paths)

    def with_paths(self, paths: Sequence[str]) -> FileSource:
        """Return the same source over other files."""
        changed: Any = self  # a dataclass, which the abstract class cannot say
        listed = self.listed or self.paths
        replaced: FileSource = dataclasses.replace(changed, paths=tuple(paths), listed=listed)
        return replaced


class RecordSource(FileSource):
    """A source of byte strings: a handle is a place in a file, or the bytes themselves."""

    @final
    def example(self, variant: int) -> Any:
        return self.example_after(0, variant)

    @final
    def example_after(self, start: int, variant: int) -> Any:
        # A function of the user's may not work for bytes that are no record, nor for the header
        # that a skip leaves out.
        for path in self.sample(variant):
            handles = self.with_paths([path]).handles(())
            for handle in itertools.islice(handles, start, None):
                return self.fetch(handle)
        return boxed(b"")

    @property
    def element_spec(self) -> ArraySpec:
        return ArraySpec((), np.dtype(object))

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY if self.paths else 0


@final
@dataclass(frozen=True, eq=False)
class FileNames(FileSource):
    """The paths of files, as text; see ``Dataset.list_files``."""

    paths: tuple[str, ...]
    listed: tuple[str, ...] = ()

    def handles(self, epoch: Epoch) -> Iterator[int]:
        return iter(range(len(self.paths)))

    def fetch(self, handle: int) -> Any:
        return np.str_(self.paths[handle])

    def example(self, variant: int) -> Any:
        return np.str_(next(self.sample(variant), (self.paths or ("",))[0]))

    @property
    def element_spec(self) -> ArraySpec:
        # How long a path is, is no part of what an element is.
        return ArraySpec((), np.dtype("U"))

    def cardinality(self) -> int:
        return len(self.paths)

    def describe(self) -> str:
        return f"list_files({len(self.paths)} files)"


def matches(patterns: Any) -> tuple[str, ...]:
    """Return the files that match a pattern, or any of several, sorted.

    Raises:
      InvalidArgumentError: none does.
    """
    wanted = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    found = sorted({path for pattern in wanted for path in glob.glob(os.fspath(pattern))})
    if not found:
        raise InvalidArgumentError(
            f"list_files: no file matches {', '.join(repr(str(p)) for p in wanted)} on this rank: "
            "every rank lists the files, so they must be there on every host"
        )
    return tuple(found)


def paths_of(what: str, filenames: Any) -> tuple[str, ...]:
    """Return file names as given to a dataset: one, or several.

    Raises:
      DTypeError: they are no names.
    """
    if isinstance(filenames, str | os.PathLike):
        return (os.fspath(filenames),)
    try:
        names = np.asarray(filenames).reshape(-1).tolist()
        return tuple(os.fsdecode(name) for name in names)
    except TypeError:
        raise DTypeError(
            f"{what}: expected a file name, or several, got {filenames!r:.80}"
        ) from None


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str) -> _File:
    return _File(path)


@final
class _File:
    """An open file; closed when the last one drops it."""

    def __init__(self, path: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.number = -1
            raise _refused(path, error) from error
        status = os.fstat(self.number)
        self.key = (status.st_mtime_ns, status.st_size, status.st_ino)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def read_at(path: str, offset: int, length: int) -> bytes:
    """Return up to ``length`` bytes of a file from ``offset`` on: fewer at its end.

    Raises:
      NotFoundError: there is no such file; InvalidArgumentError: it cannot be read.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise _refused(path, error) from error
    file = _opened(path)
    if file.key != (status.st_mtime_ns, status.st_size, status.st_ino):
        # It was written anew since it was opened.
        _opened.cache_clear()
        file = _opened(path)
    pieces, missing = [], length
    try:
        while missing and (piece := os.pread(file.number, missing, offset + length - missing)):
            pieces.append(piece)
            missing -= len(piece)
    except OSError as error:
        raise _refused(path, error) from error
    return b"".join(pieces)


@contextlib.contextmanager
def decompressed(path: str, compression: str) -> Iterator[BinaryIO]:
    """Open a compressed file as a stream of its contents.

    Raises:
      NotFoundError: there is no such file; DataLossError: it is damaged or cut short.
    """
    try:
        with _STREAMS[compression](path) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataLossError(f"dataset file {path!r} is damaged or cut short: {error}") from error
    except OSError as error:
        if isinstance(error, DataLossError | NotFoundError):
            raise
        raise _refused(path, error) from error


def _zlib(path: str) -> Any:
    # The gzip module reads only its own header; zlib files are read whole, as they are short.
    with open(path, "rb") as stream:
        return io.BytesIO(zlib.decompress(stream.read()))


_STREAMS: dict[str, Any] = {"GZIP": gzip.open, "ZLIB": _zlib}


def checked_compression(what: str, compression_type: str | None) -> str:
    """Return the kind of compression, "" for none.

    Raises:
      InvalidArgumentError: it is not known.
    """
    kind = compression_type or ""
    if kind and kind not in _STREAMS:
        raise InvalidArgumentError(
            f'{what}: compression_type: expected None, "", "GZIP" or "ZLIB", got {kind!r}'
        )
    return kind


def _refused(path: str, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError):
        return NotFoundError(
            f"dataset file {path!r} does not exist on this rank: every rank reads the files, so "
            "they must be there under their names on every host"
        )
    return InvalidArgumentError(f"dataset file {path!r} cannot be read: {error}")
