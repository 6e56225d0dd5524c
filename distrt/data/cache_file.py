"""The file of a ``cache``: elements as a rank made them, one after the other (layer 5).

May import: errors, arrays, elements, pipeline. A line of JSON says of which pipeline; records
follow: a number, then the leaves in NumPy's own format. Records are appended as elements are
made, so a killed job loses the one it was writing, which is made again.
"""

from __future__ import annotations

import io
import json
import os
from typing import Any, final

import numpy as np

from distrt.arrays import flatten, to_numpy
from distrt.data.elements import boxed, spec_text
from distrt.data.pipeline import Node
from distrt.errors import InvalidArgumentError

__all__ = ["CacheFile"]

_FORMAT = "distrt cache 1"
# The record that says how many elements there are has this bit set.
_COUNT = 1 << 62


@final
class CacheFile:
    """The file ``path`` of the elements of ``node``; made when the first one is kept.

    Attributes:
      count: how many elements there are in all, where a pass has come to its end; else None.
    """

    def __init__(self, path: str, node: Node) -> None:
        self._path, self._node = path, node
        self.count: int | None = None
        self._good = 0  # bytes that are whole records
        self._header = {
            "format": _FORMAT,
            "dataset": node.describe(),
            "elements": spec_text(node.element_spec),
        }

    def read(self) -> dict[int, Any]:
        """Return the elements in the file by number; none where there is no file.

        Raises:
          InvalidArgumentError: it is the cache of another dataset, or none.
        """
        elements: dict[int, Any] = {}
        try:
            stream = open(self._path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return elements
        with stream:
            self._check(stream.readline())
            self._good = stream.tell()
            tree = flatten(self._node.example(0))
            while (head := stream.read(8)) and len(head) == 8:
                number = int.from_bytes(head, "little")
                try:
                    if number & _COUNT:
                        self.count = number ^ _COUNT
                    else:
                        elements[number] = tree.rebuild([_read(stream, x) for x in tree.leaves])
                except (ValueError, EOFError, OSError):
                    break  # the job was killed while it wrote this one
                self._good = stream.tell()
        return elements

    def _check(self, line: bytes) -> None:
        try:
            found = json.loads(line)
            known = found["format"] == _FORMAT
        except (ValueError, KeyError, TypeError):
            known, found = False, {}
        if not known:
            raise InvalidArgumentError(
                f"cache: {self._path!r} is no file of distrt's cache: give another filename"
            )
        for name, text in self._header.items():
            if found.get(name) != text:
                raise InvalidArgumentError(
                    f"cache: {self._path!r} is of another dataset ({name}): expected {text!r}, got "
                    f"{found.get(name)!r}; delete it, or give another filename"
                )

    def append(self, number: int, element: Any) -> None:
        """Write one more element."""
        leaves = [to_numpy(leaf) for leaf in flatten(element).leaves]
        buffer = io.BytesIO()
        buffer.write(number.to_bytes(8, "little"))
        for leaf in leaves:
            _write(buffer, leaf)
        self._write(buffer.getvalue())

    def finish(self, count: int) -> None:
        """Write how many elements there are."""
        self.count = count
        self._write((count | _COUNT).to_bytes(8, "little"))

    def _write(self, record: bytes) -> None:
        if not self._good:
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            with open(self._path, "wb") as stream:
                stream.write(json.dumps(self._header).encode() + b"\n")
                self._good = stream.tell()
        with open(self._path, "r+b") as stream:
            stream.truncate(self._good)
            stream.seek(self._good)
            stream.write(record)
            self._good = stream.tell()


def _write(buffer: io.BytesIO, leaf: np.ndarray) -> None:
    # Byte strings are objects, which NumPy would pickle: they go as what they are, bytes.
    if leaf.dtype.kind == "O":
        value = leaf[()]
        if not isinstance(value, bytes):
            raise InvalidArgumentError(
                "cache: a file holds numbers, text and single byte strings, got an array of "
                f"{type(leaf.reshape(-1)[0]).__name__}: cache before the batch"
            )
        leaf = np.frombuffer(value, np.uint8)
    elif leaf.dtype.kind == "V":
        leaf = leaf.view(np.dtype((np.void, leaf.dtype.itemsize)))
    np.lib.format.write_array(buffer, leaf, allow_pickle=False)


def _read(stream: Any, like: Any) -> Any:
    leaf = np.lib.format.read_array(stream, allow_pickle=False)
    if like.dtype.kind == "O":
        return boxed(leaf.tobytes())
    return leaf.view(like.dtype)[()] if leaf.dtype.kind == "V" else leaf[()]
