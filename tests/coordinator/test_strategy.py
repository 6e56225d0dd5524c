"""Strategies on any number of ranks (plain pytest is one rank; mpirun gives 2, 3, 4)."""

import threading

import numpy as np
import pytest

import distrt
from distrt.errors import ContextError, DeviceError, InvalidArgumentError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def strategy():
    return distrt.MirroredStrategy(device="cpu")


def equal(array, expected, dtype):
    assert array.dtype == dtype
    assert array.shape == np.shape(expected)
    assert (array == np.asarray(expected)).all(), (array, expected)


# ------------------------------------------------------------------- contexts


def where():
    return (
        distrt.has_strategy(),
        distrt.get_strategy(),
        distrt.get_replica_context(),
        distrt.in_cross_replica_context(),
    )


def test_outside_every_scope_there_is_a_default_strategy():
    has, default, context, cross = where()
    assert not has and not cross
    assert default.num_replicas_in_sync == 1
    assert context.replica_id_in_sync_group == 0 and context.strategy is default
    assert distrt.get_strategy() is default
    equal(default.reduce("SUM", np.float64(3)), 3.0, np.float64)


def test_in_a_scope_and_in_run(strategy):
    with strategy.scope() as entered:
        assert entered is strategy
        assert where() == (True, strategy, None, True)
        with strategy.scope():
            assert where() == (True, strategy, None, True)
        has, current, context, cross = strategy.run(where)
        assert has and current is strategy and not cross
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        assert context.replica_id_in_sync_group == strategy.communicator.rank
        assert where() == (True, strategy, None, True)
    assert not distrt.has_strategy()


