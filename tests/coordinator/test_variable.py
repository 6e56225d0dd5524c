"""Variables on any number of ranks."""

import copy
import pickle

import numpy as np
import pytest

import distrt
from distrt.errors import CollectiveMismatchError, ContextError, InvalidArgumentError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def strategy():
    return distrt.MultiWorkerMirroredStrategy(device="cpu")


def equal_on_all_ranks(strategy, variable):
    return len(set(strategy.communicator.all_gather_object(variable.numpy().tobytes()))) == 1


def test_a_variable_starts_from_rank_0_everywhere(strategy):
    rank = strategy.communicator.rank
    rng = np.random.default_rng(rank)
    with strategy.scope():
        v = distrt.Variable(rng.standard_normal((3, 5)), name="v")
        f = distrt.Variable(lambda: float(rank), dtype=np.float64)
    assert (v.numpy() == np.random.default_rng(0).standard_normal((3, 5))).all()
    assert f.dtype == np.float64 and float(f) == 0.0
    # A variable that one rank makes for itself shifts nobody's default names.
    if rank == 0:
        distrt.Variable(0.0)
    with strategy.scope():
        unnamed = [distrt.Variable(0.0).name for _ in range(2)]
    assert len(set(unnamed)) == 2 and f.name not in unnamed
    assert strategy.communicator.all_gather_object(unnamed) == [unnamed] * (
        strategy.num_replicas_in_sync
    )
    assert v.shape == (3, 5) and v.dtype == np.float64 and v.trainable and v.strategy is strategy


def test_outside_a_scope_a_variable_is_this_process_own(strategy):
    v = distrt.Variable(float(strategy.communicator.rank))
    assert float(v) == strategy.communicator.rank and v.dtype == np.float32


def test_different_shapes_raise_on_every_rank(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("needs two ranks to differ")
    with (
        strategy.scope(),
        pytest.raises(CollectiveMismatchError, match=r"ranks? 0.*: .*float32\[2\]"),
    ):
        distrt.Variable(np.zeros(2 + (strategy.communicator.rank == 1), np.float32))


def test_types_of_python_numbers_and_copies():
    array = np.zeros(3)
    v = distrt.Variable(array, name="v")
    v.assign_add(np.ones(3))
    assert (array == 0).all() and (v.numpy() == 1).all()
    assert distrt.Variable(1).dtype == np.int32
    assert distrt.Variable([1.0, 2.0]).dtype == np.float32
    assert distrt.Variable(np.asfortranarray(np.ones((2, 3)))).value.flags.c_contiguous


def test_assign(strategy):
    with strategy.scope():
        v = distrt.Variable(np.zeros(2, np.float32), name="v")
    assert v.assign([1.0, 2.0]) is v
    v.assign_add(np.array([1, 1])).assign_sub([0.5, 0.5])
    assert (v.numpy() == [1.5, 2.5]).all() and v.dtype == np.float32
    kept = v.read_value()
    v.assign([0.0, 0.0])
    assert (kept == [1.5, 2.5]).all()
    with pytest.raises(
        InvalidArgumentError, match=r"v: expected a value of shape \(2,\), got \(3,\)"
    ):
        v.assign(np.zeros(3))


@pytest.mark.parametrize("aggregation", list(distrt.VariableAggregation))
def test_assign_in_run_aggregates(strategy, aggregation):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = distrt.Variable(np.float64(10), aggregation=aggregation, name="v")

    def replica():
        mine = np.float64(distrt.get_replica_context().replica_id_in_sync_group + 1)
        return v.assign_add(mine)

    strategy.run(replica)
    expected = {
        "NONE": 11 + strategy.communicator.rank,
        "SUM": 10 + n * (n + 1) / 2,
        "MEAN": 10 + (n + 1) / 2,
        "ONLY_FIRST_REPLICA": 11,
    }
    assert float(v) == expected[aggregation.name]
    if aggregation is not distrt.VariableAggregation.NONE:
        assert equal_on_all_ranks(strategy, v)


def test_aggregations_that_make_no_sense_are_refused_at_once():
    with pytest.raises(InvalidArgumentError, match="mean"):
        distrt.Variable(1, aggregation=distrt.VariableAggregation.MEAN)
    with pytest.raises(InvalidArgumentError, match="VariableAggregation"):
        distrt.Variable(1.0, aggregation="SUM")


def test_a_variable_is_used_like_its_array():
    v = distrt.Variable(np.array([[1.0, 2.0], [3.0, 4.0]]), name="v")
    w = distrt.Variable(np.array([10.0, 20.0]), name="w")
    assert ((v + 1) == v.value + 1).all() and ((1 - v) == 1 - v.value).all()
    assert ((v @ w) == v.value @ w.value).all()
    assert ((np.ones(2) @ v) == np.ones(2) @ v.value).all()
    assert (np.exp(v) == np.exp(v.value)).all() and (v > 2).sum() == 2
    assert (np.concatenate([v, v]) == np.concatenate([v.value, v.value])).all()
    assert np.asarray(v).dtype == np.float64 and len(v) == 2
    assert (v[0] == [1.0, 2.0]).all()
    assert distrt.array_namespace(v).__name__.startswith("array_api_compat.numpy")
    with pytest.raises(InvalidArgumentError, match="assign"):
        np.add(v, 1, out=v)


def test_copies_and_pickles_are_refused():
    v = distrt.Variable(1.0, name="mine")
    for action in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ContextError, match="mine cannot be"):
            action(v)
    with pytest.raises(TypeError):
        hash(v)
