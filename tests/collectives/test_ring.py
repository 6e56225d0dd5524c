"""The ring by itself, over threads: memory that messages cannot reach, and small windows.

A GPU's memory is such memory. ``FarMemory`` behaves as CudaKernels does: bytes
are sent from and received into buffers apart, and mean nothing before they are
staged or after they have landed. The arithmetic is the host's.
"""

import numpy as np
import pytest

from distrt.arrays import DTYPES
from distrt.collectives import schedule
from distrt.collectives.ring import Ring, Slots
from distrt.kernels.host import HostKernels
from distrt.reduce_op import ReduceOp
from distrt.transport.loopback import LoopbackWorld


class FarMemory(HostKernels):
    def stage_out(self, view):
        return view.view(np.uint8).copy()

    def landing(self, view):
        return np.full(view.nbytes, 0xAB, np.uint8)

    def land(self, view, buffer):
        view.view(np.uint8)[...] = buffer
        buffer[...] = 0xCD


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