def test_contexts_are_kept_per_thread(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(distrt.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_scopes_of_different_strategies_do_not_nest(strategy):
    other = distrt.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        with pytest.raises(ContextError, match="MirroredStrategy is active"), other.scope():
            pass
        with pytest.raises(RuntimeError, match="MirroredStrategy is active"):
            other.run(lambda: None)
        assert distrt.get_strategy() is strategy
    with pytest.raises(ContextError, match="inside run"):
        strategy.run(lambda: strategy.run(lambda: None))
    used = strategy.scope()
    with used:
        pass
    with pytest.raises(ContextError, match="entered before"), used:
        pass
    assert not distrt.has_strategy()


def test_an_exception_in_run_comes_out_with_its_traceback(strategy):
    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        strategy.run(fails)
    assert caught.traceback[-1].name == "fails"
    assert not distrt.has_strategy()


def test_run_passes_arguments_and_results(strategy):
    value = {"a": np.ones(2)}
    result = strategy.run(lambda x, y=0: (x, y, None), args=(value,), kwargs={"y": 5})
    assert result[0] is value and result[1:] == (5, None)
    assert strategy.experimental_local_results(value) == (value,)
    for bad in (None, 3, np.ones(2)):
        with pytest.raises(ValueError, match="args must be a tuple"):
            strategy.run(lambda x: x, args=bad)


# ------------------------------------------------------------ reduce and gather


def test_reduce_without_an_axis(strategy):
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync
    ids = range(n)
    for op, fold in (("SUM", sum), ("MIN", min), ("MAX", max)):
        equal(strategy.reduce(op, np.float32(rank), axis=None), fold(ids), np.float32)
    equal(strategy.reduce("mean", np.float64(rank), axis=None), (n - 1) / 2, np.float64)
    equal(
        strategy.reduce(distrt.ReduceOp.PROD, np.int64(rank + 2)),
        np.prod([r + 2 for r in ids]),
        np.int64,
    )
    # Python numbers are typed as TensorFlow types them.
    equal(strategy.reduce("SUM", 1.5), 1.5 * n, np.float32)
    equal(strategy.reduce("SUM", 3), 3 * n, np.int32)
    both = strategy.reduce("SUM", {"b": np.ones(2, np.float32), "a": (rank,)})
    equal(both["b"], [n, n], np.float32)
    equal(both["a"][0], sum(ids), np.int32)


def test_reduce_along_an_axis_counts_every_element_once(strategy):
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync
    mine = np.arange(rank + 1, dtype=np.float32)
    everything = np.concatenate([np.arange(r + 1) for r in range(n)])
    equal(strategy.reduce("SUM", mine, axis=0), everything.sum(), np.float32)
    equal(strategy.reduce("MAX", mine, axis=0), everything.max(), np.float32)
    mean = strategy.reduce("MEAN", mine, axis=0)
    equal(mean, np.float32(everything.sum() / everything.size), np.float32)
    table = np.full((rank, 3), rank, np.int32)
    equal(strategy.reduce("SUM", table, axis=0), [sum(r * r for r in range(n))] * 3, np.int32)
    rows = sum(range(n))
    if rows:
        mean = strategy.reduce("MEAN", table, axis=-2)
        equal(mean, [sum(r * r for r in range(n)) / rows] * 3, np.float64)
        lowest = strategy.reduce("MIN", table, axis=0)
        equal(lowest, [min(range(1, n))] * 3, np.int32)
    equal(strategy.reduce("SUM", np.ones((2, 3), np.float64), axis=(0, 1)), 6 * n, np.float64)
    assert np.isnan(strategy.reduce("MEAN", np.ones(0, np.float32), axis=0))
    equal(strategy.reduce("SUM", np.ones(3), axis=np.int64(0)), 3.0 * n, np.float64)
    for axis, value in ((0, np.float32(1)), (1, mine), (-2, mine)):
        with pytest.raises(InvalidArgumentError, match="along axis"):
            strategy.reduce("SUM", value, axis=axis)


def test_the_loss_of_unequal_parts_is_right(strategy):
    # 5 examples on n ranks: the sum over the global batch size, not a mean of means.
    losses = np.array([1, 2, 3, 4, 5], np.float64)
    dataset = distrt.data.Dataset.from_tensor_slices(losses).batch(5)
    (part,) = strategy.experimental_distribute_dataset(dataset)
    equal(strategy.reduce("SUM", part.sum() / 5), 3.0, np.float64)
    equal(strategy.reduce("MEAN", part, axis=0), 3.0, np.float64)


def test_gather(strategy):
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync
    mine = np.arange(rank + 1, dtype=np.float32)
    everything = np.concatenate([np.arange(r + 1) for r in range(n)])
    equal(strategy.gather(mine, axis=0), everything, np.float32)


def test_collectives_of_the_replica_context(strategy):
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync

    def replica():
        context = distrt.get_replica_context()
        total = context.all_reduce("SUM", np.float32(context.replica_id_in_sync_group))
        parts = context.all_gather(np.full((1, 2), rank, np.int64), axis=1)
        with pytest.raises(ContextError, match=r"get_replica_context\(\).all_reduce"):
            strategy.reduce("SUM", 1.0)
        return total, parts

    total, parts = strategy.run(replica)
    equal(total, sum(range(n)), np.float32)
    equal(parts, [np.repeat(range(n), 2)], np.int64)


# ------------------------------------------------------------------- creation


def test_devices_must_fit_the_world(strategy):
    n = strategy.num_replicas_in_sync
    names = [f"/cpu:{i}" for i in range(n)]
    assert distrt.MirroredStrategy(names).num_replicas_in_sync == n
    with pytest.raises(InvalidArgumentError, match=rf"names {n + 1} devices for {n} rank"):
        distrt.MirroredStrategy([*names, "/cpu:9"])
    with pytest.raises(InvalidArgumentError, match="expected a list"):
        distrt.MirroredStrategy("/cpu:0")
    with pytest.raises(InvalidArgumentError, match=r"expected|unknown"):
        distrt.MirroredStrategy([f"/tpu:{i}" for i in range(n)])
    with pytest.raises(InvalidArgumentError, match="'fast'"):
        distrt.MultiWorkerMirroredStrategy(device="fast")


def test_asking_for_a_gpu_where_there_is_none(strategy):
    from distrt.cluster.device import visible_devices

    if visible_devices():
        pytest.skip("this machine has a GPU")
    n = strategy.num_replicas_in_sync
    with pytest.raises(DeviceError, match=r"see none"):
        distrt.MultiWorkerMirroredStrategy(device="gpu")
    with pytest.raises(DeviceError, match=r"sees 0 GPU"):
        distrt.MirroredStrategy([f"/gpu:{i}" for i in range(n)])
    with pytest.raises(DeviceError, match=r"sees 0 GPU"):
        distrt.OneDeviceStrategy("/gpu:0")


def test_one_device_strategy_is_one_replica():
    one = distrt.OneDeviceStrategy("/cpu:0")
    assert one.num_replicas_in_sync == 1
    equal(one.reduce("SUM", np.float32(2)), 2.0, np.float32)
    with one.scope():
        own = distrt.Variable(np.float32(distrt.world().topology.rank), name="own")
    assert float(own) == distrt.world().topology.rank
    assert "OneDeviceStrategy replica 0 of 1 on /cpu:0" in repr(one)
