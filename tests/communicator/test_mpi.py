"""The verbs over real ranks: the bodies of ``bodies.py`` under mpirun -n 1, 2, 3, 4."""

import numpy as np
import pytest

import distrt
from distrt.communicator import Communicator
from distrt.settings import Settings

from .bodies import BODIES

# Small limits, so that small arrays pass all of them.
SMALL = Settings(segment_bytes=64, stage_bytes=256, inline_bytes=64)

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


# The last one shares no memory, as between hosts: messages agree on the calls too.
@pytest.mark.parametrize("algorithm", ["ring,exchange", "direct", "halving_doubling"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_verbs(body, algorithm):
    everyone = distrt.world().communicator
    node = None if algorithm == "halving_doubling" else everyone.node
    body(Communicator(everyone.transport, SMALL._replace(algorithm=algorithm), node))


@pytest.mark.parametrize("nbytes", [4_000, 8_000, 16_000, 65_536, 10**6, 2 * 10**7])
def test_sizes_around_the_eager_limits(nbytes):
    # A blocking send before the receive would hang from 8 or 16 kB on.
    comm = distrt.world().communicator
    result = comm.all_reduce(np.full(nbytes // 4, comm.rank + 1, np.int32))
    assert (result == comm.size * (comm.size + 1) // 2).all()


def test_world_knows_this_process():
    world = distrt.world()
    assert world is distrt.world()
    assert world.communicator.size == world.topology.size
    assert world.communicator.rank == world.topology.rank
    assert world.topology.nodes == 1 and world.topology.local_size == world.topology.size
    assert world.library.split()[-1][0].isdigit()
