"""The conversions of the half types, over all their bit patterns, bit for bit."""

import numpy as np
import pytest

from distrt.arrays import DTYPES, to_numpy
from distrt.reduce_op import ReduceOp
from tests.kernels.samples import bits_of, place

ALL = np.arange(2**16, dtype=np.uint16)

halves = pytest.mark.parametrize("name", ["f16", "bf16"])


# Whole, all but the first of a vector, and so short that no vector is ever filled.
lengths = pytest.mark.parametrize("length", [ALL.size, ALL.size - 1, 7])


def narrow(kernels, row, values, length, op=ReduceOp.SUM, neutral=-0.0):
    """Round float32 ``values``, ``length`` at a time: -0.0 added to any of them, even to -0.0,
    changes nothing."""
    local, _ = place(kernels, np.full(values.size, neutral, row.numpy), 0)
    partial, _ = place(kernels, values, 0)
    for start in range(0, values.size, length):
        part = slice(start, start + length)
        kernels.finish(op, row, local[part], partial[part], local[part])
    return to_numpy(local)


def widened(kernels, row, length):
    local, _ = place(kernels, ALL.view(row.numpy), 0)
    out = kernels.empty(ALL.size, np.dtype(np.float32))
    for start in range(0, ALL.size, length):
        part = slice(start, start + length)
        kernels.widen(row, out[part], local[part])
    return to_numpy(out)


@lengths
@halves
def test_widening_every_half(kernels, name, length):
    row = DTYPES[name]
    got, expected = widened(kernels, row, length), ALL.view(row.numpy).astype(np.float32)
    number = ~np.isnan(expected)
    assert np.array_equal(bits_of(got)[number], bits_of(expected)[number])
    # The sign and the payload stay; float16 comes out quiet, bfloat16 as it is.
    sign = (ALL & 0x8000).astype(np.uint32) << 16
    payload = (ALL & 0x3FF).astype(np.uint32) << 13
    nans = sign | 0x7FC00000 | payload if name == "f16" else ALL.astype(np.uint32) << 16
    assert np.array_equal(bits_of(got)[~number], nans[~number])


@lengths
@halves
def test_every_half_survives_the_round_trip(kernels, name, length):
    row = DTYPES[name]
    wide = widened(kernels, row, length)
    back = narrow(kernels, row, wide, length)
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
    got = narrow(kernels, row, values, values.size)
    with np.errstate(all="ignore"):
        expected = values.astype(row.numpy)
    number = ~np.isnan(values)
    assert np.array_equal(bits_of(got)[number], bits_of(expected)[number])
    assert (got[~number] != got[~number]).all()


@lengths
@halves
def test_a_nan_that_is_rounded_keeps_its_upper_bits_and_is_quiet(kernels, name, length):
    """Every upper half of a float32 NaN, and payloads that are all in the lower half."""
    upper = ALL.astype(np.uint32) << 16
    lower = np.uint32([0, 1, 0x2000, 0xFFFF])[ALL % 4]
    bits = upper | lower
    values = bits[(bits & 0x7FFFFFFF) > 0x7F800000].view(np.float32)
    # Unlike a sum, the greater of a NaN and -inf is that very NaN.
    got = narrow(kernels, DTYPES[name], values, length, ReduceOp.MAX, -np.inf)
    bits = bits_of(values)
    float16, bfloat16 = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF, bits >> 16 | 0x40
    assert np.array_equal(bits_of(got), float16 if name == "f16" else bfloat16)
