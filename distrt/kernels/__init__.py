"""The arithmetic: host library, CUDA module, NumPy reference (layer 2).

May import: errors, reduce_op, arrays. ``kernels_for`` is the way in; CuPy is
loaded only when a CuPy array asks for it.
"""

from __future__ import annotations

import functools
from typing import Any

from distrt.arrays import is_cupy
from distrt.kernels.base import Kernels, accumulator

__all__ = ["Kernels", "accumulator", "kernels_for"]


def kernels_for(array: Any) -> Kernels:
    """Return the kernels for the memory of ``array``, a NumPy or CuPy array; always the same."""
    kernels: Kernels = _cuda() if is_cupy(array) else _host()
    return kernels


@functools.cache
def _host() -> Kernels:
    from distrt.kernels.host import HostKernels

    return HostKernels()


@functools.cache
def _cuda() -> Kernels:
    from distrt.kernels.cuda import CudaKernels

    return CudaKernels()
