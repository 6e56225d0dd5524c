"""Several hosts, played by one: DISTRT_HOSTNAME gives the ranks their host names.

That MPI carries real jobs over real hosts is no matter of these tests: see
docs/benchmarks/2026-11-30-first-launches.md.
"""

import ast

import pytest

from tests.launching import mpirun

pytestmark = [pytest.mark.launches, pytest.mark.timeout(120)]

PROGRAM = """
import os
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["DISTRT_HOSTNAME"] = HOSTS[rank]
import numpy as np, distrt

here = distrt.world().topology
try:
    mirrored = distrt.MirroredStrategy().num_replicas_in_sync
except distrt.errors.LaunchError as error:
    mirrored = str(error)

# One step of SGD: the gradient is the sum of all rows, of which the last rank has none.
strategy = distrt.MultiWorkerMirroredStrategy(device="cpu")
with strategy.scope():
    weight = distrt.Variable(np.full(2, 16.0 + rank), name="weight")
sgd = distrt.train.SGD(0.5)
rows = distrt.data.Dataset.from_tensor_slices(np.arange(8.0).reshape(4, 2)).batch(4)

def step(part):
    sgd.apply_gradients([(part.sum(axis=0), weight)])
    return len(part)

lengths = [strategy.run(step, (part,)) for part in strategy.experimental_distribute_dataset(rows)]
said = {
    "rank": here.rank, "hosts": here.hosts, "nodes": here.nodes, "node": here.node,
    "local_rank": here.local_rank, "local_size": here.local_size, "mirrored": mirrored,
    "replicas": strategy.num_replicas_in_sync, "lengths": lengths,
    "weight": weight.numpy().tolist(),
}
print(f"{said}\\n", end="", flush=True)
"""


def run(*hosts):
    """Return what each rank says, in rank order, when rank r is on ``hosts[r]``."""
    done = mpirun(len(hosts), f"HOSTS = {hosts!r}\n{PROGRAM}", timeout=60)
    assert done.rc == 0, done
    assert "Warning" not in done.err, done
    return sorted(map(ast.literal_eval, done.out.splitlines()), key=lambda said: said["rank"])


@pytest.fixture(scope="module")
def two_hosts():
    return run("east", "west", "east")


def column(ranks, name):
    return [said[name] for said in ranks]


def test_the_topology(two_hosts):
    assert column(two_hosts, "hosts") == [("east", "west", "east")] * 3
    assert column(two_hosts, "nodes") == [2, 2, 2]
    assert column(two_hosts, "node") == [0, 1, 0]
    assert column(two_hosts, "local_rank") == [0, 0, 1]
    assert column(two_hosts, "local_size") == [2, 1, 2]


def test_mirrored_strategy_is_refused_on_every_rank(two_hosts):
    for text in column(two_hosts, "mirrored"):
        assert "one host" in text and "(east, west)" in text
        assert "use MultiWorkerMirroredStrategy" in text


def test_multi_worker_mirrored_strategy_trains(two_hosts):
    assert column(two_hosts, "replicas") == [3, 3, 3]
    assert column(two_hosts, "lengths") == [[2], [2], [0]]
    # From rank 0's 16: less half of 0+2+4+6 and of 1+3+5+7.
    assert column(two_hosts, "weight") == [[10.0, 8.0]] * 3


def test_one_host_of_that_name_is_one_node():
    ranks = run("east", "east")
    assert column(ranks, "nodes") == [1, 1] and column(ranks, "local_rank") == [0, 1]
    assert column(ranks, "mirrored") == [2, 2]
    assert column(ranks, "weight") == [[10.0, 8.0]] * 2
