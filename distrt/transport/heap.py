"""This rank's heap of registered memory (layer 2). May import: errors.

Registered memory lies in the rank's arena, which its neighbours on the host map:
collectives read and write it where it is. Each rank allocates and frees alone, in
any order; neighbours learn an array's offset with the call that uses it.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np

from distrt.errors import InvalidArgumentError

__all__ = ["Heap"]

_ALIGNMENT = 128
_PAGE = 4096
# From here on blocks start at a page, as large arrays of NumPy do.
_PAGED_FROM = 1 << 16


@final
class Heap:
    """A best-fit allocator over a range of addresses whose memory grows on demand.

    Args:
      base: address of the range.
      window_bytes: length of the range: the most that can ever be allocated.
      grow: ``grow(offset, nbytes)`` reserves that part of the range, or raises OSError.
      step_bytes: it grows by at least this much at a time.
      start: bytes at the beginning of the range that are not the heap's.

    Attributes:
      reserved: bytes reserved so far, ``start`` included.
      in_use: bytes of the blocks that are allocated.
    """

    def __init__(
        self,
        base: int,
        window_bytes: int,
        grow: Callable[[int, int], None],
        step_bytes: int = 16 << 20,
        start: int = 0,
    ) -> None:
        self.base, self.window_bytes = base, window_bytes
        self.reserved, self.in_use = start, 0
        self._grow, self._step = grow, step_bytes
        self._lock = threading.Lock()
        self._blocks: dict[int, int] = {}
        self._free: dict[int, int] = {}  # offset -> bytes
        self._starts: list[int] = []  # offsets of the free blocks, ascending
        self._sizes: list[tuple[int, int]] = []  # (bytes, offset), ascending
        self._returned: deque[int] = deque()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return an uninitialised registered array, as ``numpy.empty``. Not collective.

        The block is free again once the array and all its views are gone. That may be
        in any thread, inside the garbage collector, even in the middle of an
        allocation: so it is only noted, and the next allocation does the rest.

        Raises:
          InvalidArgumentError: a negative length, or elements that are Python objects.
          MemoryError: as ``allocate``.
        """
        shape = tuple(shape) if np.iterable(shape) else (int(shape),)
        dtype = np.dtype(dtype)
        if dtype.hasobject or any(length < 0 for length in shape):
            raise InvalidArgumentError(
                f"registered memory: expected a numeric dtype and no negative length, "
                f"got {dtype}{list(shape)}"
            )
        nbytes = math.prod(shape) * dtype.itemsize
        offset = self.allocate(max(1, nbytes))
        memory = (ctypes.c_char * nbytes).from_address(self.base + offset)
        weakref.finalize(memory, self._returned.append, offset).atexit = False
        array: np.ndarray = np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
        return array

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a new block of ``nbytes``.

        Raises:
          MemoryError: the range is full, or the machine has no more memory.
        """
        nbytes = _up(nbytes, _alignment(nbytes))
        with self._lock:
            while self._returned:
                self._release(self._returned.popleft())
            offset = self._fitting(nbytes)
            if offset is None:
                self._extend(nbytes)
                offset = self._fitting(nbytes)
                assert offset is not None
            self._blocks[offset] = nbytes
            self.in_use += nbytes
            return offset

    def free(self, offset: int) -> None:
        """Give the block at ``offset`` back."""
        with self._lock:
            self._release(offset)

    def contains(self, address: int) -> bool:
        """Tell whether ``address`` lies in registered memory."""
        return self.base <= address < self.base + self.window_bytes

    def _fitting(self, nbytes: int) -> int | None:
        alignment = _alignment(nbytes)
        for at in range(bisect.bisect_left(self._sizes, (nbytes, 0)), len(self._sizes)):
            size, start = self._sizes[at]
            offset = _up(start, alignment)
            if offset + nbytes > start + size:
                continue
            self._take(start)
            if offset > start:
                self._put(start, offset - start)
            if offset + nbytes < start + size:
                self._put(offset + nbytes, start + size - offset - nbytes)
            return offset
        return None

    def _extend(self, nbytes: int) -> None:
        # The block may begin in a free one that ends where the memory does.
        start = self.reserved
        if self._starts and self._starts[-1] + self._free[self._starts[-1]] == self.reserved:
            start = self._starts[-1]
        missing = _up(start, _alignment(nbytes)) + nbytes - self.reserved
        room = self.window_bytes - self.reserved
        step = min(max(_up(missing, _PAGE), self._step), room)
        try:
            if step < missing:
                raise OSError("the window is full")
            self._grow(self.reserved, step)
        except OSError as error:
            raise MemoryError(
                f"registered memory: {nbytes} bytes were asked for, {self.in_use} are in use, "
                f"{self.reserved} are reserved of at most {self.window_bytes} ({error}). "
                "Free registered arrays, use fewer ranks on this host, or plain arrays"
            ) from error
        self._insert(self.reserved, step)
        self.reserved += step

    def _release(self, offset: int) -> None:
        nbytes = self._blocks.pop(offset)
        self.in_use -= nbytes
        self._insert(offset, nbytes)

    def _insert(self, offset: int, nbytes: int) -> None:
        at = bisect.bisect_left(self._starts, offset)
        after = self._starts[at] if at < len(self._starts) else None
        before = self._starts[at - 1] if at else None
        if after == offset + nbytes:
            nbytes += self._take(offset + nbytes)
        if before is not None and before + self._free[before] == offset:
            nbytes += self._take(before)
            offset = before
        self._put(offset, nbytes)

    def _put(self, offset: int, nbytes: int) -> None:
        self._free[offset] = nbytes
        bisect.insort(self._starts, offset)
        bisect.insort(self._sizes, (nbytes, offset))

    def _take(self, offset: int) -> int:
        nbytes = self._free.pop(offset)
        del self._starts[bisect.bisect_left(self._starts, offset)]
        del self._sizes[bisect.bisect_left(self._sizes, (nbytes, offset))]
        return nbytes


def _alignment(nbytes: int) -> int:
    return _PAGE if nbytes >= _PAGED_FROM else _ALIGNMENT


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
