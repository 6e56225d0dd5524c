"""dup and split: the right ranks, messages that never mix, on threads and on real ranks."""

import time

import numpy as np
import pytest

import distrt
from distrt.errors import CollectiveTimeoutError, PeerError
from distrt.transport.base import Tag
from distrt.transport.loopback import LoopbackWorld, single


def check_dup(transport):
    transport.timeout_seconds = 77.0
    again = transport.dup()
    assert (again.rank, again.size, again.name) == (transport.rank, transport.size, transport.name)
    assert again.world_ranks == transport.world_ranks
    assert again.timeout_seconds == 77.0
    assert again.threads is transport.threads
    if transport.size == 1:
        return
    # One receive on each, sent in the other order: by the communicator alone they are told apart.
    left, right = (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size
    pair = (transport, again)
    incoming = [np.empty(1, np.uint8) for _ in pair]
    requests = [t.irecv(b, left, Tag.RING) for t, b in zip(pair, incoming, strict=True)]
    outgoing = [np.full(1, 10 * i + transport.rank, np.uint8) for i in range(2)]
    requests += [pair[i].isend(outgoing[i], right, Tag.RING) for i in (1, 0)]
    transport.wait(requests, "the test")
    assert [int(b[0]) for b in incoming] == [left, 10 + left]


def check_split(transport):
    rank, size = transport.rank, transport.size
    half = transport.split(rank % 2)
    members = tuple(range(rank % 2, size, 2))
    assert (half.rank, half.size) == (members.index(rank), len(members))
    assert half.world_ranks == tuple(transport.world_ranks[r] for r in members)
    assert half.all_gather_object(rank) == list(members)
    assert half.broadcast_object(rank) == members[0]

    backwards = transport.split(7, key=-rank)
    assert backwards.rank == size - 1 - rank
    assert backwards.world_ranks == transport.world_ranks[::-1]

    # Within a part: the names stay the world's.
    part = backwards.split(0 if backwards.rank < 2 else None)
    assert (part is None) == (rank < size - 2)
    if part is not None:
        assert part.world_ranks == backwards.world_ranks[:2]
        assert part.dup().all_gather_object(rank) == list(part.world_ranks)
    assert transport.split(None) is None
    assert transport.all_gather_object(rank) == list(range(size))


def check_numbers(transport):
    # Each counts its own calls: another order on another rank changes no number.
    again, part = transport.dup(), transport.split(0)
    before = transport.calls
    assert [again.begin(), part.begin(), again.begin()] == [1, 1, 2]
    assert transport.calls == before


CHECKS = [check_dup, check_split, check_numbers]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("check", CHECKS)
def test_threads(check, size):
    LoopbackWorld(size).run(check)


@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize("check", CHECKS)
def test_real_ranks(check):
    # A duplicate of the world's, so that nothing that is done to it stays.
    check(distrt.world().communicator.transport.dup())


def test_a_rank_alone_has_relatives():
    alone = single()
    assert alone.dup().world_ranks == alone.split(3).world_ranks == (0,)


def test_a_rank_that_fails_frees_those_of_other_groups_and_has_its_world_name():
    def body(transport):
        part = transport.split(0 if transport.rank < 2 else 1)
        if transport.rank == 2:
            raise KeyError("mine")
        if transport.rank < 2:
            time.sleep(0.2)
        name = f"rank 2 failed while rank {transport.rank} was in"
        with pytest.raises(PeerError, match=name):
            part.wait([part.irecv(np.empty(1, np.uint8), 0, Tag.RING)], "the test")

    with pytest.raises(KeyError, match="mine"):
        LoopbackWorld(4).run(body)


def test_messages_name_the_rank_of_the_world_too():
    def body(transport):
        part = transport.split(0 if transport.rank == 2 else None)
        if part is not None:
            part.timeout_seconds = 0.2
            with pytest.raises(CollectiveTimeoutError, match=r"rank 0 \(world: 2\) of 1 waited"):
                part.drive(lambda: False, "the test")
            with pytest.raises(
                PeerError, match=r"rank 0 \(world: 2\) cannot make another"
            ) as caught:
                part.drive(lambda: True, "another")
            assert isinstance(caught.value.__cause__, CollectiveTimeoutError)

    LoopbackWorld(3).run(body)
