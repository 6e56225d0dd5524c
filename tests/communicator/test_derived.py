"""split, dup, free, send, recv and calls in the background, over threads and real ranks."""

import threading
import time

import numpy as np
import pytest

import distrt
from distrt.communicator import Communicator
from distrt.errors import CollectiveMismatchError, ContextError, InvalidArgumentError, PeerError
from distrt.settings import Settings
from distrt.transport.loopback import LoopbackWorld
from distrt.transport.shared_memory import share

SMALL = Settings(segment_bytes=64, stage_bytes=256, inline_bytes=64, timeout_seconds=30.0)


def check_async_verbs(comm):
    n, rank = comm.size, comm.rank
    mine = np.arange(4 * n, dtype=np.float32) + rank
    total = n * np.arange(4 * n, dtype=np.float32) + n * (n - 1) // 2
    works = [
        comm.all_reduce(mine, async_op=True),
        comm.reduce(mine, root=n - 1, async_op=True),
        comm.reduce_scatter(mine, async_op=True),
        comm.broadcast(mine, n - 1, async_op=True),
        comm.all_gather(mine[:1], async_op=True),
        comm.gather(mine[:1], n - 1, async_op=True),
        comm.scatter(mine, n - 1, async_op=True),
        comm.all_to_all(np.full(n, rank), async_op=True),
        comm.all_to_all(np.full(n, rank), counts=[1] * n, async_op=True),
        comm.barrier(async_op=True),
    ]
    # Behind the pending ones, in order.
    assert comm.all_reduce(1) == n
    assert all(work.done() for work in works)
    results = [work.wait() for work in works]
    starts = np.arange(n, dtype=np.float32)
    expected = [
        total,
        total if rank == n - 1 else None,
        total[4 * rank : 4 * rank + 4],
        np.arange(4 * n) + n - 1,
        starts,
        starts if rank == n - 1 else None,
        np.arange(4 * rank, 4 * rank + 4) + n - 1,
        np.arange(n),
        np.arange(n),
        None,
    ]
    for result, right in zip(results, expected, strict=True):
        assert (result is None) == (right is None)
        assert right is None or (result == right).all()


def check_async_in_place(comm):
    for count in (0, 1, 5, 1000):
        buffers = [np.full(count, k + comm.rank, np.float64) for k in range(5)]
        works = [comm.all_reduce(b, out=b, async_op=True) for b in buffers]
        for k, (work, buffer) in enumerate(zip(works, buffers, strict=True)):
            assert work.wait() is buffer
            assert (buffer == comm.size * k + sum(range(comm.size))).all()


def check_using_holds_for_calls_in_the_background(comm):
    # Rank 0 leaves the block late: its calls must not choose later than the others'.
    ones = np.ones(3000)
    for algorithm in ("ring", "halving_doubling", "auto"):
        works = [comm.all_reduce(ones, async_op=True) for _ in range(3)]
        with comm.using(algorithm):
            assert all(work.done() for work in works)
            works += [comm.all_reduce(ones, async_op=True) for _ in range(3)]
            time.sleep(0.02 * (comm.rank == 0))
        assert all(work.done() for work in works)
        assert all((work.wait() == comm.size).all() for work in works)


def check_async_errors(comm):
    # What is refused on one rank is told to all, when the work is waited for.
    work = comm.all_reduce("text" if comm.rank == 0 else np.ones(2), async_op=True)
    kind = distrt.errors.DTypeError if comm.size == 1 else CollectiveMismatchError
    with pytest.raises(kind):
        work.wait()
    work = comm.all_reduce(np.ones(2 + (comm.rank == 0)), async_op=True)
    if comm.size > 1:
        with pytest.raises(CollectiveMismatchError, match="all_reduce op=SUM float64"):
            work.wait()
    assert comm.all_reduce(1) == comm.size


