"""Distributed datasets on real ranks, against the recorded splits of tf.distribute."""

import numpy as np
import pytest

import distrt
from distrt.errors import InvalidArgumentError
from tests.data_pipeline.test_data_recorded import RANGES

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def strategy():
    return distrt.MirroredStrategy(device="cpu")


def test_ranges_split_as_recorded(strategy):
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    cases = [case for case in RANGES.values() if case["in"]["replicas"] == n]
    assert len(cases) > 200
    for case in cases[::3]:
        given = case["in"]
        dataset = distrt.data.Dataset.range(given["size"]).batch(
            given["global_batch"], given["drop_remainder"]
        )
        parts = [p.tolist() for p in strategy.experimental_distribute_dataset(dataset)]
        assert parts == [step[rank] for step in case["out"]["steps"]], case["id"]


def test_unseeded_shuffles_agree_over_the_ranks(strategy):
    dataset = distrt.data.Dataset.range(101).shuffle(101).batch(8)
    distributed = strategy.experimental_distribute_dataset(dataset)
    orders = []
    for _ in range(2):
        mine = np.concatenate(list(distributed))
        everyone = strategy.gather(mine, axis=0)
        assert sorted(everyone.tolist()) == list(range(101))
        orders.append(everyone.tolist())
    assert orders[0] != orders[1]


def test_empty_parts_keep_dtype_and_shape_and_take_the_same_steps(strategy):
    n = strategy.num_replicas_in_sync
    images = np.ones((37, 28, 28), np.float32)
    dataset = distrt.data.Dataset.from_tensor_slices(images).batch(4 * n + 1).prefetch(2)
    total = 0.0
    for part in strategy.experimental_distribute_dataset(dataset):
        assert part.dtype == np.float32 and part.shape[1:] == (28, 28)
        total += float(strategy.reduce("SUM", part.sum(dtype=np.float64)))
    assert total == images.size
    (part,) = strategy.experimental_distribute_dataset(
        distrt.data.Dataset.from_tensor_slices(images[:1]).batch(8)
    )
    assert part.shape == ((1, 28, 28) if strategy.communicator.rank == 0 else (0, 28, 28))


def test_a_break_on_all_ranks_or_on_one_leaves_nobody_waiting(strategy):
    dataset = distrt.data.Dataset.range(64).batch(8).prefetch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for step, _ in enumerate(distributed):
        if step == 2 or strategy.communicator.rank == 0:
            break
    assert len(list(distributed)) == len(distributed) == 8
    assert float(strategy.reduce("SUM", 1.0)) == strategy.num_replicas_in_sync


def test_ranks_with_other_pipelines_raise_the_same_error(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("needs two ranks to differ")
    size = 8 + (strategy.communicator.rank == 1)
    with pytest.raises(InvalidArgumentError, match=r"(?s)different datasets.*ranks? 0.*rank 1"):
        strategy.experimental_distribute_dataset(distrt.data.Dataset.range(size).batch(4))


def test_strings_stay_on_the_host(strategy):
    words = np.array(["a", "b", "c", "d", "e"])
    dataset = distrt.data.Dataset.from_tensor_slices(words).batch(5)
    (part,) = strategy.experimental_distribute_dataset(dataset)
    share = -(-5 // strategy.num_replicas_in_sync)
    rank = strategy.communicator.rank
    assert part.tolist() == words.tolist()[rank * share : (rank + 1) * share]
