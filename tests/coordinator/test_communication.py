"""CommunicationOptions: what they change, and what is refused, on any ranks."""

import numpy as np
import pytest

import distrt
from distrt import CommunicationImplementation, CommunicationOptions
from distrt.errors import CollectiveMismatchError, InvalidArgumentError
from distrt.train import SGD

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def strategy(*args, **options):
    return distrt.MultiWorkerMirroredStrategy(CommunicationOptions(*args, **options), device="cpu")


def test_no_options_are_the_worlds_communicator():
    everyone = distrt.world().communicator
    assert strategy().communicator is everyone
    assert distrt.MultiWorkerMirroredStrategy(device="cpu").communicator is everyone


@pytest.mark.parametrize("implementation", [CommunicationImplementation.RING, "ring", "RING"])
def test_the_ring_is_taken(implementation):
    made = strategy(implementation=implementation)
    comm = made.communicator
    if comm.size > 1:
        assert comm.algorithm_for("all_reduce") == "ring"
        assert distrt.world().communicator.algorithm_for("all_reduce") == "direct"
    total = made.run(lambda: distrt.get_replica_context().all_reduce("SUM", np.ones(1000)))
    assert (total == comm.size).all()
    comm.free()


def test_bytes_per_pack_are_the_buckets_and_the_deadline_is_kept():
    made = strategy(bytes_per_pack=16, timeout_seconds=77)
    with made.scope():
        variables = [distrt.Variable(np.zeros(3, np.float32), name=f"v{k}") for k in range(4)]
    own, given = SGD(1.0), SGD(1.0, bucket_bytes=1 << 20)
    for sgd in (own, given):
        made.run(lambda sgd=sgd: sgd.apply_gradients([(np.ones(3), v) for v in variables]))
    assert [len(b.buckets) for b in own._buckets.values()] == [4]
    assert [len(b.buckets) for b in given._buckets.values()] == [1]
    assert all((v.numpy() == -2 * made.num_replicas_in_sync).all() for v in variables)
    assert made.communicator.transport.timeout_seconds == 77
    assert distrt.world().communicator.transport.timeout_seconds != 77
    made.communicator.free()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack=-1"),
        ({"bytes_per_pack": 1.5}, "bytes_per_pack=1.5"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"implementation": CommunicationImplementation.NCCL}, "need no NCCL"),
        ({"implementation": "nccl"}, "need no NCCL"),
        ({"implementation": "tree"}, "unknown algorithm 'tree'"),
        ({"implementation": 3}, "implementation=3"),
    ],
)
def test_what_cannot_be_taken_is_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        strategy(**options)


def test_options_that_differ_are_told_to_every_rank():
    rank, size = distrt.world().communicator.rank, distrt.world().communicator.size
    if size > 1:
        with pytest.raises(CollectiveMismatchError, match="bytes_per_pack"):
            strategy(bytes_per_pack=1000 + rank)
    with pytest.raises(InvalidArgumentError, match="expected CommunicationOptions"):
        distrt.MultiWorkerMirroredStrategy("ring", device="cpu")


def test_options_of_one_call():
    made = distrt.MultiWorkerMirroredStrategy(device="cpu")
    n, rank = made.num_replicas_in_sync, made.communicator.rank

    def reduced(value, **options):
        context = distrt.get_replica_context()
        return context.all_reduce("SUM", value, CommunicationOptions(**options))

    # Recorded: rctx_all_reduce_kwargs_n1, _n2, _n4.
    assert made.run(reduced, (np.float32(rank + 1),), {"bytes_per_pack": 1}) == n * (n + 1) // 2
    ring = made.run(reduced, (np.ones(100),), {"implementation": "ring", "timeout_seconds": 50})
    assert (ring == n).all()
    assert made.communicator.transport.timeout_seconds != 50
    if n > 1:
        with pytest.raises(CollectiveMismatchError, match="implementation='ring'"):
            made.run(reduced, (1,), {"implementation": "ring" if rank else "auto"})
    assert made.run(reduced, (1,)) == n
