"""This rank's heap of registered memory (layer 2). May import: errors.

Registered memory lies in the rank's arena, which its neighbours on the host map:
collectives read and write it where it is. Each rank allocates and frees alone, in
any order; neighbours learn an array's offset with the call that uses it.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np

from distrt.errors import InvalidArgumentError

__all__ = ["Heap"]

_LINES = 128  # two cache lines, which some processors fetch as a pair
_PAGE = 4096
# From here on blocks start at a page, as large arrays of NumPy do.
_PAGED_FROM = 1 << 16


@final
class Heap:
    """A best-fit allocator over a range of addresses whose memory grows on demand.

    Free blocks are kept coalesced and found by bisection, for each alignment by the room
    that they have for it. Any thread may allocate and free.

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
        # For each alignment (bytes from the first aligned offset on, offset), ascending.
        self._rooms: dict[int, list[tuple[int, int]]] = {_LINES: [], _PAGE: []}
        self._returned: deque[int] = deque()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return an uninitialised registered array, as ``numpy.empty``. Not collective.

        The block is free again once the array and all its views are gone. That may be
        in any thread, inside the garbage collector, even in the middle of an
        allocation: so it is only noted, and the next allocation does the rest.
        Nothing collective and nothing that locks ever runs in a finalizer.

        Args:
          shape: an int or a sequence of ints; zeros are fine.
          dtype: a NumPy dtype without Python objects, which other ranks could not read.

        Raises:
          InvalidArgumentError: a negative length, or elements that are Python objects.
          MemoryError: as ``allocate``.
        """
        sizes = shape if np.iterable(shape) else (shape,)
        shape = tuple(operator.index(size) for size in sizes)
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
        """Return the offset of a new block of ``nbytes``. Not collective.

        It starts at a multiple of 128 bytes, from 64 KiB on at a page.

        Raises:
          MemoryError: the range is full, or the machine has no more memory.
        """
        nbytes = max(1, nbytes)
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

    def offset_of(self, address: int) -> int:
        """Return where ``address``, which is registered memory, lies in the range."""
        assert self.contains(address)
        return address - self.base

    def contains(self, address: int) -> bool:
        """Tell whether ``address`` lies in registered memory."""
        return self.base <= address < self.base + self.window_bytes

    def _fitting(self, nbytes: int) -> int | None:
        alignment = _alignment(nbytes)
        rooms = self._rooms[alignment]
        at = bisect.bisect_left(rooms, (nbytes, 0))
        if at == len(rooms):
            return None
        room, start = rooms[at]
        size, offset = self._take(start), _up(start, alignment)
        if offset > start:
            self._put(start, offset - start)
        if room > nbytes:
            self._put(offset + nbytes, start + size - offset - nbytes)
        return offset

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
        for alignment, rooms in self._rooms.items():
            bisect.insort(rooms, (_room(offset, nbytes, alignment), offset))

    def _take(self, offset: int) -> int:
        nbytes = self._free.pop(offset)
        del self._starts[bisect.bisect_left(self._starts, offset)]
        for alignment, rooms in self._rooms.items():
            del rooms[bisect.bisect_left(rooms, (_room(offset, nbytes, alignment), offset))]
        return nbytes


def _alignment(nbytes: int) -> int:
    return _PAGE if nbytes >= _PAGED_FROM else _LINES


def _room(offset: int, nbytes: int, alignment: int) -> int:
    return offset + nbytes - _up(offset, alignment)


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
