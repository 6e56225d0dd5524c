"""Who is where: rank, node and local rank from MPI (layer 2). May import: errors, mpi4py.

A node is a group of ranks with equal (host name, boot id): neither the host
name alone (images share one) nor MPI's shared-memory split (settings break it
up) is the truth everywhere, so the second is a cross-check of the first.

DISTRT_HOSTNAME replaces the host name of a rank: for containers that should
count as one host or as several, and to try several hosts on one.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

__all__ = ["HostKey", "Topology", "discover", "host_key"]

HostKey = tuple[str, str]
"""What ranks of one host have in common: (host name, boot id)."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@final
@dataclass(frozen=True)
class Topology:
    """The place of this rank among all ranks.

    Attributes:
      rank: this rank.
      size: number of ranks.
      hosts: host name of each rank.
      node_of: node of each rank; nodes are counted in order of their lowest rank.
      node: node of this rank.
      nodes: number of nodes.
      local_ranks: the ranks of this node, ascending.
      local_rank: position of this rank in ``local_ranks``.
      local_size: number of ranks of this node.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    node_of: tuple[int, ...]

    @classmethod
    def from_keys(cls, keys: Sequence[HostKey], rank: int) -> Topology:
        """Return the topology of ``rank``, given every rank's host key in rank order."""
        nodes: dict[HostKey, int] = {}
        node_of = tuple(nodes.setdefault(key, len(nodes)) for key in keys)
        return cls(rank, len(keys), tuple(name for name, _ in keys), node_of)

    @classmethod
    def single(cls) -> Topology:
        """Return the topology of one process on its own."""
        return cls.from_keys([host_key()], 0)

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.node_of[self.rank]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of) + 1

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this node, ascending."""
        return tuple(rank for rank, node in enumerate(self.node_of) if node == self.node)

    @property
    def local_rank(self) -> int:
        """Position of this rank among the ranks of its node."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks of this node."""
        return len(self.local_ranks)


def host_key() -> HostKey:
    """Return (host name, boot id) of this process; the boot id is "" where there is none."""
    name = os.environ.get("DISTRT_HOSTNAME", "").strip() or socket.gethostname()
    try:
        return name, _BOOT_ID.read_text().strip()
    except OSError:
        return name, ""


def discover(comm: Any) -> Topology:
    """Find out who is where. All ranks of ``comm`` must call it.

    Args:
      comm: an ``mpi4py.MPI.Intracomm`` over all ranks.

    Warns:
      UserWarning: on the lowest rank of a node, where MPI's shared-memory split
        separates ranks that have the same host key; they still count as one node.
    """
    from mpi4py import MPI

    rank = comm.Get_rank()
    topology = Topology.from_keys(comm.allgather(host_key()), rank)
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    sharing = shared.allgather(rank)
    shared.Free()
    # Every rank knows only its own split: the lowest of the node speaks for all.
    apart = not set(topology.local_ranks) <= set(sharing)
    if apart and topology.local_rank == 0:
        warnings.warn(
            f"ranks {list(topology.local_ranks)} are all on host {topology.hosts[rank]!r}, but "
            f"MPI shares memory only among {sorted(sharing)}: they count as one node. If they "
            "are on several hosts, set DISTRT_HOSTNAME to each one's own name",
            UserWarning,
            stacklevel=2,
        )
    return topology
