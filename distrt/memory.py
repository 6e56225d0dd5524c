"""Registered memory: arrays that collectives use where they lie (layer 4).

May import: world. As ``numpy.empty`` and its kin, but the memory can be read and
written by the other ranks of this host, so an all_reduce copies nothing. Each rank
allocates and frees alone. Where ranks share no memory it is ordinary memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distrt.world import world

__all__ = ["empty", "full", "zeros"]


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Return an uninitialised registered array. Not collective, but for the first use of MPI.

    Args:
      shape: an int or a tuple of ints.
      dtype: a NumPy dtype.

    Raises:
      MemoryError: there is no room; it says how much was needed.
    """
    node = world().communicator.node
    return np.empty(shape, dtype) if node is None else node.arena.heap.empty(shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """As ``empty``, filled with zeros."""
    return full(shape, 0, dtype)


def full(shape: int | tuple[int, ...], fill_value: Any, dtype: Any = np.float32) -> np.ndarray:
    """As ``empty``, filled with ``fill_value``."""
    array = empty(shape, dtype)
    array[...] = fill_value
    return array
