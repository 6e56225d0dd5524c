"""Every error that distrt raises (layer 0: imports nothing).

The verb raises once, with what, expected, got, which rank and what to do.
Each class is also the Python built-in that tf.distribute raises in the same
place, so that ``except ValueError`` keeps working in ported programs.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ContextError",
    "DTypeError",
    "DataLossError",
    "DeviceError",
    "DistrtError",
    "InvalidArgumentError",
    "LaunchError",
    "NotFoundError",
    "PeerError",
    "by_rank",
]


def by_rank(texts: Mapping[int, str]) -> str:
    """Write what the ranks say, a line for each text: ``ranks 0, 2: ...``."""
    groups: dict[str, list[str]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(str(rank))
    return "\n".join(
        f"  rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}"
        for text, ranks in groups.items()
    )


class DistrtError(Exception):
    """Base of all errors of distrt."""


class LaunchError(DistrtError, RuntimeError):
    """The launcher and MPI tell different stories, or MPI cannot start."""


class DeviceError(DistrtError, RuntimeError):
    """A device was asked for that this rank does not have."""


class InvalidArgumentError(DistrtError, ValueError):
    """An argument has a value that the call cannot take."""


class DTypeError(DistrtError, TypeError):
    """An array has a dtype, or a value a type, that the call cannot take."""


class CollectiveMismatchError(InvalidArgumentError):
    """The ranks called different collectives; the text lists rank -> call."""


class PeerError(DistrtError, RuntimeError):
    """Another rank failed or left, so this call cannot finish."""


class CollectiveTimeoutError(PeerError, TimeoutError):
    """A peer did not answer within the deadline of the call."""


class ContextError(DistrtError, RuntimeError):
    """A call in the wrong place: scope, replica context or cross-replica context."""


class NotFoundError(DistrtError, FileNotFoundError):
    """A file of a dataset or a checkpoint is missing on some rank."""


class DataLossError(DistrtError, OSError):
    """A file of a dataset is damaged or cut short. Source: ``tf.errors.DataLossError``."""
