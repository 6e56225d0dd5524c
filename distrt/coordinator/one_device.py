"""``OneDeviceStrategy``: one replica, on the device that is named (layer 6).

May import: coordinator.strategy, world, cluster.
"""

from __future__ import annotations

from typing import final

from distrt.cluster import device as devices_of
from distrt.coordinator.strategy import Strategy
from distrt.world import alone

__all__ = ["OneDeviceStrategy"]


@final
class OneDeviceStrategy(Strategy):
    """One replica in this process, whatever the other ranks do. Not collective.

    Args:
      device: a tf-style name: "/cpu:0", "/gpu:1".

    Raises:
      InvalidArgumentError: no such kind of device.
      DeviceError: the GPU is not there.

    Source: tf.distribute.OneDeviceStrategy.
    """

    def __init__(self, device: str) -> None:
        own = devices_of.named(device)
        devices_of.activate(own)
        super().__init__(alone(), own)
