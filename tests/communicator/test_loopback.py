"""The verbs over threads: every algorithm without a process, sends that block until matched."""

import threading
import time

import numpy as np
import pytest

from distrt.communicator import Communicator, Settings
from distrt.errors import CollectiveTimeoutError, InvalidArgumentError, PeerError
from distrt.transport.loopback import LoopbackWorld, single

from .bodies import BODIES, check_same_bits_everywhere, check_sizes


def run(body, size, **settings):
    settings = Settings(**{"segment_bytes": 64, "timeout_seconds": 30.0, **settings})
    return LoopbackWorld(size).run(lambda t: body(Communicator(t, settings)))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_verbs(body, size):
    run(body, size)


@pytest.mark.parametrize("segment_bytes", [1, 4, 12, 100, 1 << 20])
def test_any_segment_size(segment_bytes):
    run(check_same_bits_everywhere, 3, segment_bytes=max(segment_bytes, 64))
    run(lambda comm: comm.all_reduce(np.ones(37, np.float32)), 5, segment_bytes=segment_bytes)


def test_many_ranks():
    def body(comm):
        total = comm.all_reduce(np.full(50, comm.rank, np.int64))
        assert (total == sum(range(comm.size))).all()

    run(body, 17)


def test_segment_size_does_not_change_the_bits():
    def body(comm):
        rng = np.random.default_rng(comm.rank)
        return comm.all_reduce(rng.standard_normal(5003).astype(np.float32)).tobytes()

    results = {bits for size in (64, 1000, 1 << 20) for bits in run(body, 4, segment_bytes=size)}
    assert len(results) == 1


def test_a_rank_that_never_comes_is_named_by_the_deadline():
    def body(comm):
        if comm.rank == 1:
            time.sleep(2.5)
            return
        with pytest.raises(
            CollectiveTimeoutError, match=r"rank 0 of 2 waited 1 s in call #1 all_red"
        ):
            comm.all_reduce(np.ones(3, np.float32))

    run(body, 2, timeout_seconds=1.0)


def test_a_rank_that_fails_frees_the_others():
    def body(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        with pytest.raises(PeerError, match="rank 1 failed while rank"):
            comm.all_reduce(np.ones(3, np.float32))

    with pytest.raises(KeyError, match="mine"):
        run(body, 3)


def test_one_rank_needs_no_threads():
    before = threading.active_count()
    comm = Communicator(single())
    check_sizes(comm)
    assert threading.active_count() == before
    assert repr(comm) == "<Communicator rank 0 of 1 over loopback>"


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DISTRT_SEGMENT_BYTES", "4096")
    monkeypatch.setenv("DISTRT_TIMEOUT", "2.5")
    assert Settings.from_environment() == Settings(4096, 2.5)
    for bad in ("0", "-3", "x", ""):
        monkeypatch.setenv("DISTRT_TIMEOUT", bad)
        with pytest.raises(InvalidArgumentError, match="DISTRT_TIMEOUT"):
            Settings.from_environment()
