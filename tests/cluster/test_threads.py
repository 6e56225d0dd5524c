"""A rank's share of the cores, and that BLAS really keeps to it."""

from __future__ import annotations

import numpy as np
import pytest
import threadpoolctl

from distrt.cluster.threads import USER_VARIABLES, blas_threads, limit_blas_threads
from distrt.cluster.topology import Topology


def place(names, rank):
    return Topology.from_keys([(name, "boot") for name in names], rank)


@pytest.mark.parametrize(
    ("names", "affinities", "expected"),
    [
        ("a", [range(8)], [8]),
        ("aaaa", [range(8)] * 4, [2, 2, 2, 2]),
        ("aaa", [range(8)] * 3, [2, 2, 2]),
        ("aaaa", [range(2)] * 4, [1, 1, 1, 1]),  # more ranks than cores
        ("aabb", [range(8)] * 4, [4, 4, 4, 4]),  # another host's cores are not shared
        ("aa", [[0], [1]], [1, 1]),  # bound one by one, as mpirun does
        ("aaaa", [range(4), range(4, 8), range(4), range(4, 8)], [2, 2, 2, 2]),
        ("aa", [[3, 1, 2], (1, 2, 3)], [1, 1]),  # order does not matter
        ("aa", [range(6), range(4)], [6, 4]),
    ],
)
def test_share(names, affinities, expected):
    ranks = range(len(names))
    assert [blas_threads(place(names, rank), affinities) for rank in ranks] == expected


def blas_libraries():
    np.ones((2, 2)) @ np.ones((2, 2))
    return [lib for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]


def test_limit_is_applied(monkeypatch):
    for name in USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = [lib["num_threads"] for lib in blas_libraries()]
    with threadpoolctl.threadpool_limits():  # gives back what was there
        assert limit_blas_threads(place("aa", 1), [range(2)] * 2) == 1
        assert {lib["num_threads"] for lib in blas_libraries()} <= {1}
    assert [lib["num_threads"] for lib in blas_libraries()] == before


@pytest.mark.parametrize("name", USER_VARIABLES)
def test_the_user_decides(monkeypatch, name):
    for other in USER_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    before = blas_libraries()
    monkeypatch.setenv(name, "7")
    assert limit_blas_threads(place("aa", 0), [range(2)] * 2) is None
    assert blas_libraries() == before
