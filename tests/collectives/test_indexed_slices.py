"""IndexedSlices: rows gathered in rank order, never reduced; duplicates added on request."""

import ml_dtypes
import numpy as np
import pytest

from distrt.collectives.indexed_slices import IndexedSlices
from distrt.communicator import Communicator
from distrt.errors import CollectiveMismatchError, DTypeError, InvalidArgumentError
from distrt.settings import Settings
from distrt.transport.loopback import LoopbackWorld
from distrt.world import world

BF16 = np.dtype(ml_dtypes.bfloat16)


def same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert (actual == expected).all(), (actual, expected)


def on_ranks(size, body):
    settings = Settings(segment_bytes=64, algorithm="ring", timeout_seconds=30.0)
    return LoopbackWorld(size).run(lambda transport: body(Communicator(transport, settings)))


# ------------------------------------------------------------------ the object


def test_attributes_are_tensorflows():
    values, indices = np.ones((2, 3), np.float32), np.array([4, 1])
    slices = IndexedSlices(values, indices, (5, 3))
    assert slices.values is values and slices.indices is indices
    assert slices.dense_shape == slices.shape == (5, 3) and slices.dtype == np.float32
    assert IndexedSlices(values, indices).dense_shape is None
    assert IndexedSlices(values, indices).shape == (None, 3)
    assert IndexedSlices(values, indices, np.array([5, 3])).dense_shape == (5, 3)
    assert "indices=array([4, 1]), dense_shape=(5, 3)" in repr(slices)
    lists = IndexedSlices([[1.0, 2.0]], [3])
    assert (lists.values.dtype, lists.indices.dtype) == (np.float32, np.int32)
    empty = IndexedSlices(np.zeros((0, 2)), [], (4, 2))
    assert empty.indices.dtype == np.int32 and empty.indices.shape == (0,)


@pytest.mark.parametrize(
    ("values", "indices", "dense_shape", "error", "message"),
    [
        (np.ones((2, 3)), np.ones(3, int), None, InvalidArgumentError, r"\[2, 3\] and \[3\]"),
        (np.ones((2, 3)), np.ones((2, 1), int), None, InvalidArgumentError, r"and \[2, 1\]"),
        (np.float32(1), np.ones(1, int), None, InvalidArgumentError, r"got \[\] and \[1\]"),
        (np.ones(2), np.int64(1), None, InvalidArgumentError, r"got \[2\] and \[\]"),
        (np.ones((2, 3)), [0, 1], (5,), InvalidArgumentError, r"\['any', 3\].* got \[5\]"),
        (np.ones((2, 3)), [0, 1], (5, 4), InvalidArgumentError, r"got \[5, 4\]"),
        (np.ones(2), [0, 1], (), InvalidArgumentError, r"got \[\]"),
        (np.ones(2), [0.0, 1.0], None, DTypeError, "int32 or int64, got float32"),
        (np.ones(2), np.ones(2, np.int16), None, DTypeError, "int32 or int64, got int16"),
        (np.ones(2), np.ones(2, np.uint64), None, DTypeError, "int32 or int64, got uint64"),
        (np.ones(2), np.ones(2, bool), None, DTypeError, "int32 or int64, got bool"),
        (np.ones(2, ">f4"), [0, 1], None, DTypeError, "foreign byte order"),
        (["a", "b"], [0, 1], None, DTypeError, "expected an array or a number"),
    ],
)
def test_what_does_not_belong_together_is_refused(values, indices, dense_shape, error, message):
    with pytest.raises(error, match=message):
        IndexedSlices(values, indices, dense_shape)


# ------------------------------------------------------------------ coalesced and dense


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.float16, np.int32, np.int64])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64, 65])
@pytest.mark.parametrize("width", [(), (1,), (3,), (2, 2), (0,)])
def test_coalesced_equals_adding_row_by_row(dtype, index, rows, width):
    indices = ((np.arange(rows) * 5 + 2) % 6).astype(index)
    values = (np.arange(rows * int(np.prod(width))) % 4).reshape(rows, *width).astype(dtype)
    before = values.copy(), indices.copy()
    dense = np.zeros((9, *width), np.float64)
    for row, place in zip(values, indices, strict=True):
        dense[place] += row.astype(np.float64)
    slices = IndexedSlices(values, indices, (9, *width))
    result = slices.coalesced()
    places = np.unique(indices)
    same(result.indices, places.astype(index))
    same(result.values, dense[places].astype(dtype))
    assert result.dense_shape == slices.dense_shape
    same(slices.to_dense(), dense.astype(dtype))
    same(values, before[0])
    same(indices, before[1])


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 5, 8, 1000, 1023, 1025])
def test_one_index_many_times(copies):
    slices = IndexedSlices(np.ones((copies, 2), np.float32), np.full(copies, 3), (5, 2))
    same(slices.coalesced().values, np.full((1, 2), copies, np.float32))


