"""What a communicator must do, written once: run over threads and over real ranks.

Each ``check_*`` takes a communicator and is called on every rank of it. Inputs
are exactly representable and results are compared with ``==``, on every rank.
"""

import hashlib
from collections import OrderedDict, namedtuple

import ml_dtypes
import numpy as np
import pytest

from distrt.collectives import schedule
from distrt.errors import CollectiveMismatchError, DistrtError, DTypeError, InvalidArgumentError
from distrt.reduce_op import ReduceOp

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
TWINS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


def values(rank, shape, dtype):
    """Small whole numbers, other ones on each rank; sums of a few ranks stay exact in any dtype."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 3 + rank * 5) % 7).astype(dtype).reshape(shape)


def folded(op, comm, shape, dtype):
    parts = [values(r, shape, dtype) for r in range(comm.size)]
    result = parts[0]
    for part in parts[1:]:
        result = TWINS[op](result, part)
    return result.astype(dtype)


def same(actual, expected):
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert (actual == expected).all(), (actual, expected)


def sizes(comm):
    n = comm.size
    segment = comm.settings.segment_bytes // 4
    return sorted(
        {0, 1, 2, n - 1, n, n + 1, 13, 101, n * segment, n * segment + 1, 5 * segment + 3}
    )


def check_sizes(comm):
    for size in sizes(comm):
        for op in TWINS:
            expected = folded(op, comm, (size,), np.float32)
            same(comm.all_reduce(values(comm.rank, (size,), np.float32), op), expected)
            for root in range(comm.size):
                result = comm.reduce(values(comm.rank, (size,), np.float32), op, root)
                if comm.rank == root:
                    same(result, expected)
                else:
                    assert result is None
        for root in range(comm.size):
            mine = values(comm.rank, (size,), np.float32)
            same(comm.broadcast(mine, root), values(root, (size,), np.float32))
        parts = [values(r, (size,), np.float32) for r in range(comm.size)]
        same(comm.all_gather(parts[comm.rank]), np.concatenate(parts))


def check_dtypes(comm):
    shape = (3, 37)
    for dtype in FLOATS + INTEGERS:
        for op in TWINS:
            if op == "PROD" and dtype not in (np.float32, np.float64, np.int64):
                continue  # 6**4 is too big for the short types; wrap-around has its own check
            result = comm.all_reduce(values(comm.rank, shape, dtype), op)
            same(result, folded(op, comm, shape, np.dtype(dtype)))
        mine = values(comm.rank, shape, dtype)
        same(comm.broadcast(mine, comm.size - 1), values(comm.size - 1, shape, dtype))
        parts = [values(r, shape, dtype) for r in range(comm.size)]
        same(comm.all_gather(mine, axis=1), np.concatenate(parts, axis=1))
    for dtype in (np.complex64, np.complex128):
        parts = [values(r, shape, dtype) * (1 + 2j) for r in range(comm.size)]
        parts = [p.astype(dtype) for p in parts]
        same(comm.all_reduce(parts[comm.rank]), sum(parts[1:], parts[0]))
    flags = [values(r, shape, np.int64) % 2 == 0 for r in range(comm.size)]
    same(comm.all_reduce(flags[comm.rank], "MIN"), np.logical_and.reduce(flags))
    same(comm.all_reduce(flags[comm.rank], "MAX"), np.logical_or.reduce(flags))
    wrapped = comm.all_reduce(np.full(5, 100, np.uint8))
    same(wrapped, np.full(5, 100 * comm.size % 256, np.uint8))


def check_mean(comm):
    n = comm.size
    for dtype in (*FLOATS, np.complex64):
        result = comm.all_reduce(np.full(11, 3 * (comm.rank + 1), dtype), ReduceOp.MEAN)
        same(result, np.full(11, 3 * (n + 1) / 2, dtype))
        equal = np.full(7, 0.7109375).astype(dtype)
        same(comm.all_reduce(equal, "mean"), equal)
    # The mean of integers is a true division, on one rank as well.
    same(comm.all_reduce(np.int32(comm.rank), "MEAN"), np.array((n - 1) / 2, np.float64))
    same(comm.all_reduce(np.int16(comm.rank), "MEAN"), np.array((n - 1) / 2, np.float32))
    # 20000 summed four times overflows float16; its mean does not.
    same(comm.all_reduce(np.full(3, 20000, np.float16), "MEAN"), np.full(3, 20000, np.float16))


def check_half_types_round_once(comm):
    mine = np.full(8, 256 if comm.rank == 0 else 1, ml_dtypes.bfloat16)
    expected = np.full(8, 256 + comm.size - 1, np.float32).astype(ml_dtypes.bfloat16)
    same(comm.all_reduce(mine), expected)
    mine = np.full(8, 2048 if comm.rank == 0 else 1, np.float16)
    same(comm.all_reduce(mine), np.full(8, 2048 + comm.size - 1, np.float32).astype(np.float16))


def check_nan_reaches_every_rank(comm):
    for dtype in FLOATS:
        for holder in range(comm.size):
            for op in ("MIN", "MAX", "SUM"):
                mine = np.full(9, comm.rank + 1, dtype)
                if comm.rank == holder:
                    mine[4] = np.nan
                result = comm.all_reduce(mine, op).astype(np.float64)
                assert np.isnan(result[4])
                assert not np.isnan(np.delete(result, 4)).any()
    mine = np.array([np.inf if comm.rank % 2 else -np.inf, 1], np.float32)
    result = comm.all_reduce(mine)
    assert np.isnan(result[0]) == (comm.size > 1) and result[1] == comm.size


def check_layouts(comm):
    n, total = comm.size, sum(range(1, comm.size + 1))
    base = np.arange(6, dtype=np.int64).reshape(2, 3)
    mine = base * (comm.rank + 1)
    fortran = mine if comm.rank == 0 else np.asfortranarray(mine)
    same(comm.all_reduce(fortran), base * total)
    big = np.arange(20, dtype=np.float64) * (comm.rank + 1)
    kept = big.copy()
    same(comm.all_reduce(big[::-2]), np.arange(20, dtype=np.float64)[::-2] * total)
    same(big, kept)
    view = big[::2]
    assert comm.all_reduce(view, out=view) is view
    same(big[::2], np.arange(20, dtype=np.float64)[::2] * total)
    same(big[1::2], kept[1::2])
    table = np.arange(12, dtype=np.float32).reshape(3, 4) * (comm.rank + 1)
    comm.all_reduce(table.T, out=table.T)
    same(table, np.arange(12, dtype=np.float32).reshape(3, 4) * total)
    locked = np.full(5, comm.rank, np.float32)
    locked.flags.writeable = False
    same(comm.all_reduce(locked), np.full(5, total - n, np.float32))
    assert (locked == comm.rank).all()
    for shape in ((0,), (0, 3), (1, 0, 2), ()):
        same(comm.all_reduce(np.ones(shape, np.float32)), np.full(shape, n, np.float32))
        same(comm.broadcast(np.ones(shape, np.float32)), np.ones(shape, np.float32))


def check_in_place(comm):
    for size in sizes(comm):
        for dtype in (np.float32, np.float16):
            mine = values(comm.rank, (size,), dtype)
            comm.all_reduce(mine, out=mine)
            same(mine, folded("SUM", comm, (size,), np.dtype(dtype)))
    # An out that is, or overlaps, the value of another leaf.
    a, b = np.full(5, comm.rank, np.float32), np.full(5, 10.0 * comm.rank, np.float32)
    comm.all_reduce({"a": a, "b": b}, out={"a": b, "b": a})
    same(b, np.full(5, sum(range(comm.size)), np.float32))
    same(a, b * 10)
    tied = np.full(5, comm.rank, np.float32)
    comm.all_reduce([tied, tied], out=[tied, tied])
    same(tied, b)
    # Overlapping, but not the same memory.
    buffer = np.arange(12, dtype=np.float32)
    comm.all_reduce(buffer[:8], out=buffer[2:10])
    same(buffer[2:10], np.arange(8, dtype=np.float32) * comm.size)


def check_uneven_gather(comm):
    parts = [np.full((r % 3, 2), r, np.float32) for r in range(comm.size)]
    same(comm.all_gather(parts[comm.rank]), np.concatenate(parts))
    parts = [np.full((2, r + 1), r, np.int16) for r in range(comm.size)]
    same(comm.all_gather(parts[comm.rank], axis=-1), np.concatenate(parts, axis=1))
    only_last = np.ones(3 if comm.rank == comm.size - 1 else 0, np.float64)
    same(comm.all_gather(only_last), np.ones(3))
    with pytest.raises(InvalidArgumentError, match="axis 0"):
        comm.all_gather(np.float32(1))


def check_structures(comm):
    total = sum(range(comm.size))
    Point = namedtuple("Point", ["x", "y"])
    one = {"b": np.full(2, comm.rank, np.float32), "a": [1, (2.5, np.int64(comm.rank))]}
    other = OrderedDict(reversed(list(one.items())))
    mine = one if comm.rank % 2 else dict(other)
    result = comm.all_reduce(mine)
    assert list(result) == list(mine) or sorted(result) == sorted(mine)
    same(result["b"], np.full(2, total, np.float32))
    same(result["a"][0], np.array(comm.size, np.int32))
    same(result["a"][1][0], np.array(2.5 * comm.size, np.float32))
    same(result["a"][1][1], np.array(total, np.int64))
    point = comm.all_reduce(Point(1.0, np.ones(2, np.float64)))
    assert type(point) is Point
    same(point.y, np.full(2, comm.size, np.float64))
    assert comm.all_reduce([]) == []
    # An OrderedDict has an order of its own on each rank, nested ones too.
    keys = ["a", "b", "c"] if comm.rank % 2 else ["c", "b", "a"]
    ordered = OrderedDict((k, OrderedDict((j, ord(k) + ord(j)) for j in keys)) for k in keys)
    result = comm.all_reduce(ordered)
    same(result["a"]["c"], np.array((ord("a") + ord("c")) * comm.size, np.int32))


def check_same_bits_everywhere(comm):
    rng = np.random.default_rng(comm.rank)
    digests = set()
    mine = [rng.standard_normal(size).astype(np.float32) for size in (1, 3, 4, 5, 1023, 20011)]
    for _ in range(3):
        digest = hashlib.sha256()
        for array in mine:
            digest.update(comm.all_reduce(array).tobytes())
        digests.update(comm.all_gather_object(digest.hexdigest()))
    assert len(digests) == 1


def check_objects_and_barrier(comm):
    assert comm.all_gather_object(("rank", comm.rank)) == [("rank", r) for r in range(comm.size)]
    for root in range(comm.size):
        assert comm.broadcast_object({"root": comm.rank}, root) == {"root": root}
    comm.transport.max_message_bytes = 64
    blob = bytes(range(256)) * (comm.rank + 1)
    assert comm.all_gather_object(blob) == [bytes(range(256)) * (r + 1) for r in range(comm.size)]
    comm.barrier()


def check_bad_arguments_raise_everywhere(comm):
    ones = np.ones(3, np.float32)
    for call, error, text in (
        (
            lambda: comm.all_reduce(ones, "AVERAGE"),
            InvalidArgumentError,
            "unknown reduction 'AVERAGE'",
        ),
        (lambda: comm.all_reduce(ones, 3), InvalidArgumentError, "unknown reduction 3"),
        (lambda: comm.all_reduce(ones > 0, "SUM"), DTypeError, "SUM is not defined for bool"),
        (lambda: comm.all_reduce(ones * 1j, "MAX"), DTypeError, "MAX is not defined for complex"),
        (lambda: comm.all_reduce(np.array(["a"])), DTypeError, "dtype <U1"),
        (lambda: comm.all_reduce("text"), DTypeError, "expected an array or a number, got 'text'"),
        (lambda: comm.all_reduce(None), DTypeError, "got None"),
        (lambda: comm.all_reduce(ones.astype(">f4")), DTypeError, "foreign byte order"),
        (
            lambda: comm.broadcast(ones, root=comm.size),
            InvalidArgumentError,
            "expected a rank from 0",
        ),
        (lambda: comm.reduce(ones, root=-1), InvalidArgumentError, "root=-1"),
        (
            lambda: comm.all_reduce(ones, out=np.ones(4, np.float32)),
            InvalidArgumentError,
            "out: exp",
        ),
        (lambda: comm.all_reduce(ones, out=[ones]), InvalidArgumentError, "another structure"),
        (lambda: comm.all_reduce(ones, out=ones.astype(">f4")), DTypeError, "foreign byte order"),
        (lambda: comm.all_reduce([ones, {"b": "x"}]), DTypeError, r"value\[1\]\['b'\]: expected"),
        (lambda: comm.all_reduce(np.ma.masked_array(ones)), DTypeError, "mask"),
        (lambda: comm.all_gather(ones, axis=None), InvalidArgumentError, "axis must be an int"),
    ):
        with pytest.raises(error, match=text):
            call()
    same(comm.all_reduce(ones), np.full(3, comm.size, np.float32))


def check_mismatches_raise_everywhere(comm):
    if comm.size == 1:
        return
    last = comm.rank == comm.size - 1
    three, four = np.ones(3, np.float32), np.ones(4, np.float32)
    calls = {
        "shape": lambda: comm.all_reduce(four if last else three),
        "dtype": lambda: comm.all_reduce(three.astype(np.float64) if last else three),
        "op": lambda: comm.all_reduce(three, "MAX" if last else "SUM"),
        "verb": lambda: comm.broadcast(three) if last else comm.all_reduce(three),
        "root": lambda: comm.broadcast(three, root=int(last)),
        "missing": lambda: comm.all_reduce({"a": three} if last else {"a": three, "b": three}),
        "refused": lambda: comm.all_reduce(three > 0 if last else three),
        "pickle": lambda: comm.all_gather_object((lambda: 0) if last else 0),
    }
    for call in calls.values():
        with pytest.raises(CollectiveMismatchError) as caught:
            call()
        text = str(caught.value)
        assert f"{comm.size - 1}: call #" in text and "rank" in text
        assert len(set(comm.all_gather_object(text))) == 1, "not the same error on every rank"
    same(comm.all_reduce(three), np.full(3, comm.size, np.float32))


def check_together(comm):
    assert comm.together("counting", lambda: comm.rank) == comm.rank

    def fail():
        raise InvalidArgumentError("no such thing")

    with pytest.raises(InvalidArgumentError, match=r"opening failed:\n  rank 0: .*no such thing"):
        comm.together("opening", fail, ranks=[0])

    def fail_on_last():
        if comm.rank == comm.size - 1:
            raise KeyError("key")

    with pytest.raises(DistrtError, match=rf"rank {comm.size - 1}: KeyError: 'key'"):
        comm.together("looking", fail_on_last)
    assert comm.together("only one", lambda: 5, ranks=[comm.size - 1]) == (
        5 if comm.rank == comm.size - 1 else None
    )


def check_reduce_scatter(comm):
    for rows in (0, 1, comm.size, 3 * comm.size, 3 * comm.size + 1, 101):
        for dtype in (np.float32, np.float16, np.complex64):
            for op in ("SUM", "MEAN"):
                whole = comm.all_reduce(values(comm.rank, (rows, 3), dtype), op)
                part = comm.reduce_scatter(values(comm.rank, (rows, 3), dtype), op)
                span = schedule.chunks(rows, comm.size)[comm.rank]
                same(part, whole[span.slice])
    mine = values(comm.rank, (4 * comm.size,), np.float32)
    out = np.empty(4, np.float32)
    assert comm.reduce_scatter(mine, out=out) is out
    expected = folded("SUM", comm, (4 * comm.size,), np.float32)
    same(out, expected[4 * comm.rank : 4 * comm.rank + 4])
    # The part may lie in the value itself.
    comm.reduce_scatter(mine, out=mine[:4])
    same(mine[:4], expected[4 * comm.rank : 4 * comm.rank + 4])
    same(
        comm.reduce_scatter({"a": np.ones(comm.size, np.int32)})["a"],
        np.full(1, comm.size, np.int32),
    )
    with pytest.raises(InvalidArgumentError, match="an array with rows"):
        comm.reduce_scatter(np.float32(1))


def check_gather_and_scatter(comm):
    for root in range(comm.size):
        for length in (0, 1, 40, 1000):
            parts = [values(r, (length + r, 2), np.float32) for r in range(comm.size)]
            result = comm.gather(parts[comm.rank], root)
            if comm.rank == root:
                same(result, np.concatenate(parts))
            else:
                assert result is None
            whole = values(root, (length, 3), np.int16)
            mine = comm.scatter(whole if comm.rank == root else np.zeros_like(whole), root)
            same(mine, whole[schedule.chunks(length, comm.size)[comm.rank].slice])
    turned = comm.gather(np.full((2, 1), comm.rank, np.int64), axis=1)
    if comm.rank == 0:
        same(turned, np.tile(np.arange(comm.size), (2, 1)))


def check_all_to_all(comm):
    for rows in (0, 1, 7, 300):
        mine = values(comm.rank, (rows * comm.size, 2), np.float32)
        parts = [values(r, (rows * comm.size, 2), np.float32) for r in range(comm.size)]
        at = slice(rows * comm.rank, rows * (comm.rank + 1))
        expected = np.concatenate([part[at] for part in parts])
        same(comm.all_to_all(mine), expected)
        out = np.empty_like(mine)
        assert comm.all_to_all(mine, out=out) is out
        same(out, expected)
    # Rank s sends s + d rows, each naming both, to rank d.
    counts = [comm.rank + d for d in range(comm.size)]
    mine = np.concatenate(
        [np.full((comm.rank + d, 2), 10 * comm.rank + d) for d in range(comm.size)]
    )
    expected = [np.full((s + comm.rank, 2), 10 * s + comm.rank) for s in range(comm.size)]
    same(comm.all_to_all(mine, counts), np.concatenate(expected))
    if comm.size > 1:
        with pytest.raises(InvalidArgumentError, match="divide by"):
            comm.all_to_all(np.ones(comm.size + 1))
    with pytest.raises(InvalidArgumentError, match="add up to the rows"):
        comm.all_to_all(np.ones(3), [4] * comm.size)


def check_plain_general_and_registered_calls_meet(comm):
    """Ranks may call a verb the quick way or the general one, on registered memory or not."""
    empty = np.empty if comm.node is None else comm.node.arena.heap.empty
    for size in (0, 1, 15, 16, 17, 63, 64, 65, 1009):
        kinds = [
            lambda array: array,
            lambda array: np.repeat(array, 2)[::2],
            lambda array: array.astype(array.dtype, copy=True),
            lambda array: _registered(empty, array),
        ]
        for shift in range(len(kinds)):
            kind = kinds[(comm.rank + shift) % len(kinds)]
            mine = kind(values(comm.rank, (size,), np.float32))
            expected = folded("SUM", comm, (size,), np.float32)
            same(comm.all_reduce(mine), expected)
            assert comm.all_reduce(mine, out=mine) is mine
            same(mine, expected)
            mine = kind(values(comm.rank, (size,), np.float32))
            out = kinds[(comm.rank + shift + 1) % len(kinds)](np.zeros(size, np.float32))
            same(
                comm.broadcast(mine, comm.size - 1, out=out),
                values(comm.size - 1, (size,), np.float32),
            )
            joined = kinds[(comm.rank + shift + 3) % len(kinds)](
                np.zeros(size * comm.size, np.float32)
            )
            parts = [values(r, (size,), np.float32) for r in range(comm.size)]
            same(comm.all_gather(mine, out=joined), np.concatenate(parts))
            result = comm.reduce(mine, "MAX", comm.size // 2)
            if comm.rank == comm.size // 2:
                same(result, folded("MAX", comm, (size,), np.float32))
    # A view that is not whole: its neighbours are not touched.
    whole = np.zeros((50, 2), np.float32)
    view = whole[:, 0]
    view[:] = comm.rank
    comm.all_reduce(view, out=view)
    same(whole[:, 0], np.full(50, sum(range(comm.size)), np.float32))
    same(whole[:, 1], np.zeros(50, np.float32))


def check_rows_without_elements_are_counted(comm):
    n = comm.size
    for make in (np.zeros, lambda shape: np.zeros(shape)[::1]):
        mine = make((3 + comm.rank, 0))
        total = 3 * n + n * (n - 1) // 2
        assert comm.all_gather(mine).shape == (total, 0)
        assert comm.all_gather(mine, out=np.zeros((total, 0))).shape == (total, 0)
        gathered = comm.gather(mine, n - 1)
        assert (gathered.shape == (total, 0)) if comm.rank == n - 1 else gathered is None
        assert comm.all_to_all(make((2 * n, 0))).shape == (2 * n, 0)
        counts = [comm.rank + d for d in range(n)]
        received = comm.all_to_all(make((sum(counts), 0)), counts)
        assert received.shape == (sum(s + comm.rank for s in range(n)), 0)
        assert comm.reduce_scatter(make((2 * n, 0))).shape == (2, 0)
        assert comm.scatter(make((2 * n, 0))).shape == (2, 0)


def check_an_out_of_the_wrong_length(comm):
    if comm.size == 1:
        return
    part = np.ones(3 + comm.rank, np.float32)
    total = sum(3 + rank for rank in range(comm.size))
    for out in (np.empty(comm.size * part.size, np.float32), np.empty(1, np.float32)):
        if out.size == total:
            assert (comm.all_gather(part, out=out) == 1).all()
            continue
        with pytest.raises(InvalidArgumentError, match="out"):
            comm.all_gather(part, out=out)
    with pytest.raises(InvalidArgumentError, match="out: expected float32"):
        comm.all_reduce(np.ones(3, np.float32), out=np.empty(4, np.float32))
    same(comm.all_reduce(np.ones(3, np.int32)), np.full(3, comm.size, np.int32))


def check_quick_and_general_mismatches(comm):
    if comm.size == 1:
        return
    for _ in range(3):
        with pytest.raises(CollectiveMismatchError, match=r"all_reduce op=SUM float32\[4\]"):
            comm.all_reduce(np.ones(4 if comm.rank == 0 else 5, np.float32))
        with pytest.raises(CollectiveMismatchError, match="broadcast"):
            if comm.rank == 0:
                comm.broadcast(np.ones(4, np.float32), out=np.ones(4, np.float32))
            else:
                comm.all_reduce(np.ones(4, np.float32))
        with pytest.raises(CollectiveMismatchError, match="op=MAX"):
            comm.all_reduce(np.ones(100, np.float32), ReduceOp.MAX if comm.rank else ReduceOp.SUM)
        with pytest.raises(CollectiveMismatchError, match=r"float32\[4\]"):
            comm.all_reduce(np.ones(4, np.float32) if comm.rank else {"a": np.ones(4, np.float32)})
        same(comm.all_reduce(np.ones(4, np.float32)), np.full(4, comm.size, np.float32))


def _registered(empty, array):
    result = empty(array.shape, array.dtype)
    result[...] = array
    return result


BODIES = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
