"""halving_doubling by itself, over threads: any number of ranks, type and place of the result."""

import numpy as np
import pytest

from distrt.arrays import DTYPES
from distrt.collectives.halving_doubling import HalvingDoubling
from distrt.collectives.ring import Slots
from distrt.kernels.host import HostKernels
from distrt.reduce_op import ReduceOp
from distrt.transport.loopback import LoopbackWorld
from tests.collectives.far_memory import FarMemory

WHOLE, HALVES = 1 << 30, 0


def all_reduce(transport, source, name="f32", op=ReduceOp.SUM, target=None, **options):
    target = np.full_like(source, 99) if target is None else target
    settings = {"slots": Slots(), "segment_bytes": 16, "halving_bytes": HALVES, **options}
    kernels = settings.pop("kernels", None) or HostKernels()
    algorithm = HalvingDoubling(
        transport, kernels, row=DTYPES[name], op=op, source=source, target=target, **settings
    )
    transport.drive(algorithm.step, "the test")
    assert algorithm.step(), "done stays done"
    return target


@pytest.mark.parametrize("limit", [WHOLE, HALVES])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "i32"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 13])
def test_sums_of_any_number_of_ranks_and_elements(size, name, limit):
    row = DTYPES[name]

    def body(transport):
        for count in (0, 1, size - 1, size, size + 1, 61):
            for in_place in (False, True):
                source = (np.arange(count) % 4 * (transport.rank + 1)).astype(row.numpy)
                kept = source.copy()
                target = source if in_place else np.full_like(source, 99)
                all_reduce(transport, source, name, target=target, halving_bytes=limit)
                expected = (np.arange(count) % 4 * sum(range(1, size + 1))).astype(row.numpy)
                assert (target == expected).all()
                assert in_place or (source == kept).all(), "the input is never changed"

    LoopbackWorld(size).run(body)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("limit", [WHOLE, HALVES])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_far_memory_any_window_and_a_mean(name, limit, window):
    row = DTYPES[name]

    def body(transport):
        source = (np.arange(103) % 8 * 3.0 * transport.rank).astype(row.numpy)
        options = {"kernels": FarMemory(), "window": window, "halving_bytes": limit}
        target = all_reduce(transport, source, name, ReduceOp.MEAN, divisor=3.0, **options)
        assert (target == (np.arange(103) % 8 * 3.0).astype(row.numpy)).all()

    LoopbackWorld(3).run(body)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_the_same_bits_on_all_ranks_whatever_the_limit_in_rank_order(name, op):
    """Any inputs: the result is that of the tree of neighbours, folded by NumPy, rounded once."""
    row, size = DTYPES[name], 6
    wide = DTYPES[row.accumulator].numpy
    inputs = [np.random.default_rng(r).standard_normal(64).astype(row.numpy) for r in range(size)]
    for values in inputs:
        values[:4] = [0.0, -0.0, np.inf, -np.inf]
    inputs[2][5], inputs[0][0], inputs[4][1] = np.nan, -0.0, 0.0
    divisor = float(size) if op.divides else 1.0

    def body(transport):
        return [
            all_reduce(
                transport, inputs[transport.rank], name, op, divisor=divisor, halving_bytes=limit
            )
            for limit in (WHOLE, HALVES)
        ]

    results = [one.tobytes() for both in LoopbackWorld(size).run(body) for one in both]
    assert len(set(results)) == 1
    fold = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op.fold]
    with np.errstate(all="ignore"):
        a, b, c, d, e, f = (values.astype(wide) for values in inputs)
        total = fold(fold(fold(a, b), fold(c, d)), fold(e, f))
        expected = (total / wide.type(divisor)).astype(row.numpy)
    result = np.frombuffer(results[0], row.numpy)
    numbers = ~np.isnan(expected.astype(wide))
    assert (numbers == ~np.isnan(result.astype(wide))).all() and not numbers[5]
    assert (result[numbers] == expected[numbers]).all()


def test_half_types_keep_what_they_would_lose_by_rounding_between():
    for size, name in ((4, "bf16"), (4, "f16"), (3, "bf16")):
        row = DTYPES[name]

        def body(transport, row=row, name=name):
            # 256 + 1 is no bfloat16 and 2048 + 1 no float16; 256 + 3 rounded once is 260.
            big = {"bf16": 256, "f16": 2048}[name]
            source = np.full(9, 1 if transport.rank else big, row.numpy)
            target = all_reduce(transport, source, name)
            total = np.float32(big + transport.size - 1)
            assert (target == total.astype(row.numpy)).all()
            assert float(target[0]) > big

        LoopbackWorld(size).run(body)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_rounding_alone_keeps_every_value(name, op):
    """The last step of half types rounds by MAX with -inf: it must keep all values, -0.0 too."""
    row = DTYPES[name]
    every = np.arange(1 << 16, dtype=np.uint16).view(row.numpy)
    identity = {"sum": -0.0, "prod": 1.0, "min": np.inf, "max": -np.inf}[op.fold]

    def body(transport):
        source = every if transport.rank == 1 else np.full_like(every, identity)
        return all_reduce(transport, source, name, op, segment_bytes=1 << 12)

    for result in LoopbackWorld(2).run(body):
        numbers = ~np.isnan(every.astype(np.float32))
        assert (result.view(np.uint16) == every.view(np.uint16))[numbers].all()
        assert np.isnan(result.astype(np.float32))[~numbers].all()


def test_steps_never_block_and_slots_come_back():
    world, slots = LoopbackWorld(3), [Slots(), Slots(), Slots()]
    runs = []
    for rank in range(3):
        source = np.full(100, rank + 1.0, np.float32)
        runs.append(
            HalvingDoubling(
                world.transport(rank),
                HostKernels(),
                row=DTYPES["f32"],
                op=ReduceOp.SUM,
                source=source,
                target=source,
                slots=slots[rank],
                segment_bytes=40,
                halving_bytes=HALVES,
            )
        )
    # One thread drives all: a step that waited for its peer would never return.
    assert not runs[0].step() and not runs[0].step()
    finished = set()
    for _ in range(100):
        finished |= {rank for rank in range(3) if rank not in finished and runs[rank].step()}
    assert finished == {0, 1, 2}
    assert not [size for queue in world._sends.values() for size in queue]
    assert all(len(free) <= 4 for s in slots for free in s._free.values())
    assert all(s._free for s in slots[1:])