def test_the_order_of_the_additions_is_the_documented_one():
    # (a + b) + c, in the order of appearance, whatever stands between them: 1e8 swallows
    # a lone 1, so another order gives other bits.
    big = np.float32(1e8)
    for values, expected in (
        ([big, 1, -big, 1], np.float32(0)),  # (big + 1) + (-big + 1)
        ([big, -big, 1, 1], np.float32(2)),
        ([1, 1, big, -big, 3], np.float32(5)),
    ):
        mixed = np.repeat(np.array(values, np.float32), 2)
        indices = np.tile([7, 1], len(values))
        result = IndexedSlices(mixed, indices).coalesced()
        same(result.values, np.array([expected, expected]))
        same(result.indices, np.array([1, 7]))


def test_half_types_are_added_in_float32_and_rounded_once():
    values = np.array([256, 1, 1, 1, 1, 1], BF16)
    same(IndexedSlices(values, [0] * 6).coalesced().values, np.array([260], BF16))
    values = np.array([2048, 1, 1, 60000, 60000], np.float16)
    with np.errstate(all="raise"):
        result = IndexedSlices(values, [4, 4, 4, 9, 9]).coalesced().values
    same(result, np.array([2050, np.inf], np.float16))


def test_what_has_no_dense_form():
    with pytest.raises(InvalidArgumentError, match="without a dense_shape"):
        IndexedSlices(np.ones(2), [0, 1]).to_dense()
    for index in (5, -1):
        with pytest.raises(InvalidArgumentError, match=f"index {index} is not one of 5 rows"):
            IndexedSlices(np.ones(2), np.array([2, index]), (5,)).to_dense()
    with pytest.raises(DTypeError, match="SUM is not defined for bool"):
        IndexedSlices(np.ones(2, bool), [0, 1]).coalesced()
    same(IndexedSlices(np.ones((0, 2)), [], (3, 2)).to_dense(), np.zeros((3, 2)))
    same(IndexedSlices(np.ones((0, 2)), [], (0, 2)).to_dense(), np.zeros((0, 2)))


# ------------------------------------------------------------------ all_reduce


# Recorded from MultiWorkerMirroredStrategy: (workers, op, values and indices of worker i,
# what every worker gets). dense_shape [4, 2].
RECORDED = [
    (2, "SUM", lambda i: ([[i + 1.0, 0.5]], [i]), ([[1, 0.5], [2, 0.5]], [0, 1])),
    (2, "MEAN", lambda i: ([[i + 1.0, 0.5]], [i]), ([[0.5, 0.25], [1, 0.25]], [0, 1])),
    (
        3,
        "MEAN",
        lambda i: ([[i + 1.0, 0.5]], [i]),
        ([[0.33333334, 0.16666667], [0.6666667, 0.16666667], [1, 0.16666667]], [0, 1, 2]),
    ),
    (
        3,
        "SUM",
        lambda i: ([[1.0, 1.0]] * (i + 1), list(range(i + 1))),
        ([[1, 1]] * 6, [0, 0, 1, 0, 1, 2]),
    ),
    (
        2,
        "MEAN",
        lambda i: ([[1.0, 2.0], [3.0, 4.0]], [1, 1]),
        ([[0.5, 1], [1.5, 2], [0.5, 1], [1.5, 2]], [1, 1, 1, 1]),
    ),
]


@pytest.mark.parametrize(("workers", "op", "given", "expected"), RECORDED)
def test_all_reduce_is_tensorflows(workers, op, given, expected):
    def body(comm):
        return comm.all_reduce(IndexedSlices(*given(comm.rank), (4, 2)), op)

    for result in on_ranks(workers, body):
        same(result.values, np.array(expected[0], np.float32))
        same(result.indices, np.array(expected[1], np.int32))
        assert result.dense_shape == (4, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.complex64, np.int64])
