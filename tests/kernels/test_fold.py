"""fold, finish and widen of every row, against NumPy, by ``==``."""

import numpy as np
import pytest

from distrt.arrays import DTYPES, to_numpy
from distrt.kernels.base import accumulator
from distrt.kernels.reference import ReferenceKernels
from distrt.reduce_op import ReduceOp
from tests.kernels.samples import OFFSETS, SIZES, place, same, sample, untouched

ROWS = [row for row in DTYPES.values() if row.kernel == row.name]
OPS = [ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX]
REFERENCE = ReferenceKernels()

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.fold)


def inputs(row, size):
    return sample(accumulator(row).numpy, size, size), sample(row.numpy, size, size + 1)


@rows
@ops
def test_fold_equals_the_reference(kernels, row, op):
    for size in SIZES:
        partial, local = inputs(row, size)
        expected = np.empty_like(partial)
        REFERENCE.fold(op, row, expected, partial, local)
        for offsets in OFFSETS:
            out, block = place(kernels, np.zeros_like(partial), offsets[0])
            a, _ = place(kernels, partial, offsets[1])
            b, _ = place(kernels, local, offsets[2])
            kernels.fold(op, row, out, a, b)
            assert same(out, expected), (size, offsets)
            assert untouched(out, block), (size, offsets)
            kernels.fold(op, row, a, a, b)
            assert same(a, expected), (size, offsets, "in place of partial")


@rows
@ops
def test_finish_equals_the_reference(kernels, row, op):
    divisors = (1.0, 3.0, 7.0) if accumulator(row).numpy.kind == "f" else (1.0,)
    for size in SIZES:
        partial, local = inputs(row, size)
        for divisor, offsets in zip(divisors * len(OFFSETS), OFFSETS, strict=False):
            expected = np.empty_like(local)
            REFERENCE.finish(op, row, expected, partial, local, divisor)
            # `out` is aligned like `local`: both are of the narrow dtype.
            out, block = place(kernels, np.zeros_like(local), offsets[2])
            a, _ = place(kernels, partial, offsets[1])
            b, _ = place(kernels, local, offsets[2])
            kernels.finish(op, row, out, a, b, divisor)
            assert same(out, expected), (size, offsets, divisor)
            assert untouched(out, block), (size, offsets, divisor)
            kernels.finish(op, row, b, a, b, divisor)
            assert same(b, expected), (size, offsets, divisor, "in place of local")


@rows
def test_finish_in_place_of_the_partial_result(kernels, row):
    if accumulator(row) is not row:
        pytest.skip("the partial result has a dtype of its own")
    partial, local = inputs(row, 131)
    expected = np.empty_like(local)
    REFERENCE.finish(ReduceOp.SUM, row, expected, partial, local)
    a, _ = place(kernels, partial, 3)
    b, _ = place(kernels, local, 1)
    kernels.finish(ReduceOp.SUM, row, a, a, b)
    assert same(a, expected)


@rows
def test_widen_equals_the_reference(kernels, row):
    for size in SIZES:
        local = sample(row.numpy, size, size)
        expected = local.astype(accumulator(row).numpy)
        for offsets in OFFSETS:
            out, block = place(kernels, np.zeros_like(expected), offsets[0])
            kernels.widen(row, out, place(kernels, local, offsets[1])[0])
            assert same(out, expected), (size, offsets)
            assert untouched(out, block), (size, offsets)


@ops
def test_a_nan_on_either_side_is_the_result(kernels, op):
    row = DTYPES["f32"]
    nan = np.float32(np.nan)
    a, _ = place(kernels, np.array([nan, 1, nan, 2] * 9, np.float32), 0)
    b, _ = place(kernels, np.array([1, nan, nan, 3] * 9, np.float32), 0)
    kernels.fold(op, row, a, a, b)
    assert np.isnan(to_numpy(a)).tolist() == [True, True, True, False] * 9


@pytest.mark.parametrize(
    ("name", "op", "left", "right", "expected"),
    [
        ("i8", ReduceOp.SUM, 100, 100, -56),
        ("u8", ReduceOp.SUM, 200, 100, 44),
        ("u16", ReduceOp.PROD, 65535, 65535, 1),
        ("i32", ReduceOp.SUM, 2**31 - 1, 1, -(2**31)),
        ("i64", ReduceOp.PROD, -(2**63), 3, -(2**63)),
        ("u64", ReduceOp.MAX, 2**64 - 1, 2**63, 2**64 - 1),
        ("i64", ReduceOp.MIN, -(2**63), 2**63 - 1, -(2**63)),
    ],
)
def test_integers_wrap_and_compare_in_their_own_width(kernels, name, op, left, right, expected):
    row = DTYPES[name]
    a, _ = place(kernels, np.full(37, left, row.numpy), 0)
    b, _ = place(kernels, np.full(37, right, row.numpy), 0)
    kernels.fold(op, row, a, a, b)
    assert to_numpy(a).tolist() == [expected] * 37


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_the_mean_of_three_equal_values_is_that_value(kernels, name):
    # 1/3 has no finite binary form, so multiplying by it would miss some of these.
    row = DTYPES[name]
    values = np.arange(1, 255, dtype=np.float32).astype(row.numpy)
    partial = values.astype(accumulator(row).numpy) * 2
    out, _ = place(kernels, np.zeros_like(values), 0)
    a, _ = place(kernels, partial, 0)
    b, _ = place(kernels, values, 0)
    kernels.finish(ReduceOp.MEAN, row, out, a, b, 3.0)
    assert to_numpy(out).tolist() == values.tolist()


def test_half_types_are_rounded_once(kernels):
    # 2048 + 1 is no float16, but 2048 + 1 + 1 is; rounding in between would lose both ones.
    row = DTYPES["f16"]
    ones, _ = place(kernels, np.ones(19, np.float16), 0)
    partial, _ = place(kernels, np.full(19, 2048, np.float32), 0)
    kernels.fold(ReduceOp.SUM, row, partial, partial, ones)
    kernels.finish(ReduceOp.SUM, row, ones, partial, ones)
    assert to_numpy(ones).tolist() == [2050.0] * 19
