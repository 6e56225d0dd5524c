"""The ring by itself, over threads: memory that messages cannot reach, and small windows."""

import numpy as np
import pytest

from distrt.arrays import DTYPES
from distrt.collectives import schedule
from distrt.collectives.ring import Ring, Slots
from distrt.kernels.host import HostKernels
from distrt.reduce_op import ReduceOp
from distrt.transport.loopback import LoopbackWorld
from tests.collectives.far_memory import FarMemory


def all_reduce(transport, kernels, source, target, row, segment_bytes, window, slots):
    size, rank = transport.size, transport.rank
    ring = Ring(
        transport,
        kernels,
        schedule.all_reduce(size, rank),
        schedule.chunks(source.size, size),
        row=row,
        op=ReduceOp.SUM,
        source=source,
        target=target,
        divisor=2.0,
        slots=slots,
        segment_bytes=segment_bytes,
        window=window,
    )
    transport.drive(ring.step, "the test")


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_far_memory_and_any_window(size, name, window):
    row = DTYPES[name]

    def body(transport):
        kernels, slots = FarMemory(), Slots()
        for count in (0, 1, size, 3 * size + 1, 64 * size):
            for in_place in (False, True):
                source = (np.arange(count) % 8 * 2 * (transport.rank + 1)).astype(row.numpy)
                target = source if in_place else np.empty_like(source)
                all_reduce(transport, kernels, source, target, row, 16, window, slots)
                expected = np.arange(count) % 8 * sum(range(1, size + 1))
                assert (target == expected.astype(row.numpy)).all()

    LoopbackWorld(size).run(body)


def test_steps_never_block_and_slots_come_back():
    world, slots = LoopbackWorld(2), [Slots(), Slots()]
    rings = []
    for rank in range(2):
        source = np.full(100, rank + 1.0, np.float32)
        rings.append(
            Ring(
                world.transport(rank),
                HostKernels(),
                schedule.all_reduce(2, rank),
                schedule.chunks(100, 2),
                row=DTYPES["f32"],
                op=ReduceOp.SUM,
                source=source,
                target=source,
                slots=slots[rank],
                segment_bytes=40,
            )
        )
    # One thread drives both: a step that waited for its peer would never return.
    assert not rings[0].step() and not rings[0].step()
    finished = set()
    for _ in range(100):
        finished |= {rank for rank in range(2) if rank not in finished and rings[rank].step()}
    assert finished == {0, 1}
    assert all(len(free) > 0 for s in slots for free in s._free.values())


@pytest.mark.parametrize("where", ["apart", "whole", "in place"])
@pytest.mark.parametrize("name", ["f32", "bf16", "i64"])
@pytest.mark.parametrize(
    "lengths", [[0, 0], [3, 0], [5, 5, 5], [0, 7, 1], [40, 0, 0], [1, 2, 30, 0, 4]]
)
def test_reduce_scatter_of_uneven_chunks_into_the_own_one(lengths, name, where):
    row, size = DTYPES[name], len(lengths)
    chunks, count = schedule.joined(lengths), sum(lengths)

    def body(transport):
        rank, kernels = transport.rank, FarMemory()
        source = (np.arange(count) % 8 * (rank + 1)).astype(row.numpy)
        own = chunks[rank]
        target = {
            "apart": np.empty(own.length, row.numpy),
            "whole": np.full(count, 99, row.numpy),
            "in place": source[own.slice],
        }[where]
        ring = Ring(
            transport,
            kernels,
            schedule.reduce_scatter(size, rank),
            chunks,
            row=row,
            op=ReduceOp.SUM,
            source=source,
            target=target,
            target_offset=0 if where == "whole" else own.offset,
            slots=Slots(),
            segment_bytes=16,
        )
        transport.drive(ring.step, "the test")
        expected = (np.arange(count) % 8 * sum(range(1, size + 1))).astype(row.numpy)
        part = target[own.slice] if where == "whole" else target
        assert part.size == own.length and (part == expected[own.slice]).all()
        if where == "whole":
            assert np.delete(target, np.r_[own.slice]).tolist() == [99] * (count - own.length)

    LoopbackWorld(size).run(body)


def test_two_segments_are_in_flight_both_ways():
    world = LoopbackWorld(2)
    ring = Ring(
        world.transport(0),
        HostKernels(),
        schedule.all_reduce(2, 0),
        schedule.chunks(8, 2),
        row=DTYPES["f32"],
        op=ReduceOp.SUM,
        source=np.ones(8, np.float32),
        target=np.empty(8, np.float32),
        slots=Slots(),
        segment_bytes=8,
        window=2,
    )
    assert not ring.step()
    for queues in (world._sends, world._receives):
        assert [len(queue) for queue in queues.values() if queue] == [2]
