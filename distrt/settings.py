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
    """

    segment_bytes: int = 1 << 19
    timeout_seconds: float = 1800.0

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the settings of this process's environment."""
        return cls(
            _positive("DISTRT_SEGMENT_BYTES", int, cls._field_defaults["segment_bytes"]),
            _positive("DISTRT_TIMEOUT", float, cls._field_defaults["timeout_seconds"]),
        )


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
