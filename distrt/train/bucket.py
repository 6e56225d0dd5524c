"""Buckets: many gradients in few flat buffers, so that few collectives move them (layer 5).

May import: communicator, collectives.compression, arrays, reduce_op, errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from distrt.arrays import copy_to
from distrt.collectives.compression import Compressor
from distrt.communicator import Communicator
from distrt.reduce_op import ReduceOp

__all__ = ["DEFAULT_BUCKET_BYTES", "Bucket", "Buckets", "plan"]

# 25 MiB is what DDP settled on: long enough to be at the wire's bandwidth, short
# enough that the first bucket leaves while the backward pass goes on.
DEFAULT_BUCKET_BYTES = 25 << 20


class Bucket(NamedTuple):
    """A flat buffer of one dtype: the members' numbers and where each one starts, in elements."""

    dtype: np.dtype
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int


def plan(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Place every array in a bucket, in reverse order, as a backward pass fills them.

    A bucket holds one dtype and at most ``bucket_bytes``; a larger array has one of its own.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[np.dtype, list[int]] = {}

    def close(dtype: np.dtype) -> None:
        members = open_buckets.pop(dtype, [])
        if members:
            counts = [math.prod(shapes[m]) for m in members]
            starts = np.concatenate(([0], np.cumsum(counts))).tolist()
            buckets.append(Bucket(dtype, tuple(members), tuple(starts[:-1]), starts[-1]))

    for number in reversed(range(len(shapes))):
        dtype = dtypes[number]
        members = open_buckets.setdefault(dtype, [])
        held = sum(math.prod(shapes[m]) for m in members)
        if members and (held + math.prod(shapes[number])) * dtype.itemsize > bucket_bytes:
            close(dtype)
            members = open_buckets.setdefault(dtype, [])
        members.append(number)
    for dtype in list(open_buckets):
        close(dtype)
    return tuple(buckets)


@final
class Buckets:
    """The flat buffers of a plan, and a view for each array.

    Args:
      arrays: the arrays that the gradients belong to; their kind of memory is used.
      names: what the arrays are called, for the message where ranks disagree.
      bucket_bytes: see ``plan``.
      communicator: gives the buffers, in registered memory where it can.
      compressor: sends the float32 ones as halves; None: everything is sent as it is.

    Attributes:
      views: flat views, in the order of ``arrays``; write gradients here.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        names: Sequence[str],
        bucket_bytes: int,
        communicator: Communicator,
        compressor: Compressor | None = None,
    ) -> None:
        self._compressor = compressor
        self.buckets = plan(
            [a.shape for a in arrays], [np.dtype(a.dtype) for a in arrays], bucket_bytes
        )
        self._flats = [
            communicator.empty(arrays[b.members[0]], b.size, b.dtype) for b in self.buckets
        ]
        # The key of the one-entry dict that is reduced: where ranks hold gradients of
        # different variables, the fingerprint of the call shows these names.
        self._labels = [" ".join(names[m] for m in b.members) for b in self.buckets]
        self.views: list[Any] = [None] * len(arrays)
        for bucket, flat in zip(self.buckets, self._flats, strict=True):
            for member, offset in zip(bucket.members, bucket.offsets, strict=True):
                self.views[member] = flat[offset : offset + arrays[member].size]

    def fill(self, gradients: Sequence[Any]) -> None:
        """Copy the gradients into their views; one that already lies there is not copied."""
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is not view:
                copy_to(view, gradient.reshape(-1).astype(view.dtype, copy=False))

    def all_reduce(self, communicator: Communicator) -> None:
        """Sum every bucket over the ranks, in place, in plan order. All ranks must call.

        Raises:
          CollectiveMismatchError: on every rank, where the ranks hold other gradients.
        """
        for flat, label in zip(self._flats, self._labels, strict=True):
            if self._compressor is not None and flat.dtype == np.float32:
                self._compressor.all_reduce(communicator, label, flat, ReduceOp.SUM, flat)
            else:
                communicator.all_reduce({label: flat}, ReduceOp.SUM, out={label: flat})
