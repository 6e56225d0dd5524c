"""Inputs for kernels, placed at any alignment between guards, and what counts as equal."""

import numpy as np

from distrt.arrays import copy_to, is_cupy, to_numpy

# Around the packs of 16 bytes and the vectors of 16, 32 and 64; primes; several rounds of a grid.
SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 131, 1021)
# Where each array starts, in elements: all aligned, all off by the same, each by its own.
OFFSETS = ((0, 0, 0, 0), (1, 1, 1, 1), (4, 4, 8, 4), (1, 2, 3, 5), (0, 0, 1, 0))
GUARD = 16


def bits(dtype):
    """The unsigned integer of the same size."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def special(dtype):
    """Values at which arithmetic has an edge."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.array([low, high, low + 1, high - 1, 0, 1], dtype)
    # By name: NumPy's finfo does not know bfloat16.
    exponents = {"float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}[dtype.name]
    least = 2.0 ** (1 - exponents)
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, least, -least, least / 2, least / 4]
    return np.array([*values, 2.0**exponents, -(2.0**exponents), 1.5, 1 / 3], np.float64).astype(
        dtype
    )


def sample(dtype, count, seed):
    """``count`` values: a third special ones, a third any bits at all, a third ordinary ones."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    # Through uint8: NumPy makes no bfloat16 from a buffer.
    any_bits = np.frombuffer(rng.bytes(count * dtype.itemsize), np.uint8).view(dtype)
    ordinary = (rng.integers(-99, 99, count) / (1 if dtype.kind in "iu" else 8)).astype(dtype)
    which = rng.integers(0, 3, count)
    return (
        np.choose(
            which,
            [bits_of(rng.choice(special(dtype), count)), bits_of(any_bits), bits_of(ordinary)],
        )
        .astype(bits(dtype))
        .view(dtype)
    )


def bits_of(array):
    return np.ascontiguousarray(array).view(bits(array.dtype))


def place(kernels, values, offset):
    """Return ``values`` in the kernels' memory, ``offset`` elements after a 16-byte boundary, and
    the block around them, whose other elements must not change."""
    size = values.dtype.itemsize
    block = kernels.empty(offset + values.size + 2 * GUARD + 64 // size, values.dtype)
    copy_to(block, np.zeros(block.shape, block.dtype))
    address = block.data.ptr if is_cupy(block) else block.ctypes.data
    start = GUARD + (-(address // size + GUARD)) % max(1, 64 // size) + offset
    view = block[start : start + values.size]
    copy_to(view, values)
    return view, block


def untouched(view, block):
    """Whether everything of ``block`` but ``view`` is still zero."""
    around = bits_of(to_numpy(block))
    inside = bits_of(to_numpy(view))
    return np.count_nonzero(around) == np.count_nonzero(inside)


def same(got, expected):
    """Whether two arrays are equal by value, with NaN equal to NaN."""
    got, expected = to_numpy(got), to_numpy(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    # x != x rather than isnan, which not every dtype has. Signalling NaNs make NumPy warn.
    with np.errstate(invalid="ignore"):
        equal = (got == expected) | ((got != got) & (expected != expected))
    return bool(equal.all())
