"""``MirroredStrategy``: the ranks of one host train one model (layer 6).

May import: coordinator.strategy, world, cluster, errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from distrt.cluster import device as devices_of
from distrt.cluster.device import Device
from distrt.cluster.topology import Topology
from distrt.coordinator.strategy import Strategy
from distrt.errors import InvalidArgumentError, LaunchError
from distrt.world import World, world

__all__ = ["MirroredStrategy", "choose_device"]


def choose_device(everyone: World, prefer: str) -> Device:
    """Return this rank's device: a GPU of its own where there is one, else the CPU. Collective.

    Raises:
      DeviceError: on every rank, where a GPU was asked for and some rank has none.
    """
    lists = everyone.communicator.all_gather_object(devices_of.visible_devices())
    return _agreed(everyone, lambda: devices_of.choose(prefer, everyone.topology, lists))


def _agreed(everyone: World, choose: Callable[[], Device]) -> Device:
    """Choose and activate this rank's device, or raise on all ranks. Collective."""
    chosen = everyone.communicator.together("choosing devices", choose)
    assert chosen is not None
    devices_of.activate(chosen)
    return chosen


@final
class MirroredStrategy(Strategy):
    """Synchronous training on the ranks of one host. All ranks must create it.

    Args:
      devices: one tf-style name per rank ("/gpu:0", "/cpu:0"), in rank order; by
        default each rank takes a GPU of its own, or the CPU where there is none.
      device: "auto", "cpu" or "gpu", where ``devices`` is not given.

    Raises:
      LaunchError: the ranks are on several hosts; use MultiWorkerMirroredStrategy.
      InvalidArgumentError: ``devices`` does not name one device for each rank.
      DeviceError: a GPU was asked for that a rank does not have.

    Source: tf.distribute.MirroredStrategy, with one process per device.
    """

    def __init__(self, devices: Sequence[str] | None = None, *, device: str = "auto") -> None:
        everyone = world()
        if everyone.topology.nodes > 1:
            hosts = ", ".join(dict.fromkeys(everyone.topology.hosts))
            raise LaunchError(
                f"MirroredStrategy works on one host, and these {everyone.topology.size} ranks are "
                f"on {everyone.topology.nodes} ({hosts}): use MultiWorkerMirroredStrategy"
            )
        if devices:
            own = _agreed(everyone, lambda: _named(devices, everyone.topology))
        else:
            own = choose_device(everyone, device)
        super().__init__(everyone.communicator, own)


def _named(names: Sequence[str], topology: Topology) -> Device:
    """Return the device that ``names`` gives this rank."""
    size = topology.size
    if isinstance(names, str):
        raise InvalidArgumentError(f"devices: expected a list of names, got the string {names!r}")
    if len(names) != size:
        raise InvalidArgumentError(
            f"devices names {len(names)} devices for {size} rank(s): expected one per rank; "
            f"start {len(names)} ranks with mpirun -n {len(names)} python ..."
        )
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"devices names a device twice: {list(names)}")
    return devices_of.named(names[topology.rank])
