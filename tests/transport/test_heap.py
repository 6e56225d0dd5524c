"""The heap of registered memory: blocks never overlap, and all of it comes back."""

import ctypes
import gc
import itertools
import queue
import random
import threading

import numpy as np
import pytest

from distrt.errors import InvalidArgumentError
from distrt.transport.heap import Heap


@pytest.fixture
def memory():
    return ctypes.create_string_buffer((1 << 22) + 4096)


def heap_on(memory, window=1 << 22, step=1 << 14, grown=None):
    base = -(-ctypes.addressof(memory) // 4096) * 4096
    grown = [] if grown is None else grown
    return Heap(base, window, lambda offset, nbytes: grown.append((offset, nbytes)), step)


def test_live_blocks_never_overlap_and_everything_comes_back(memory):
    heap, live, rng = heap_on(memory), {}, random.Random(7)
    for _ in range(4000):
        if live and (rng.random() < 0.48 or heap.in_use > 1 << 20):
            offset = rng.choice(list(live))
            del live[offset]
            heap.free(offset)
            continue
        nbytes = rng.choice([1, 127, 128, 129, 4096, 65535, 65536, 70001])
        offset = heap.allocate(nbytes)
        assert offset % (4096 if nbytes >= 65536 else 128) == 0
        assert offset + nbytes <= heap.reserved
        assert all(o + n <= offset or offset + nbytes <= o for o, n in live.items())
        live[offset] = nbytes
    for offset in live:
        heap.free(offset)
    assert heap.in_use == 0
    assert heap._free == {0: heap.reserved}
    assert heap._starts == [0] and heap._sizes == [(heap.reserved, 0)]


def test_it_grows_in_steps_that_follow_one_another(memory):
    grown = []
    heap = heap_on(memory, grown=grown)
    for _ in range(40):
        heap.allocate(3000)
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(grown))
    assert grown[0] == (0, 1 << 14) and len(grown) < 40


def test_a_full_window_says_how_much_was_asked_for(memory):
    heap = heap_on(memory, window=1 << 16)
    with pytest.raises(MemoryError, match=r"1048576 bytes were asked for, 0 are in use"):
        heap.allocate(1 << 20)
    assert heap.allocate(100) == 0, "the heap goes on"


def test_a_machine_without_room_says_so(memory):
    def grow(offset, nbytes):
        raise OSError(28, "No space left on device")

    heap = Heap(ctypes.addressof(memory), 1 << 20, grow)
    with pytest.raises(MemoryError, match="No space left"):
        heap.empty(10)


@pytest.mark.parametrize("shape", [0, (0, 3), (), 1, (3, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.complex128])
def test_arrays_are_like_numpys(memory, shape, dtype):
    heap = heap_on(memory)
    array, twin = heap.empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (twin.shape, twin.dtype)
    assert array.flags.writeable and array.flags.c_contiguous and array.flags.aligned
    array[...] = 3
    assert (array == 3).all()
    assert array.size == 0 or heap.contains(array.ctypes.data)
    assert not heap.contains(np.empty(3).ctypes.data)


def test_a_view_keeps_the_block_and_the_last_one_frees_it(memory):
    heap = heap_on(memory)
    view = heap.empty((8, 8))[2:, ::2].T
    view[...] = 5
    assert heap.allocate(256) != 0 and (view == 5).all()
    del view
    first = heap.allocate(256)
    assert first == 0, "its block is free again"


def test_the_collector_and_other_threads_may_free(memory):
    heap = heap_on(memory)
    for _ in range(300):
        cycle = [heap.empty(100)]
        cycle.append(cycle)
        handed = [heap.empty(100)]
        thread = threading.Thread(target=handed.clear)
        thread.start()
        thread.join()
    del cycle
    gc.collect()
    heap.free(heap.allocate(1))
    assert heap.in_use == 0


def test_arrays_without_elements_and_large_ones_lie_where_they_should(memory):
    heap = heap_on(memory)
    arrays = [heap.empty(n, np.uint8) for n in (0, 0, 1, 0, 65535, 65536, 65537, 0)]
    offsets = [array.ctypes.data - heap.base for array in arrays if array.size]
    assert [offset % 128 for offset in offsets] == [0] * 4
    assert [offset % 4096 for offset in offsets[2:]] == [0, 0]
    # Each of the empty ones holds a block of its own until it goes.
    assert len(heap._blocks) == 8
    del arrays
    heap.free(heap.allocate(1))
    assert heap.in_use == 0 and heap._free == {0: heap.reserved}


def test_a_window_that_was_full_serves_again_what_is_freed(memory):
    heap, held = heap_on(memory, window=1 << 18), []
    with pytest.raises(MemoryError, match=r"are reserved of at most 262144 \(the window is full\)"):
        while True:
            held.append(heap.empty(8192, np.uint8))
    full = heap.in_use
    held.pop()
    held.append(heap.empty(8192, np.uint8))
    assert heap.in_use == full and heap.reserved <= 1 << 18


def test_a_failure_to_grow_leaves_the_heap_as_it_was(memory):
    room = [1 << 14]

    def grow(offset, nbytes):
        if offset + nbytes > room[0]:
            raise OSError(28, "No space left on device")

    heap = Heap(ctypes.addressof(memory), 1 << 20, grow, 1 << 14)
    first = heap.allocate(8192)
    before = (heap.reserved, heap.in_use, dict(heap._free))
    with pytest.raises(MemoryError, match=r"16384 bytes were asked for, 8192 are in use.*No space"):
        heap.allocate(16384)
    assert before == (heap.reserved, heap.in_use, heap._free)
    room[0] = 1 << 20
    second = heap.allocate(16384)
    assert first + 8192 <= second
    heap.free(first)
    heap.free(second)
    assert heap._free == {0: heap.reserved}


def test_threads_that_allocate_and_free_at_once_never_share_a_block(memory):
    heap, handed, spoilt = heap_on(memory), queue.SimpleQueue(), []

    def body(number):
        rng = random.Random(number)
        for turn in range(400):
            array = heap.empty(rng.choice([1, 127, 129, 1000, 5000]), np.uint8)
            array[:] = number * 50 + turn % 50
            handed.put((array, number * 50 + turn % 50))
            # Whose array it frees here is a matter of chance.
            array, mark = handed.get()
            if not (array == mark).all():
                spoilt.append(number)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heap.free(heap.allocate(1))
    assert spoilt == [] and heap.in_use == 0
    assert heap._free == {0: heap.reserved}


@pytest.mark.parametrize(("shape", "dtype"), [(-1, np.float32), ((3, -2), np.int8), (3, object)])
def test_what_cannot_be_an_array_takes_no_memory(memory, shape, dtype):
    heap = heap_on(memory)
    with pytest.raises(InvalidArgumentError, match="no negative length"):
        heap.empty(shape, dtype)
    assert heap.in_use == 0


def test_a_window_can_be_used_to_its_last_byte(memory):
    heap = heap_on(memory, window=1 << 16)
    assert heap.allocate(1 << 16) == 0 and heap.reserved == 1 << 16
    # The end of what is reserved counts: half of the second block lies there already.
    heap = heap_on(memory, window=1 << 17, step=1 << 14)
    heap.allocate(1 << 13)
    assert heap.allocate((1 << 17) - (1 << 13)) == 1 << 13 and heap.reserved == 1 << 17
