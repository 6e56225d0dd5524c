"""The heap of registered memory: blocks never overlap, and all of it comes back."""

import ctypes
import gc
import itertools
import queue
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrt.errors import InvalidArgumentError
from distrt.transport.heap import Heap


@pytest.fixture
def memory():
    return ctypes.create_string_buffer((1 << 22) + 4096)


def heap_on(memory, window=1 << 22, step=1 << 14, grown=None):
    base = -(-ctypes.addressof(memory) // 4096) * 4096
    grown = [] if grown is None else grown
    return Heap(base, window, lambda offset, nbytes: grown.append((offset, nbytes)), step)


def check_free_list(heap):
    """The three views of the free list agree, and with the live blocks they tile the heap."""
    spans = sorted([*heap._free.items(), *heap._blocks.items()])
    assert sum(nbytes for _, nbytes in spans) == heap.reserved
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))
    assert heap._starts == sorted(heap._free)
    assert not [a for a, b in itertools.pairwise(heap._starts) if a + heap._free[a] == b]
    for alignment, rooms in heap._rooms.items():
        wanted = [(o + n - -(-o // alignment) * alignment, o) for o, n in heap._free.items()]
        assert rooms == sorted(wanted)


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
    check_free_list(heap)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=25),
    order=st.randoms(use_true_random=False),
    start=st.sampled_from([0, 4096]),
)
def test_any_order_of_frees_leaves_one_free_block(sizes, order, start):
    heap = Heap(1 << 30, 1 << 24, lambda offset, nbytes: None, 1 << 14, start)
    live = {}
    for nbytes in sizes:
        offset = heap.allocate(nbytes)
        assert offset >= start and offset + nbytes <= heap.reserved
        assert all(o + n <= offset or offset + max(1, nbytes) <= o for o, n in live.items())
        live[offset] = max(1, nbytes)
        if live and order.random() < 0.4:
            heap.free(freed := order.choice(sorted(live)))
            del live[freed]
    assert heap.in_use == sum(heap._blocks.values()) >= sum(live.values())
    for offset in order.sample(sorted(live), len(live)):
        heap.free(offset)
        assert sum(heap._free.values()) + heap.in_use == heap.reserved - start
    assert heap.in_use == 0 and heap._free == {start: heap.reserved - start}


def test_small_orders_exhaustively():
    # Every order of freeing five neighbours, whole and with one kept.
    for kept in (None, 0, 2, 4):
        for order in itertools.permutations(range(5)):
            heap = Heap(1 << 30, 1 << 20, lambda offset, nbytes: None, 1 << 13)
            offsets = [heap.allocate(n) for n in (1, 128, 129, 1, 300)]
            for number in order:
                if number != kept:
                    heap.free(offsets[number])
                    check_free_list(heap)
            assert len(heap._free) == (1 if kept in (None, 0) else 2)


def test_the_smallest_block_that_fits_is_taken():
    heap = Heap(1 << 30, 1 << 20, lambda offset, nbytes: None, 1 << 14)
    holes = {}
    for nbytes in (1024, 256, 512, 2048):
        holes[nbytes] = heap.allocate(nbytes)
        heap.allocate(1)  # keeps the holes apart
    for offset in holes.values():
        heap.free(offset)
    for wanted, hole in ((200, 256), (500, 512), (1000, 1024), (2000, 2048)):
        assert heap.allocate(wanted) == holes[hole]


def test_a_paged_block_passes_over_room_that_is_not_aligned():
    # Holes of just 64 KiB that begin within a page cannot hold a paged block of 64 KiB.
    heap = Heap(1 << 30, 1 << 24, lambda offset, nbytes: None, 1 << 20)
    heap.allocate(128)
    off_page = [heap.allocate(4096 * 15 + 128) for _ in range(40)]
    for offset in off_page[::2]:
        heap.free(offset)
    offset = heap.allocate(1 << 16)
    assert offset % 4096 == 0 and offset > off_page[-1]
    check_free_list(heap)


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


def test_a_length_that_is_no_integer_is_refused(memory):
    with pytest.raises(TypeError):
        heap_on(memory).empty(2.5)


def test_addresses_and_offsets(memory):
    heap = heap_on(memory)
    first, second = heap.empty(100), heap.empty((3, 7), np.int8)
    assert heap.offset_of(first.ctypes.data) == 0
    assert heap.offset_of(second[1:, 2:].ctypes.data) == 512 + 7 + 2
    assert heap.contains(heap.base) and not heap.contains(heap.base - 1)
    assert not heap.contains(heap.base + heap.window_bytes)


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


def test_an_array_may_die_while_the_lock_is_held(memory):
    heap = heap_on(memory)
    array = heap.empty(100)
    with heap._lock:
        del array
    assert heap.in_use == 512, "only noted: the next allocation does the rest"
    assert heap.allocate(512) == 0
