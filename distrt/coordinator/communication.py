"""How collectives are made: tf.distribute's communication options (layer 6).

May import: choice, communicator, reduce_op, errors. Imports no strategy.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple, final

from distrt.choice import parse_forced
from distrt.communicator import Communicator
from distrt.errors import InvalidArgumentError
from distrt.reduce_op import ReduceOp

__all__ = ["CommunicationImplementation", "CommunicationOptions", "all_reduce", "configured"]


@final
class CommunicationImplementation(enum.Enum):
    """Which collectives are taken. Source: tf.distribute.experimental.CommunicationImplementation.

    AUTO: the fastest ones that the table knows for the call.
    RING: the ring, also inside a host.
    NCCL: refused, because distrt's collectives are its own and need no NCCL.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@final
class CommunicationOptions(NamedTuple):
    """Options of the collectives. Source: tf.distribute.experimental.CommunicationOptions.

    Attributes:
      bytes_per_pack: gradients are fused into buckets of at most so many bytes; 0: the
        optimizer's own ``bucket_bytes``.
      timeout_seconds: how long a call may wait for an answer; None: DISTRT_TIMEOUT, or 1800.
      implementation: a CommunicationImplementation or its name, or what DISTRT_ALGORITHM
        takes, such as "all_reduce=hierarchical".
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def checked(self) -> CommunicationOptions:
        """Return these options with ``implementation`` as DISTRT_ALGORITHM takes it.

        Raises:
          InvalidArgumentError: a value that cannot be taken, NCCL among them.
        """
        number, seconds = self.bytes_per_pack, self.timeout_seconds
        if not isinstance(number, int) or number < 0:
            raise InvalidArgumentError(f"bytes_per_pack={number!r}: expected an int from 0 on")
        if seconds is not None and not (
            isinstance(seconds, int | float) and 0 < seconds < math.inf
        ):
            raise InvalidArgumentError(
                f"timeout_seconds={seconds!r}: expected a positive number, or None"
            )
        return self._replace(implementation=_algorithm(self.implementation))


def _algorithm(implementation: CommunicationImplementation | str) -> str:
    if isinstance(implementation, CommunicationImplementation):
        implementation = implementation.value
    if not isinstance(implementation, str):
        raise InvalidArgumentError(
            f"implementation={implementation!r}: expected a CommunicationImplementation"
        )
    if implementation.upper() == CommunicationImplementation.NCCL.value:
        raise InvalidArgumentError(
            "implementation=NCCL: distrt's collectives are its own and need no NCCL. Use AUTO, "
            "which takes the fastest one that the call can take, on GPUs too"
        )
    parse_forced(implementation.lower())
    return implementation.lower()


def configured(communicator: Communicator, options: CommunicationOptions | None) -> Communicator:
    """Return a communicator of the same ranks with these options. All ranks must call.

    Raises:
      InvalidArgumentError: on every rank, for options that cannot be taken or that differ.
    """
    if options is None or options == CommunicationOptions():
        return communicator
    checked = _checked(communicator, options)
    changes: dict[str, Any] = {
        "algorithm": checked.implementation,
        "bytes_per_pack": checked.bytes_per_pack,
    }
    if checked.timeout_seconds is not None:
        changes["timeout_seconds"] = float(checked.timeout_seconds)
    return communicator.dup(**changes)


def all_reduce(
    communicator: Communicator, op: ReduceOp | str, value: Any, options: CommunicationOptions
) -> Any:
    """Make one all_reduce with options of its own. All ranks must call, with equal options.

    Nothing is packed, so ``bytes_per_pack`` changes nothing.
    """
    checked, transport = _checked(communicator, options), communicator.transport
    before = transport.timeout_seconds
    # As the key of a dict, the options get into the fingerprint.
    label = f"{checked}"
    transport.timeout_seconds = checked.timeout_seconds or before
    try:
        with communicator.using(str(checked.implementation)):
            return communicator.all_reduce({label: value}, op)[label]
    finally:
        transport.timeout_seconds = before


def _checked(communicator: Communicator, options: Any) -> CommunicationOptions:
    with communicator.refusing("communication options"):
        if isinstance(options, CommunicationOptions):
            return options.checked()
        raise InvalidArgumentError(
            f"communication options: expected CommunicationOptions, got {options!r}"
        )
