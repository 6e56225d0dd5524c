"""The conversions of the half types, over all their bit patterns, bit for bit."""

import numpy as np
import pytest

from distrt.arrays import DTYPES, to_numpy
from distrt.reduce_op import ReduceOp
from tests.kernels.samples import bits_of, place

ALL = np.arange(2**16, dtype=np.uint16)

halves = pytest.mark.parametrize("name", ["f16", "bf16"])


def narrow(kernels, row, values):
    """Round float32 ``values``: adding -0.0 changes none of them, not even -0.0."""
    minus_zero, _ = place(kernels, np.full(values.size, -0.0, row.numpy), 0)
    partial, _ = place(kernels, values, 0)
    kernels.finish(ReduceOp.SUM, row, minus_zero, partial, minus_zero)
    return to_numpy(minus_zero)


def widened(kernels, row):
    local, _ = place(kernels, ALL.view(row.numpy), 0)
    out = kernels.empty(ALL.size, np.dtype(np.float32))
    kernels.widen(row, out, local)
    return to_numpy(out)


@halves
def test_widening_every_half(kernels, name):
    row = DTYPES[name]
    got, expected = widened(kernels, row), ALL.view(row.numpy).astype(np.float32)
    number = ~np.isnan(expected)
    assert np.array_equal(bits_of(got)[number], bits_of(expected)[number])
    assert np.isnan(got[~number]).all()


@halves
def test_every_half_survives_the_round_trip(kernels, name):
    row = DTYPES[name]
    wide = widened(kernels, row)
    back = narrow(kernels, row, wide)
    number = ~np.isnan(wide)
    assert np.array_equal(bits_of(back)[number], ALL[number])
    assert (back[~number] != back[~number]).all()


@halves
def test_rounding_between_every_two_halves(kernels, name):
    """Half-way points, their float32 neighbours and a million other floats round as NumPy does."""
    row = DTYPES[name]
    with np.errstate(all="ignore"):
        numbers = ALL.view(row.numpy).astype(np.float64)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middle = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, -np.float32(np.inf))
    rng = np.random.default_rng(7)
    anything = np.frombuffer(rng.bytes(4 << 20), np.float32)
    # Beyond the greatest half: where rounding must give infinity, and just not yet.
    edges = np.float32([65504, 65519.996, 65520, 65536, 3.3895314e38, 3.4028235e38, np.inf])
    values = np.concatenate([middle, up, down, anything, edges, -edges])
    got = narrow(kernels, row, values)
    with np.errstate(all="ignore"):
        expected = values.astype(row.numpy)
    number = ~np.isnan(values)
    assert np.array_equal(bits_of(got)[number], bits_of(expected)[number])
    assert (got[~number] != got[~number]).all()
