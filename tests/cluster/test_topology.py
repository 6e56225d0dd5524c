"""Who is where: pure grouping, and real ranks that pretend to be on several hosts."""

from __future__ import annotations

import socket

import pytest

from distrt.cluster.topology import Topology, host_key
from tests.launching import is_open_mpi, mpirun


def keys(names: str) -> list[tuple[str, str]]:
    return [(name, "boot") for name in names]


@pytest.mark.parametrize(
    ("names", "node_of", "local_ranks"),
    [
        ("a", (0,), (0,)),
        ("ab", (0, 1), (0, 0)),
        ("aaaa", (0, 0, 0, 0), (0, 1, 2, 3)),
        ("abab", (0, 1, 0, 1), (0, 0, 1, 1)),
        ("baab", (0, 1, 1, 0), (0, 0, 1, 1)),  # first appearance, not the alphabet
        ("aaabb", (0, 0, 0, 1, 1), (0, 1, 2, 0, 1)),
        ("abcdefg", tuple(range(7)), (0,) * 7),
    ],
)
def test_grouping(names, node_of, local_ranks):
    for rank in range(len(names)):
        topology = Topology.from_keys(keys(names), rank)
        mates = tuple(r for r, name in enumerate(names) if name == names[rank])
        assert topology.rank == rank
        assert topology.size == len(names)
        assert topology.hosts == tuple(names)
        assert topology.node_of == node_of
        assert topology.node == node_of[rank]
        assert topology.nodes == len(set(names))
        assert topology.local_ranks == mates
        assert topology.local_rank == local_ranks[rank]
        assert topology.local_size == len(mates)


def test_equal_names_of_different_machines_are_different_nodes():
    topology = Topology.from_keys([("node", "x"), ("node", "y"), ("node", "x")], 2)
    assert topology.node_of == (0, 1, 0)
    assert topology.local_ranks == (0, 2)


def test_host_name_can_be_overridden(monkeypatch):
    monkeypatch.delenv("DISTRT_HOSTNAME", raising=False)
    assert host_key()[0] == socket.gethostname()
    monkeypatch.setenv("DISTRT_HOSTNAME", " elsewhere ")
    assert host_key() == ("elsewhere", host_key()[1])
    single = Topology.single()
    assert (single.rank, single.size, single.hosts, single.nodes) == (0, 1, ("elsewhere",), 1)
    assert single.local_ranks == (0,)


DISCOVER = """
import os, sys, warnings
HOSTS = ""
from mpi4py import MPI
from distrt.cluster.topology import discover

rank = MPI.COMM_WORLD.Get_rank()
if HOSTS:
    os.environ["DISTRT_HOSTNAME"] = HOSTS[rank]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    t = discover(MPI.COMM_WORLD)
lines = [f"{rank} {t.node_of} {t.local_ranks} {t.local_rank} {t.nodes} {t.size}\\n"]
lines += [f"warned {rank}: {w.message}\\n" for w in caught]
sys.stdout.write("".join(lines))
"""


@pytest.mark.launches
def test_discover_several_hosts():
    job = mpirun(4, DISCOVER.replace('HOSTS = ""', 'HOSTS = "abab"'))
    assert job.rc == 0, job.err
    assert sorted(job.out.splitlines()) == [
        "0 (0, 1, 0, 1) (0, 2) 0 2 4",
        "1 (0, 1, 0, 1) (1, 3) 0 2 4",
        "2 (0, 1, 0, 1) (0, 2) 1 2 4",
        "3 (0, 1, 0, 1) (1, 3) 1 2 4",
    ]


@pytest.mark.launches
def test_discover_one_host():
    job = mpirun(3, DISCOVER)
    assert job.rc == 0, job.err
    assert sorted(job.out.splitlines()) == [
        f"{rank} (0, 0, 0) (0, 1, 2) {rank} 1 3" for rank in range(3)
    ]


@pytest.mark.launches
def test_a_smaller_shared_memory_split_warns_once():
    if is_open_mpi():
        pytest.skip("only MPICH can be told to split the ranks of one host")
    job = mpirun(3, DISCOVER, env={"MPIR_CVAR_NOLOCAL": "1"})
    assert job.rc == 0, job.err
    warned = [line for line in job.out.splitlines() if line.startswith("warned")]
    assert len(warned) == 1
    assert warned[0].startswith("warned 0: ranks [0, 1, 2] are all on host")
    assert "only among [0]: they count as one node" in warned[0]
    assert sum("(0, 1, 2)" in line for line in job.out.splitlines()) == 3