def check_split(comm):
    n, rank = comm.size, comm.rank
    half = comm.split(rank % 2, key=-rank)
    members = [r for r in range(n) if r % 2 == rank % 2][::-1]
    assert (half.rank, half.size) == (members.index(rank), len(members))
    assert half.all_gather(np.array([rank])).tolist() == members
    assert half.all_reduce(np.ones(100)).tolist() == [len(members)] * 100
    one = comm.split(None if rank else 3)
    assert (one is None) == (rank > 0)
    assert one is None or one.all_reduce(7) == 7
    twin = comm.dup()
    assert twin.all_reduce(np.full(3, rank)).tolist() == [sum(range(n))] * 3
    for derived in (half, twin):
        derived.free()
        with pytest.raises(ContextError, match="was freed"):
            derived.all_reduce(1)
    assert comm.all_reduce(1) == n


def check_two_communicators_in_opposite_order(comm):
    twin = comm.dup()
    ones, odd = np.ones(1000), comm.rank % 2
    # Odd ranks give 1 to comm, first; even ranks 2, second. It is the other way for the twin.
    first, second = (comm, twin) if odd else (twin, comm)
    works = [first.all_reduce(ones, async_op=True), second.all_reduce(2 * ones, async_op=True)]
    results = [work.wait() for work in works]
    of_comm, of_twin = results if odd else results[::-1]
    n = comm.size
    assert (of_comm == n // 2 + 2 * ((n + 1) // 2)).all()
    assert (of_twin == 2 * (n // 2) + (n + 1) // 2).all()
    twin.free()


def check_memory_of_freed_communicators_is_used_again(comm):
    if comm.node is None:
        return
    heap = comm.node.arena.heap
    comm.dup().free()
    before = heap.in_use
    for _ in range(5):
        comm.dup().free()
    assert heap.in_use == before


def check_split_refuses(comm):
    for color, key in ((-1, 0), (1.5, 0), (0, "first")):
        with pytest.raises(InvalidArgumentError):
            comm.split(color, key)
    if comm.size > 1:
        with pytest.raises(CollectiveMismatchError, match="expected 0 or more"):
            comm.split(-1 if comm.rank == 0 else 1)
    with pytest.raises(ContextError, match="split or dup"):
        comm.free()


def check_send_and_recv(comm):
    n, rank = comm.size, comm.rank
    if n == 1:
        with pytest.raises(InvalidArgumentError, match="another rank"):
            comm.send(1, 0)
        return
    left, right = (rank - 1) % n, (rank + 1) % n
    for count in (0, 1, 1000, 300_000):
        # All send before they receive, which blocks where a send waits for its receiver.
        work = comm.send({"a": np.arange(count) + rank, "b": np.int8(rank)}, right, async_op=True)
        got = comm.recv({"a": np.empty(count, int), "b": np.empty((), np.int8)}, left)
        work.wait()
        assert (got["a"] == np.arange(count) + left).all() and got["b"] == left
    if rank == 0:
        sent = [(7, 1.0), (8, 2.0), (7, 3.0)]
        for work in [comm.send(np.float64(x), 1, tag=tag, async_op=True) for tag, x in sent]:
            work.wait()
    elif rank == 1:
        later = comm.recv(np.empty(()), 0, tag=8)
        strided = np.zeros(6)
        comm.recv(strided[::6].reshape(()), 0, tag=7)
        assert later == 2.0
        assert comm.recv(np.empty(()), 0, tag=7) == 3.0


def check_recv_tells_what_was_sent(comm):
    if comm.rank == 0 and comm.size > 1:
        comm.send(np.ones((2, 3), np.float32), 1)
        comm.send(np.arange(3), 1)
    elif comm.rank == 1:
        with pytest.raises(InvalidArgumentError, match=r"expected int64\[5\], got float32\[2, 3\]"):
            comm.recv(np.empty(5, np.int64), 0)
        assert comm.recv(np.empty(3, np.int64), 0).tolist() == [0, 1, 2]
    for bad in ({"dest": 0, "tag": -1}, {"dest": 0, "tag": 32704}, {"dest": comm.size}):
        with pytest.raises(InvalidArgumentError, match="expected"):
            comm.send(1, **bad)


def check_an_exchange_does_not_wait_for_a_collective(comm):
    # Rank 1 makes the collective only once it has heard from rank 0, which is in it.
    if comm.size == 1:
        return
    if comm.rank == 0:
        work = comm.all_reduce(np.ones(10), async_op=True)
        comm.send(5, 1)
        assert (work.wait() == comm.size).all()
    else:
        if comm.rank == 1:
            assert comm.recv(np.empty((), np.int32), 0) == 5
        assert (comm.all_reduce(np.ones(10)) == comm.size).all()


def check_indexed_slices(comm):
    n, rank = comm.size, comm.rank
    # Rank r has r rows, of which the first has index 0 everywhere.
    values = np.full((rank, 2), rank, np.float32)
    mine = distrt.IndexedSlices(values, np.arange(rank), dense_shape=(n, 2))
    for op, divisor in (("SUM", 1), ("MEAN", n)):
        for result in (
            comm.all_reduce(mine, op),
            comm.all_reduce(mine, op, async_op=True).wait(),
            comm.all_reduce({"sparse": mine, "dense": np.ones(3)}, op)["sparse"],
        ):
            assert result.indices.tolist() == [i for r in range(n) for i in range(r)]
            rows = np.float32([[r, r] for r in range(n) for _ in range(r)]).reshape(-1, 2)
            assert (result.values == rows / np.float32(divisor)).all()
            assert result.dense_shape == (n, 2)
    both = comm.all_reduce((np.ones(3), mine))
    assert (both[0] == n).all() and both[1].values.shape == (n * (n - 1) // 2, 2)
    for bad in ({"op": "MAX"}, {"out": np.empty(2)}):
        with pytest.raises(InvalidArgumentError, match="IndexedSlices"):
            comm.all_reduce(mine, **bad)
    if n > 1:
        wide = distrt.IndexedSlices(values, np.arange(rank), dense_shape=(n + (rank == 1), 2))
        with pytest.raises(CollectiveMismatchError, match="dense_shape"):
            comm.all_reduce(wide)


BODIES = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_over_threads(body, algorithm, size):
    nodes, settings = [], SMALL._replace(algorithm=algorithm)

    def program(transport):
        node = share(transport, range(size), settings) if algorithm == "auto" else None
        nodes.append(node)
        return body(Communicator(transport, settings, node))

    LoopbackWorld(size).run(program)
    for node in filter(None, nodes):
        node.close()


@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_over_ranks(body, algorithm):
    everyone = distrt.world().communicator
    settings = SMALL._replace(algorithm=algorithm)
    body(Communicator(everyone.transport, settings, everyone.node))


def test_another_thread_may_not_make_a_call_while_one_is_made():
    def body(comm):
        go, errors = threading.Event(), []

        def other():
            go.wait(10)
            try:
                comm.all_reduce(1, async_op=True)
            except ContextError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()

        def action():
            go.set()
            thread.join(10)

        comm.together("waiting", action)
        assert "another thread of rank" in errors[0]
        assert comm.all_reduce(1) == comm.size

    LoopbackWorld(2).run(lambda transport: body(Communicator(transport, SMALL)))


def test_a_call_in_the_background_that_is_given_up_ends_all_later_ones():
    def body(comm):
        if comm.rank == 1:
            time.sleep(1.0)
            return
        work = comm.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(PeerError, match=r"call #1 all_reduce op=SUM float64\[3\]"):
            work.wait()
        with pytest.raises(PeerError, match="given up"):
            comm.all_reduce(np.ones(3))

    for algorithm in ("ring", "auto"):
        settings, nodes = SMALL._replace(timeout_seconds=0.4, algorithm=algorithm), []

        def program(transport, settings=settings, nodes=nodes):
            node = share(transport, range(2), settings) if settings.algorithm == "auto" else None
            nodes.append(node)
            body(Communicator(transport, settings, node))

        LoopbackWorld(2).run(program)
        for node in filter(None, nodes):
            node.close()
