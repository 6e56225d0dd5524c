"""TFRecord files: reading and writing (data room, layer 5).

May import: errors, elements, files, pipeline. A record is its length (8 bytes, little endian),
a checksum of those bytes, the data, and a checksum of the data. Checksums are CRC-32C,
rotated right by 15 bits, plus a constant. Source: TensorFlow's description of the format.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, final

import google_crc32c

from distrt.data.elements import boxed
from distrt.data.files import RecordSource, checked_compression, decompressed, read_at
from distrt.data.pipeline import Epoch
from distrt.errors import DataLossError, DTypeError

__all__ = ["TFRecordWriter", "TFRecords"]

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8

_Handle = tuple[str, int, int] | bytes


def _masked(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@final
@dataclass(frozen=True, eq=False)
class TFRecords(RecordSource):
    """The records of TFRecord files; see TFRecordDataset.

    Every rank reads the records' lengths, to find them; their data, and its checksum, only
    the rank whose record it is. Compressed files every rank reads whole.
    """

    paths: tuple[str, ...]
    compression: str = ""
    listed: tuple[str, ...] = ()

    def handles(self, epoch: Epoch) -> Iterator[_Handle]:
        for path in self.paths:
            yield from self._stream(path) if self.compression else self._places(path)

    def _places(self, path: str) -> Iterator[_Handle]:
        offset = 0
        while head := read_at(path, offset, _HEAD.size):
            length = _length(path, offset, head)
            yield path, offset, length
            offset += _HEAD.size + length + _FOOT.size

    def _stream(self, path: str) -> Iterator[_Handle]:
        with decompressed(path, self.compression) as stream:
            offset = 0
            while head := stream.read(_HEAD.size):
                length = _length(path, offset, head)
                yield _data(path, offset, length, stream.read(length + _FOOT.size))
                offset += _HEAD.size + length + _FOOT.size

    def fetch(self, handle: _Handle) -> Any:
        if isinstance(handle, bytes):
            return boxed(handle)
        path, offset, length = handle
        body = read_at(path, offset + _HEAD.size, length + _FOOT.size)
        return boxed(_data(path, offset, length, body))

    def describe(self) -> str:
        return f"tfrecord({len(self.paths)} files)"


def _length(path: str, offset: int, head: bytes) -> int:
    if len(head) < _HEAD.size:
        raise _cut(path, offset, _HEAD.size, len(head), "header")
    length, crc = _HEAD.unpack(head)
    _check(path, offset, "length", head[:8], crc)
    return int(length)


def _data(path: str, offset: int, length: int, body: bytes) -> bytes:
    if len(body) < length + _FOOT.size:
        raise _cut(path, offset, length + _FOOT.size, len(body), "data and checksum")
    data = body[:length]
    _check(path, offset, "data", data, _FOOT.unpack(body[length:])[0])
    return data


def _check(path: str, offset: int, what: str, data: bytes, expected: int) -> None:
    found = _masked(data)
    if found != expected:
        raise DataLossError(
            f"TFRecord file {path!r}: the record at offset {offset} is damaged: the checksum of "
            f"its {what} is {found:08x}, expected {expected:08x}. The file was changed, cut or is "
            "compressed (compression_type)"
        )


def _cut(path: str, offset: int, expected: int, got: int, what: str) -> DataLossError:
    return DataLossError(
        f"TFRecord file {path!r} is cut short: the record at offset {offset} needs {expected} "
        f"bytes of {what}, got {got}"
    )


@final
class TFRecordWriter:
    """Writes a TFRecord file; a context manager. Source: ``tf.io.TFRecordWriter``.

    Args:
      path: the file; what it held is replaced.
      options: its compression: None, "", "GZIP" or "ZLIB".

    Raises:
      InvalidArgumentError: ``options`` is something else.
    """

    def __init__(self, path: str | os.PathLike[str], options: str | None = None) -> None:
        kind = checked_compression("TFRecordWriter", options)
        self._file: BinaryIO = open(os.fspath(path), "wb")  # noqa: SIM115
        bits = {"GZIP": 31, "ZLIB": 15}.get(kind)
        self._squeeze = zlib.compressobj(wbits=bits) if bits else None

    def write(self, record: bytes) -> None:
        """Append a record.

        Raises:
          DTypeError: it is not made of bytes.
        """
        if not isinstance(record, bytes | bytearray | memoryview):
            raise DTypeError(f"TFRecordWriter.write: expected bytes, got {type(record).__name__}")
        data = bytes(record)
        length = struct.pack("<Q", len(data))
        self._put(length + _FOOT.pack(_masked(length)) + data + _FOOT.pack(_masked(data)))

    def _put(self, data: bytes) -> None:
        self._file.write(self._squeeze.compress(data) if self._squeeze else data)

    def flush(self) -> None:
        """Write out what is buffered."""
        if self._squeeze:
            self._file.write(self._squeeze.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Write out what is buffered and close the file."""
        if not self._file.closed:
            if self._squeeze:
                self._file.write(self._squeeze.flush())
            self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
