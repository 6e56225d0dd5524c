"""The optimizer steps against NumPy, by ``==``, and against Keras's formulas by hand."""

import numpy as np
import pytest

from distrt.arrays import DTYPES, to_numpy
from distrt.kernels.reference import ReferenceKernels
from tests.kernels.samples import OFFSETS, SIZES, place, same, sample, untouched

REFERENCE = ReferenceKernels()
SGD = {"lr": 0.1, "momentum": 0.9}
ADAM = {"alpha": 0.00316, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7}

floats = pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])


def compare(kernels, arrays, step):
    """Run ``step(kernels, arrays)`` on both and compare all arrays; the first is the gradient."""
    expected = [array.copy() for array in arrays]
    step(REFERENCE, expected)
    for offsets in OFFSETS:
        placed = [place(kernels, a, at) for a, at in zip(arrays, offsets, strict=False)]
        step(kernels, [view for view, _ in placed])
        for (view, block), wanted in zip(placed, expected, strict=True):
            assert same(view, wanted), (arrays[0].size, offsets)
            assert untouched(view, block), (arrays[0].size, offsets)


def arrays_of(name, size, count):
    return [sample(DTYPES[name].numpy, size, 10 * size + i) for i in range(count)]


@floats
def test_sgd_without_momentum(kernels, name):
    for size in SIZES:
        compare(
            kernels,
            arrays_of(name, size, 2),
            lambda k, a: k.sgd(a[1], a[0], None, **SGD, nesterov=False),
        )


@floats
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_momentum(kernels, name, nesterov):
    for size in SIZES:
        compare(
            kernels,
            arrays_of(name, size, 3),
            lambda k, a: k.sgd(a[1], a[0], a[2], **SGD, nesterov=nesterov),
        )


@floats
def test_adam(kernels, name):
    for size in SIZES:
        compare(
            kernels, arrays_of(name, size, 4), lambda k, a: k.adam(a[1], a[0], a[2], a[3], **ADAM)
        )


def test_sgd_by_hand(kernels):
    step = {"lr": 0.5, "momentum": 0.25}
    grad, _ = place(kernels, np.float32([8] * 5), 0)
    for nesterov, expected in ((False, 17.0), (True, 15.25)):
        param, _ = place(kernels, np.float32([20] * 5), 0)
        velocity, _ = place(kernels, np.float32([4] * 5), 0)
        kernels.sgd(param, grad, velocity, **step, nesterov=nesterov)
        # v = 0.25 * 4 - 8 * 0.5 = -3; then 20 - 3, or 20 + (0.25 * -3 - 4).
        assert to_numpy(velocity).tolist() == [-3.0] * 5
        assert to_numpy(param).tolist() == [expected] * 5
    kernels.sgd(param, grad, None, **step, nesterov=False)
    assert to_numpy(param).tolist() == [15.25 - 4] * 5


def test_adam_by_hand(kernels):
    ones = np.ones(5)
    param, grad, m, v = (place(kernels, ones * x, 0)[0] for x in (10.0, 4.0, 2.0, 16.0))
    kernels.adam(param, grad, m, v, alpha=0.5, beta1=0.5, beta2=0.75, epsilon=2.0)
    # m = 2 + (4 - 2) * 0.5 = 3; v = 16 + (16 - 16) * 0.25; 10 - 3 * 0.5 / (4 + 2).
    assert to_numpy(m).tolist() == [3.0] * 5
    assert to_numpy(v).tolist() == [16.0] * 5
    assert to_numpy(param).tolist() == [9.75] * 5
