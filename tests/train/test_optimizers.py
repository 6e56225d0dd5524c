"""Optimizers against Keras 3 on TensorFlow 2.21 (tests/data/07_optimizers.json), on any ranks."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import distrt
from distrt.errors import (
    CollectiveMismatchError,
    ContextError,
    DTypeError,
    InvalidArgumentError,
)
from distrt.train import SGD, Adam
from distrt.train.bucket import plan

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "07_optimizers.json").read_text())

# Keras keeps hyperparameters as float32 variables.
LR = float(np.float32(0.1))
LR_ADAM = float(np.float32(0.01))
MOMENTUM = float(np.float32(0.9))
OPTIMIZERS = {
    "sgd": lambda: SGD(LR),
    "sgd_momentum": lambda: SGD(LR, momentum=MOMENTUM),
    "sgd_nesterov": lambda: SGD(LR, momentum=MOMENTUM, nesterov=True),
    "adam": lambda: Adam(LR_ADAM),
    "adam_eps": lambda: Adam(LR_ADAM, epsilon=1e-8),
}


@pytest.fixture(scope="module")
def strategy():
    return distrt.MirroredStrategy(device="cpu")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [1, 32, 1 << 20])
def test_trajectories_are_those_of_keras(strategy, name, bucket_bytes):
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    recorded = RECORDED.get(f"{name}_n{n}")
    if recorded is None:
        pytest.skip(f"{name} was not recorded with {n} replica(s)")
    with strategy.scope():
        w = distrt.Variable(np.array([1.0, -2.0, 3.0]), name="w")
        b = distrt.Variable(np.array([0.5]), name="b")
    optimizer = OPTIMIZERS[name]()
    optimizer._bucket_bytes = bucket_bytes

    def step(k):
        gw = np.array([(rank + 1) * 0.1, -0.2 * (rank + 1) * (k + 1), 0.3])
        optimizer.apply_gradients([(gw, w), (np.array([rank - 0.5]), b)])

    for k, expected in enumerate(recorded):
        strategy.run(step, args=(k,))
        np.testing.assert_allclose(w.numpy(), expected["w"], rtol=1e-14)
        np.testing.assert_allclose(b.numpy(), expected["b"], rtol=1e-14)
    assert optimizer.iterations == len(recorded)


@pytest.mark.parametrize("compression", ["bfloat16", "float16"])
def test_compressed_gradients_lose_nothing_in_the_long_run(strategy, compression):
    # 1 + 2^-12 is no half of either kind; what is rounded away comes with a later step.
    n, steps, gradient = strategy.num_replicas_in_sync, 64, 1 + 2.0**-12
    with strategy.scope():
        v = distrt.Variable(np.zeros(5, np.float32), name="v")
        exact = distrt.Variable(np.zeros(5, np.float64), name="exact")
    sgd = SGD(1.0, compression=compression)
    for _ in range(steps):
        pairs = [(np.full(5, gradient, w.dtype), w) for w in (v, exact)]
        strategy.run(sgd.apply_gradients, args=(pairs,))
    # Only float32 travels as halves; a rank alone sends nothing.
    assert (exact.numpy() == -n * steps * gradient).all()
    off = np.abs(v.numpy() + n * steps * gradient)
    assert (off <= (0 if n == 1 else 2 * n * 2.0**-8)).all()
    assert n == 1 or len(sgd._compressor.residuals) == 2


def test_gradients_are_summed_and_none_is_skipped(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = distrt.Variable(np.zeros(3, np.float32), name="v")
        idle = distrt.Variable(np.zeros(2, np.float32), name="idle")
    sgd = SGD(1.0)
    strategy.run(lambda: sgd.apply_gradients([(np.ones(3), v), (None, idle)]))
    assert (v.numpy() == -n).all() and (idle.numpy() == 0).all()
    with pytest.raises(InvalidArgumentError, match="no gradient"):
        strategy.run(lambda: sgd.apply_gradients([(None, v)]))
    with pytest.raises(InvalidArgumentError, match=r"gradient of v: expected shape \(3,\)"):
        strategy.run(lambda: sgd.apply_gradients([(np.ones(2), v)]))
    with strategy.scope():
        twin = distrt.Variable(np.zeros(1, np.float32), name="v")
    with pytest.raises(InvalidArgumentError, match="two variables are called 'v'"):
        strategy.run(lambda: sgd.apply_gradients([(np.ones(1), twin)]))


def test_gradients_of_several_replicas_must_be_applied_in_run(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica sums nothing")
    with strategy.scope():
        v = distrt.Variable(np.zeros(3, np.float32), name="v")
    with pytest.raises(ContextError, match=r"inside strategy\.run"):
        SGD().apply_gradients([(np.ones(3), v)])


def test_a_variable_of_another_strategy_is_refused(strategy):
    alone = distrt.Variable(np.zeros(2), name="forgot the scope")
    with strategy.scope():
        v = distrt.Variable(np.zeros(2), name="v")
    pairs = [(np.ones(2), alone), (np.ones(2), v)]
    with pytest.raises(ContextError, match=r"(?s)forgot the scope belongs to.*strategy\.scope"):
        strategy.run(lambda: SGD().apply_gradients(pairs))
    one = distrt.OneDeviceStrategy("/cpu:0")
    with pytest.raises(ContextError, match=r"v belongs to"):
        one.run(lambda: SGD().apply_gradients([(np.ones(2), v)]))
    with one.scope():
        w = distrt.Variable(np.zeros(2), name="w")
    with pytest.raises(InvalidArgumentError, match=r"variables of 2 strategies"):
        SGD().apply_gradients([(np.ones(2), alone), (np.ones(2), w)])


def test_only_float_variables_and_gradients(strategy):
    with strategy.scope():
        whole = distrt.Variable(np.zeros(2, np.int32), name="whole")
        v = distrt.Variable(np.zeros(2, np.float16), name="v")
    sgd = SGD(1.0)
    with pytest.raises(DTypeError, match="whole is int32"):
        strategy.run(lambda: sgd.apply_gradients([(np.ones(2), whole)]))
    with pytest.raises(DTypeError, match="gradient of v: expected a float dtype, got complex64"):
        strategy.run(lambda: sgd.apply_gradients([(np.ones(2, np.complex64), v)]))
    assert sgd.iterations == 0
    strategy.run(lambda: sgd.apply_gradients([(np.ones(2, ml_dtypes.bfloat16), v)]))
    assert (v.numpy() == -strategy.num_replicas_in_sync).all()


def test_a_gradient_missing_on_one_rank_is_named_on_all(strategy):
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    if n == 1:
        pytest.skip("needs two ranks to differ")
    with strategy.scope():
        a = distrt.Variable(np.zeros(3, np.float32), name="alpha")
        b = distrt.Variable(np.zeros(3, np.float32), name="beta")
    gradient = None if rank == n - 1 else np.ones(3)
    with pytest.raises(CollectiveMismatchError, match=r"(?s)beta alpha.*rank \d: .*'alpha'"):
        strategy.run(lambda: SGD().apply_gradients([(np.ones(3), a), (gradient, b)]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_variables_stay_equal_to_the_bit(strategy, dtype):
    rng = np.random.default_rng(strategy.communicator.rank)
    with strategy.scope():
        shapes = [(7, 5), (), (64,), (3, 0), (101,)]
        variables = [distrt.Variable(np.ones(s, dtype), name=f"v{i}") for i, s in enumerate(shapes)]
    adam = Adam(0.01, bucket_bytes=64)
    for _ in range(5):
        grads = [np.asarray(rng.standard_normal(v.shape)).astype(dtype) for v in variables]
        strategy.run(lambda grads=grads: adam.apply_gradients(zip(grads, variables, strict=True)))
    bits = b"".join(v.numpy().tobytes() for v in variables)
    assert len(set(strategy.communicator.all_gather_object(bits))) == 1
    assert not (variables[0].numpy() == 1).all()


def test_hyperparameters_are_checked():
    with pytest.raises(InvalidArgumentError, match="momentum=2"):
        SGD(momentum=2)
    with pytest.raises(InvalidArgumentError, match=r"beta_2=1\.0"):
        Adam(beta_2=1.0)


def test_plan_fuses_by_dtype_in_reverse_order_and_keeps_the_limit():
    f4, f8 = np.dtype(np.float32), np.dtype(np.float64)
    shapes = [(2, 2), (3,), (5,), (), (1000,), (0,)]
    dtypes = [f4, f8, f4, f4, f4, f4]
    buckets = plan(shapes, dtypes, 40)
    assert sorted(m for b in buckets for m in b.members) == list(range(6))
    by_first = {b.members[0]: b for b in buckets}
    assert by_first[5].members == (5,) and by_first[4].members == (4,) and by_first[4].size == 1000
    assert by_first[3].members == (3, 2, 0) and by_first[3].offsets == (0, 1, 6)
    assert by_first[1].dtype == f8
    for bucket in buckets:
        assert len(bucket.members) == 1 or bucket.size * bucket.dtype.itemsize <= 40
    (one,) = plan(shapes, [f4] * 6, 1 << 20)
    assert one.members == (5, 4, 3, 2, 1, 0) and one.size == 1013
