"""Which device a rank computes on (layer 2). May import: errors, arrays, cluster.topology, CuPy.

A rank takes the GPU at its position among the ranks of its host that see the
same list of GPUs, modulo the length of the list. That is right whether all
ranks see all GPUs, each sees one, or groups see different ones; and it never
reads CUDA_VISIBLE_DEVICES, whose numbers are not the ones that CUDA takes.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from distrt.arrays import cupy_module
from distrt.cluster.topology import Topology
from distrt.errors import DeviceError, InvalidArgumentError

__all__ = ["Device", "activate", "assign", "choose", "named", "parse", "visible_devices"]

Kind = Literal["cpu", "gpu"]
PREFERENCES = ("auto", "cpu", "gpu")


@final
@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Attributes:
      kind: "cpu" or "gpu".
      index: CUDA's number of the GPU in this process; 0 for the CPU.
      uuid: the GPU itself, whatever its number; "" for the CPU.
    """

    kind: Kind
    index: int = 0
    uuid: str = ""

    @classmethod
    def cpu(cls) -> Device:
        """Return the CPU."""
        return cls("cpu")

    @classmethod
    def gpu(cls, index: int, uuid: str) -> Device:
        """Return the GPU that this process numbers ``index``."""
        return cls("gpu", index, uuid)

    @property
    def name(self) -> str:
        """The tf-style name: "/gpu:0", "/cpu:0"."""
        return f"/{self.kind}:{self.index}"


def visible_devices() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process may use, in CUDA's order.

    Never raises: () where there is no driver, no GPU or no CuPy. Creates no CUDA
    context, and imports CuPy only where a driver is installed.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() == "":
        return ()
    try:
        ctypes.CDLL("libcuda.so.1")
        runtime = cupy_module().cuda.runtime
        found = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except (ImportError, OSError, RuntimeError):  # CuPy's CUDA errors are RuntimeErrors
        return ()
    return tuple(f"GPU-{properties['uuid'].hex()}" for properties in found)


def assign(hosts: Sequence[Hashable], lists: Sequence[Sequence[str]]) -> list[int | None]:
    """Return the index of each rank's GPU in its own list; None where the list is empty.

    Args:
      hosts: what tells hosts apart, one per rank (``Topology.node_of``).
      lists: UUIDs of the GPUs that each rank sees.
    """
    seen: Counter[tuple[Hashable, tuple[str, ...]]] = Counter()
    indices: list[int | None] = []
    for host, devices in zip(hosts, map(tuple, lists), strict=True):
        position = seen[host, devices]
        seen[host, devices] += 1
        indices.append(position % len(devices) if devices else None)
    return indices


def choose(prefer: str, topology: Topology, lists: Sequence[Sequence[str]]) -> Device:
    """Return this rank's device. Not collective, but equal arguments on all ranks agree.

    Args:
      prefer: "gpu", "cpu", or "auto": the GPU where there is one.
      topology: of this rank.
      lists: ``visible_devices()`` of every rank, in rank order.

    Raises:
      InvalidArgumentError: ``prefer`` is none of the three.
      DeviceError: on every rank, if "gpu" was asked for and some rank sees none.

    Warns:
      UserWarning: on the lowest rank concerned: ranks share a GPU, some ranks have
        a GPU and others none, or a program of one rank leaves GPUs idle.
    """
    if prefer not in PREFERENCES:
        raise InvalidArgumentError(
            f"device must be one of {', '.join(PREFERENCES)}; got {prefer!r}"
        )
    if prefer == "cpu":
        return Device.cpu()
    indices = assign(topology.node_of, lists)
    without = [rank for rank, index in enumerate(indices) if index is None]
    if prefer == "gpu" and without:
        raise DeviceError(
            f"a GPU was asked for, and {_ranks(without)} of {topology.size} see none "
            f"(on {', '.join(dict.fromkeys(topology.hosts[rank] for rank in without))}): check "
            "`nvidia-smi`, CUDA_VISIBLE_DEVICES and that CuPy is installed there (pip install "
            "'distrt[cuda13]' or 'distrt[cuda12]'), or use device 'cpu' or 'auto'"
        )
    for concerned, text in _notices(topology, lists, indices, without):
        if topology.rank == concerned:
            warnings.warn(text, UserWarning, stacklevel=2)
    index = indices[topology.rank]
    return Device.cpu() if index is None else Device.gpu(index, lists[topology.rank][index])


def _notices(
    topology: Topology,
    lists: Sequence[Sequence[str]],
    indices: Sequence[int | None],
    without: Sequence[int],
) -> list[tuple[int, str]]:
    """Return (lowest rank concerned, text) of everything a person should know."""
    notices = []
    if 0 < len(without) < topology.size:
        notices.append(
            (
                without[0],
                f"{_ranks(without)} of {topology.size} see no GPU and compute on the CPU; "
                "the others wait for them",
            )
        )
    users: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, index in enumerate(indices):
        if index is not None:
            users[topology.node_of[rank], lists[rank][index]].append(rank)
    shared = {key: ranks for key, ranks in users.items() if len(ranks) > 1}
    if shared:
        groups = "; ".join(f"{_ranks(ranks)} share {uuid}" for (_, uuid), ranks in shared.items())
        text = f"{groups}: slower than a GPU for each rank"
        notices.append((min(map(min, shared.values())), text))
    if topology.size == 1 and len(lists[0]) > 1:
        program = os.path.basename(sys.argv[0]) or "train.py"
        many = len(lists[0])
        notices.append((0, f"1 of {many} GPUs in use; mpirun -n {many} python {program}"))
    return notices


def _ranks(ranks: Sequence[int]) -> str:
    """Write "rank 3", or "ranks 0, 4 and 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


_NAME = re.compile(
    r"(?:/job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(cpu|gpu)(?::(\d+|\*))?",
    re.IGNORECASE,
)


def parse(name: str) -> tuple[Kind, int | None]:
    """Return (kind, index) of a tf-style device name; the index is None where it has none.

    Takes "/gpu:0", "GPU:0", "cpu", "/job:worker/replica:0/task:0/device:GPU:1".

    Raises:
      InvalidArgumentError: the name is of another form or of another kind of device.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise InvalidArgumentError(
            f"unknown device {name!r}: expected a name such as '/gpu:0' or '/cpu:0'"
        )
    kind: Kind = "gpu" if match[1].lower() == "gpu" else "cpu"
    return kind, int(match[2]) if match[2] not in (None, "*") else None


def named(name: str) -> Device:
    """Return the device that this process knows by a tf-style name. Not collective.

    Raises:
      InvalidArgumentError: the name is of another form or of another kind of device.
      DeviceError: this process sees no such GPU.
    """
    kind, index = parse(name)
    if kind == "cpu":
        return Device.cpu()
    visible, index = visible_devices(), index or 0
    if index >= len(visible):
        raise DeviceError(
            f"{name} was asked for, and this process sees {len(visible)} GPU(s): check "
            "`nvidia-smi`, CUDA_VISIBLE_DEVICES and that CuPy is installed"
        )
    return Device.gpu(index, visible[index])


def activate(device: Device) -> None:
    """Make ``device`` the current one of this thread: a GPU becomes CUDA's current device."""
    if device.kind == "gpu":
        cupy_module().cuda.Device(device.index).use()