@pytest.mark.parametrize("rows", [lambda r: 0, lambda r: r, lambda r: 40 * (r % 2), lambda r: 3])
def test_ranks_may_have_different_numbers_of_rows(size, dtype, rows):
    def part(rank):
        count = rows(rank)
        values = (np.arange(count * 2).reshape(count, 2) + rank).astype(dtype)
        return IndexedSlices(values, np.arange(count) * 7 % 11, (11, 2))

    def body(comm):
        return [comm.all_reduce(part(comm.rank), op) for op in ("SUM", "MEAN")]

    parts = [part(rank) for rank in range(size)]
    dense = sum((p.to_dense().astype(np.complex128) for p in parts), np.zeros((11, 2)))
    for summed, mean in on_ranks(size, body):
        same(summed.values, np.concatenate([p.values for p in parts]))
        same(summed.indices, np.concatenate([p.indices for p in parts]))
        same(mean.indices, summed.indices)
        same(summed.to_dense(), (dense if dtype == np.complex64 else dense.real).astype(dtype))
        kind = np.float64 if dtype == np.int64 else dtype
        lanes = summed.values.astype(kind)
        wide = np.float32 if dtype in (BF16, np.complex64) else kind
        lanes = lanes.view(np.float32) if dtype == np.complex64 else lanes
        quotient = (lanes.astype(wide) / np.dtype(wide).type(size)).astype(lanes.dtype)
        same(mean.values, quotient.view(kind))


def test_rows_without_elements_are_counted():
    def body(comm):
        part = IndexedSlices(np.ones((comm.rank, 0), np.float32), np.arange(comm.rank), (9, 0))
        return comm.all_reduce(part, "SUM")

    for result in on_ranks(3, body):
        same(result.indices, np.array([0, 0, 1]))
        assert result.values.shape == (3, 0) and result.dense_shape == (9, 0)


def test_the_mean_of_a_complex_infinity_has_no_nan():
    def body(comm):
        rows = int(comm.rank == 0)
        return comm.all_reduce(IndexedSlices(np.full(rows, complex(np.inf, 1)), [0] * rows), "MEAN")

    for result in on_ranks(2, body):
        assert result.values[0].real == np.inf and result.values[0].imag == 0.5


@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize("rows", [lambda r: r, lambda r: 5000 * (r % 2), lambda r: 0])
def test_all_reduce_over_mpi(rows):
    comm = world().communicator
    parts = [
        IndexedSlices(np.full((rows(r), 3), r, np.float32), np.arange(rows(r)) % 7, (7, 3))
        for r in range(comm.size)
    ]
    result = comm.all_reduce(parts[comm.rank])
    same(result.values, np.concatenate([part.values for part in parts]))
    same(result.indices, np.concatenate([part.indices for part in parts]))
    same(result.to_dense(), sum((part.to_dense() for part in parts), np.zeros((7, 3), np.float32)))


def test_what_does_not_fit_together_is_every_ranks_error():
    def slices(dtype=np.float32, index=np.int64, width=3, shape=(9, 3)):
        return IndexedSlices(np.ones((2, width), dtype), np.arange(2, dtype=index), shape)

    def body(comm):
        chief, usual = comm.rank == 0, slices()
        cases = [
            (slices(np.float64), "SUM", "float64"),
            (slices(index=np.int32), "SUM", "int32"),
            (slices(width=4, shape=(9, 4)), "SUM", "4]"),
            (slices(shape=(8, 3)), "SUM", "dense_shape=[8, 3]"),
            (slices(shape=None), "SUM", "dense_shape=None"),
            (usual, "MEAN", "op=MEAN"),
            (usual, "MAX", "MAX of IndexedSlices: expected SUM or MEAN"),
            (usual, "PROD", "PROD of IndexedSlices: expected SUM or MEAN"),
            (slices(bool), "SUM", "SUM is not defined for bool"),
            (usual, "median", "median"),
        ]
        for other, op, said in cases:
            with pytest.raises(CollectiveMismatchError) as info:
                comm.all_reduce(*((other, op) if chief else (usual, "SUM")))
            assert said in str(info.value) and "rank 0" in str(info.value)
        return comm.all_reduce(usual, "sum").indices.tolist()

    assert on_ranks(2, body) == [[0, 1, 0, 1]] * 2
