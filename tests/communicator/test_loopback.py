"""The verbs over threads: every algorithm without a process, sends that block until matched."""

import threading
import time

import numpy as np
import pytest

from distrt.communicator import Communicator
from distrt.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ContextError,
    InvalidArgumentError,
    PeerError,
)
from distrt.settings import Settings
from distrt.transport.loopback import LoopbackWorld, single
from distrt.transport.shared_memory import share

from .bodies import (
    BODIES,
    check_half_types_round_once,
    check_in_place,
    check_mean,
    check_same_bits_everywhere,
    check_sizes,
)

# Small limits, so that small arrays pass all of them.
SMALL = Settings(segment_bytes=64, stage_bytes=256, inline_bytes=64, timeout_seconds=30.0)


# The ranks of each node, by name: equal and unequal numbers, in order and not.
LAYOUTS = {
    "2+2": [[0, 1], [2, 3]],
    "1+3": [[0], [1, 2, 3]],
    "mixed": [[0, 2, 4], [1, 3]],
}


def run(body, size, groups=None, **settings):
    settings = SMALL._replace(**settings)
    groups = [range(size)] if groups is None else groups
    nodes = []

    def program(transport):
        node = None
        if settings.algorithm in ("auto", "direct", "hierarchical"):
            own = next(group for group in groups if transport.rank in group)
            node = share(transport, own, settings)
            nodes.append(node)
        return body(Communicator(transport, settings, node))

    try:
        return LoopbackWorld(size).run(program)
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_verbs(body, algorithm, size):
    run(body, size, algorithm=algorithm)


# A limit of 1 byte: nothing travels with the fingerprint. 100: some of the sizes do.
@pytest.mark.parametrize("carried_bytes", [1, 100, 1 << 14])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_verbs_in_pairs(size, carried_bytes):
    settings = {"algorithm": "halving_doubling", "carried_bytes": carried_bytes}
    for body in (check_sizes, check_half_types_round_once, check_in_place, check_mean):
        run(body, size, **settings)


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_what_travels_with_the_fingerprint_has_the_same_bits(size):
    def body(comm):
        rng = np.random.default_rng(comm.rank)
        results = []
        for dtype in (np.float32, np.float16, np.float64, np.complex64):
            value = rng.standard_normal(19).astype(dtype)
            results += [comm.all_reduce(value, op).tobytes() for op in ("SUM", "MEAN")]
        return results

    settings = {"algorithm": "halving_doubling"}
    carried, sent = (run(body, size, **settings, carried_bytes=limit) for limit in (1 << 14, 1))
    assert carried == sent == [carried[0]] * size


def test_a_call_that_carries_meets_one_that_does_not():
    def body(comm):
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: .* all_reduce op=SUM"):
            comm.all_reduce(np.ones(5)) if comm.rank == 0 else comm.barrier()
        with pytest.raises(CollectiveMismatchError, match=r"float64\[300\]"):
            comm.all_reduce(np.ones(300 if comm.rank == 1 else 3))
        return comm.all_reduce(np.ones(2)).tolist()

    assert run(body, 3, algorithm="halving_doubling") == [[3, 3]] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_verbs_over_several_nodes(body, layout):
    groups = LAYOUTS[layout]

    def checked(comm):
        assert comm.algorithm_for("all_reduce", 1 << 20) == "hierarchical"
        body(comm)

    run(checked, sum(map(len, groups)), groups, algorithm="hierarchical")


def test_every_node_of_one_rank_is_a_ring():
    def body(comm):
        assert comm.algorithms("all_reduce") == ("ring", "halving_doubling")
        check_sizes(comm)

    run(body, 3, [[0], [1], [2]], algorithm="auto")


@pytest.mark.parametrize("segment_bytes", [1, 4, 12, 100, 1 << 20])
def test_any_segment_size(segment_bytes):
    run(check_same_bits_everywhere, 3, algorithm="ring", segment_bytes=max(segment_bytes, 64))
    ones = np.ones(37, np.float32)
    run(lambda comm: comm.all_reduce(ones), 5, algorithm="ring", segment_bytes=segment_bytes)


def test_many_ranks():
    def body(comm):
        total = comm.all_reduce(np.full(500, comm.rank, np.int64))
        assert (total == sum(range(comm.size))).all()

    run(body, 17)
    # Slots shorter than a cache line for each rank are made longer.
    run(body, 17, stage_bytes=1, inline_bytes=1)


def test_segment_size_does_not_change_the_bits():
    def body(comm):
        rng = np.random.default_rng(comm.rank)
        return comm.all_reduce(rng.standard_normal(5003).astype(np.float32)).tobytes()

    results = {
        bits
        for size in (64, 1000, 1 << 20)
        for bits in run(body, 4, algorithm="ring", segment_bytes=size)
    }
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


def test_after_a_call_that_was_given_up_every_other_one_is_refused():
    # Its receives are still posted: a later call must not reuse or free their buffers.
    def body(comm):
        if comm.rank == 0:
            time.sleep(1.0)
            return
        with pytest.raises(CollectiveTimeoutError):
            comm.all_reduce(np.ones(3, np.float32))
        with pytest.raises(PeerError, match="given up"):
            comm.all_reduce(np.ones(3, np.float32))
        assert comm.transport._given_up is not None

    run(body, 2, timeout_seconds=0.5)


def test_two_threads_of_a_rank_are_told_apart():
    def body(comm):
        inside, go = threading.Event(), threading.Event()

        def action():
            inside.set()
            assert go.wait(10)

        if comm.rank == 0:
            thread = threading.Thread(target=lambda: comm.together("waiting", action))
            thread.start()
            assert inside.wait(10)
            with pytest.raises(ContextError, match="another thread of rank 0"):
                comm.all_reduce(1)
            go.set()
            thread.join(10)
        else:
            comm.together("waiting", lambda: None)
        assert comm.all_reduce(1) == comm.size

    run(body, 2)


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


def test_an_unknown_algorithm_is_refused_at_once():
    with pytest.raises(InvalidArgumentError, match="unknown algorithm 'rings'"):
        Communicator(single(), Settings(algorithm="rings"))


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DISTRT_SEGMENT_BYTES", "4096")
    monkeypatch.setenv("DISTRT_TIMEOUT", "2.5")
    assert Settings.from_environment() == Settings(4096, 2.5)
    for name, good, bad in [
        ("DISTRT_SHARED_MEMORY", "off", "no"),
        ("DISTRT_STAGE_BYTES", "64", "-1"),
    ]:
        monkeypatch.setenv(name, good)
        assert str(good) in map(str, Settings.from_environment())
        monkeypatch.setenv(name, bad)
        with pytest.raises(InvalidArgumentError, match=name):
            Settings.from_environment()
        monkeypatch.delenv(name)
    monkeypatch.setenv("DISTRT_ALGORITHM", "all_reduce=ring,broadcast=direct")
    assert Settings.from_environment().algorithm == "all_reduce=ring,broadcast=direct"
    for bad in ("0", "-3", "x", ""):
        monkeypatch.setenv("DISTRT_TIMEOUT", bad)
        with pytest.raises(InvalidArgumentError, match="DISTRT_TIMEOUT"):
            Settings.from_environment()
