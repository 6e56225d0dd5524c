"""Prefetching: order, bounds, errors and the end of the thread."""

from __future__ import annotations

import gc
import threading
import time
import traceback

import pytest

from distrt.data import Dataset, DistributedDataset


def prefetchers():
    return [thread for thread in threading.enumerate() if thread.name == "distrt-prefetch"]


@pytest.mark.parametrize("buffer", [None, -1, 0, 1, 2, 100])
def test_the_elements_are_the_same(buffer):
    dataset = Dataset.range(20).prefetch(buffer).map(lambda x: x * 2).prefetch(buffer).batch(3)
    assert [part.tolist() for part in dataset] == [
        list(range(2 * start, 2 * min(start + 3, 20), 2)) for start in range(0, 20, 3)
    ]
    assert len(dataset) == 7
    assert prefetchers() == []


def test_at_most_buffer_size_elements_are_made_ahead():
    made = []
    dataset = Dataset.range(100).map(lambda x: made.append(int(x)) or x).prefetch(3)
    iterator = iter(dataset)
    next(iterator)
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert made == [0, 1, 2, 3]
    iterator.close()


def test_work_and_consumer_overlap():
    ready = threading.Event()

    def wait_for_consumer(x):
        assert x == 0 or ready.wait(10)
        return x

    # The consumer holds element 0 while the thread is inside element 1.
    iterator = iter(Dataset.range(2).map(wait_for_consumer).prefetch(1))
    assert next(iterator) == 0
    ready.set()
    assert next(iterator) == 1


def fails_at_three(x):
    if x == 3:
        raise KeyError("the third")
    return x


@pytest.mark.parametrize("nested", [False, True])
def test_an_error_reaches_the_consumer_in_order_with_its_traceback(nested):
    dataset = Dataset.range(6).map(fails_at_three).prefetch(2)
    dataset = dataset.map(lambda x: x).prefetch(2) if nested else dataset
    seen = []
    with pytest.raises(KeyError, match="the third") as caught:
        for x in dataset:
            seen.append(int(x))
    assert seen == [0, 1, 2]
    assert "fails_at_three" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert prefetchers() == []


def test_leaving_the_loop_early_leaves_no_thread():
    dataset = Dataset.range(1000).repeat().prefetch(2).map(lambda x: x).batch(4).prefetch(2)
    for _ in dataset:
        break
    gc.collect()
    assert prefetchers() == []
    iterator = iter(dataset)
    next(iterator)
    assert len(prefetchers()) == 2
    del iterator
    gc.collect()
    assert prefetchers() == []


def test_a_distributed_iterator_ends_its_thread_when_collected(on_ranks):
    def walk(ranks):
        iterator = iter(DistributedDataset(Dataset.range(64).batch(4).prefetch(2), ranks))
        return next(iterator).tolist()

    assert on_ranks(2, walk) == [[0, 1], [2, 3]]
    gc.collect()
    assert prefetchers() == []


def test_an_iterator_that_was_never_advanced_has_no_thread():
    iterator = iter(Dataset.range(5).prefetch(1))
    assert prefetchers() == []
    del iterator
