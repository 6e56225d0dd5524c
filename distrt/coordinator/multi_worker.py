"""``MultiWorkerMirroredStrategy``: ranks on any number of hosts train one model (layer 6).

May import: coordinator.{strategy,mirrored,communication}, world.
"""

from __future__ import annotations

from typing import final

from distrt.coordinator.communication import CommunicationOptions, configured
from distrt.coordinator.mirrored import choose_device
from distrt.coordinator.strategy import Strategy
from distrt.world import world

__all__ = ["MultiWorkerMirroredStrategy"]


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all ranks, on one host or many. All ranks must create it.

    The ranks come from MPI; no TF_CONFIG is needed.

    Args:
      communication_options: CommunicationOptions, equal on all ranks; by default AUTO.
      device: "auto" (a GPU of its own for each rank, or the CPU where there is none),
        "cpu" or "gpu".

    Raises:
      InvalidArgumentError: on every rank, for options that cannot be taken, or that differ.
      DeviceError: on every rank, where a GPU was asked for and some rank has none.

    Source: tf.distribute.MultiWorkerMirroredStrategy, with one replica per worker.
    """

    _replicas_are_workers = True

    def __init__(
        self,
        communication_options: CommunicationOptions | None = None,
        *,
        device: str = "auto",
    ) -> None:
        everyone = world()
        chosen = choose_device(everyone, device)
        super().__init__(configured(everyone.communicator, communication_options), chosen)
