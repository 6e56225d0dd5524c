"""Settings that must be equal on all ranks (layer 1). May import: errors."""

from __future__ import annotations

import os
from typing import NamedTuple, TypeVar

from distrt.errors import InvalidArgumentError

__all__ = ["Settings"]

_Number = TypeVar("_Number", int, float)


class Settings(NamedTuple):
    """What must be equal on all ranks; ``world()`` takes rank 0's.

    Attributes:
      segment_bytes: longest message of the ring (DISTRT_SEGMENT_BYTES).
      timeout_seconds: how long a call may wait for a peer (DISTRT_TIMEOUT).
      algorithm: what overrides the table of algorithms: "auto" (nothing), "ring" (every
        verb that can take it), or "all_reduce=ring,broadcast=direct"; choice.py reads it,
        and refuses unknown names (DISTRT_ALGORITHM).
      carried_bytes: an all_reduce in pairs of at most so many bytes, all ranks' together,
        travels with the fingerprint of its call (DISTRT_CARRIED_BYTES).
      bytes_per_pack: gradients are fused into buckets of at most so many bytes, where the
        optimizer does not say; 0: of its own default.
      shared_memory: "memfd", "file" (in /dev/shm), "auto": the first that works, or
        "off" (DISTRT_SHARED_MEMORY).
      heap_bytes: registered memory that each rank reserves at start; more is reserved
        when it is needed (DISTRT_HEAP_BYTES).
      stage_bytes: a slot through which arrays that are not registered pass (DISTRT_STAGE_BYTES).
      inline_bytes: the longest array that travels behind its flag (DISTRT_INLINE_BYTES).
      stream_bytes: from this many bytes of all ranks together on, a call that is
        not in place writes its result past the cache (DISTRT_STREAM_BYTES). Measured on
        2 ranks: 64 MiB each 16 ms -> 12 ms, 16 MiB each no difference, in place slower.
    """

    segment_bytes: int = 1 << 19
    timeout_seconds: float = 1800.0
    algorithm: str = "auto"
    shared_memory: str = "auto"
    heap_bytes: int = 0
    stage_bytes: int = 1 << 19
    inline_bytes: int = 1 << 12
    stream_bytes: int = 96 << 20
    bytes_per_pack: int = 0
    carried_bytes: int = 1 << 14

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the settings of this process's environment."""
        default = cls()
        return cls(
            _positive("DISTRT_SEGMENT_BYTES", int, default.segment_bytes),
            _positive("DISTRT_TIMEOUT", float, default.timeout_seconds),
            os.environ.get("DISTRT_ALGORITHM", default.algorithm),
            _one_of("DISTRT_SHARED_MEMORY", ("auto", "memfd", "file", "off")),
            _positive("DISTRT_HEAP_BYTES", int, default.heap_bytes),
            _positive("DISTRT_STAGE_BYTES", int, default.stage_bytes),
            _positive("DISTRT_INLINE_BYTES", int, default.inline_bytes),
            _positive("DISTRT_STREAM_BYTES", int, default.stream_bytes),
            carried_bytes=_positive("DISTRT_CARRIED_BYTES", int, default.carried_bytes),
        )


def _one_of(name: str, names: tuple[str, ...]) -> str:
    text = os.environ.get(name, names[0])
    if text in names:
        return text
    raise InvalidArgumentError(f"{name}={text!r}: expected one of {', '.join(names)}")


def _positive(name: str, kind: type[_Number], default: _Number) -> _Number:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
        if value > 0:
            return value
    except ValueError:
        pass
    raise InvalidArgumentError(f"{name}={text!r}: expected a positive {kind.__name__}")
