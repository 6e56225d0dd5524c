"""N ranks as N threads, with the one collective that the data room needs."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

DEADLINE = 20.0


class ThreadRanks:
    """One rank of a group of threads; objects travel pickled, as over MPI."""

    def __init__(self, rank: int, boxes: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(boxes)
        self.calls = 0
        self._boxes = boxes
        self._barrier = barrier

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.calls += 1
        self._boxes[self.rank] = pickle.dumps(obj)
        self._barrier.wait(DEADLINE)
        gathered = [pickle.loads(box) for box in self._boxes]
        self._barrier.wait(DEADLINE)
        return gathered


def run_on_ranks(size: int, body: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Return ``body(ranks)`` of every rank; the first exception of any is raised."""
    barrier = threading.Barrier(size)
    boxes = [b""] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadRanks(rank, boxes, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    # A barrier that a failing rank broke says nothing about what failed.
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in real or errors:
        raise error
    return results


@pytest.fixture(scope="session")
def on_ranks() -> Callable[[int, Callable[[ThreadRanks], Any]], list[Any]]:
    return run_on_ranks
