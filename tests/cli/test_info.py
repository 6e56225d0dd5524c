"""What ``python -m distrt info`` says: of one rank here, of several under mpirun."""

import numpy as np
import pytest

import distrt
from distrt.choice import Layout, Row, cpu_model, save
from distrt.cli.info import lines_of
from distrt.cluster.topology import Topology
from distrt.communicator import Communicator
from distrt.transport.loopback import LoopbackWorld
from distrt.world import World, alone

from ..launching import mpirun


def test_one_rank():
    lines = dict(lines_of(World(alone(), Topology.single(), "no MPI")))
    assert lines["distrt"].startswith(f"{distrt.__version__}, ")
    assert f"numpy {np.__version__}" in lines["packages"]
    assert lines["ranks"].startswith("1 on 1 host(s)\n  rank 0: ")
    assert cpu_model() in lines["ranks"]
    assert lines["MPI"].startswith("no MPI, thread level ")
    assert lines["shared memory"] == "none (one rank)"


def test_ranks_that_differ_are_named(monkeypatch):
    from distrt.cli import info

    def body(transport):
        topology = Topology.from_keys([("a", ""), ("a", ""), ("b", "")], transport.rank)
        return dict(lines_of(World(Communicator(transport), topology, f"MPI {transport.rank}")))

    monkeypatch.setattr(info, "visible_devices", lambda: ("GPU-1",))
    for lines in LoopbackWorld(3).run(body):
        assert lines["ranks"].startswith("3 on 2 host(s)\n  ranks 0, 1: a, ")
        assert lines["MPI"].startswith("ranks differ\n  rank 0: MPI 0, thread level ")
        assert lines["devices"] == "1 GPU(s): GPU-1"


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [0, 1, 2, 4])
def test_info_under_mpirun(ranks, tmp_path):
    path = tmp_path / "table.json"
    size = max(1, ranks)
    save(path, Layout(size, 1, cpu_model()), [Row("all_reduce", size, "one", 4096, "ring")])
    done = mpirun(ranks, ["-m", "distrt", "info"], env={"DISTRT_TUNING": str(path)})
    assert done.rc == 0, done.err
    assert done.out.count("distrt:") == 1, "only rank 0 prints"
    assert f"{size} on 1 host(s)" in done.out and "thread level" in done.out
    assert f"DISTRT_TUNING={path}" in done.out and f"{path}, 1 rows for this layout" in done.out
    if size > 1:
        assert "ring to 4 KiB, direct" in done.out


@pytest.mark.launches
def test_an_algorithm_that_cannot_be_taken_is_explained_where_it_stands():
    forced = "broadcast=direct,gather=exchange"
    env = {"DISTRT_ALGORITHM": forced, "DISTRT_SHARED_MEMORY": "off"}
    done = mpirun(2, ["-m", "distrt", "info"], env=env)
    assert done.rc == 0, done.err
    assert f"DISTRT_ALGORITHM={forced}" in done.out
    assert done.out.count("error, see below") == 1
    assert "broadcast cannot take 'direct'" in done.out
    assert "it needs NumPy arrays, on ranks of one host that share memory" in done.out
