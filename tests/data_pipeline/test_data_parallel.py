"""map in threads and in processes: order, errors, ends; no process ever starts MPI."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

from distrt.data import Dataset, DistributedDataset, WorkerError
from distrt.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(60)


def children():
    me, found = os.getpid(), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()  # noqa: SIM115
            command = open(f"/proc/{pid}/cmdline").read()  # noqa: SIM115
        except OSError:
            continue
        if int(fields[1]) == me and "worker.py" in command and fields[0] != "Z":
            found.append(int(pid))
    return found


def ended(deadline=10):
    gc.collect()
    stop = time.monotonic() + deadline
    while children() and time.monotonic() < stop:
        time.sleep(0.05)
    return children() == []


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("calls", [1, 2, -1])
@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_the_elements_are_those_of_a_plain_map(count, calls, processes):
    offset = 5

    def function(x, y):
        return {"sum": x + y + offset, "bytes": str(int(x)).encode()}

    pairs = Dataset.zip((Dataset.range(count), Dataset.range(100, 100 + count)))
    mapped = pairs.map(function, calls, processes=processes)
    assert len(mapped) == count
    plain = list(pairs.map(function).batch(8).as_numpy_iterator())
    seen = list(mapped.batch(8).as_numpy_iterator())
    assert len(seen) == len(plain)
    for got, want in zip(seen, plain, strict=True):
        assert got["sum"].tolist() == want["sum"].tolist()
        assert got["bytes"].tolist() == want["bytes"].tolist()
    assert [int(e["sum"]) for e in mapped] == [100 + 2 * i + offset for i in range(count)]


def test_threads_work_at_once_and_share_memory():
    together = threading.Barrier(4, timeout=20)

    def meet(x):
        if x >= 0:
            together.wait()
        return x

    dataset = Dataset.range(-2, 6).map(meet, 4).batch(8).skip(0)
    # The first two are the examples'; then four at a time come together.
    rows = Dataset.range(4).map(meet, 4).batch(4)
    assert dataset.element_spec.shape == (None,)
    handles = list(rows._node.handles((0,)))
    assert rows._node.fetch(handles[0]).tolist() == [0, 1, 2, 3]


class CustomError(Exception):
    def __init__(self, a, b):  # cannot be made again from its pickled args
        super().__init__(f"{a}{b}")


@pytest.mark.parametrize("processes", [False, True])
def test_an_error_reaches_the_loop_with_its_traceback(processes):
    def fails_at_five(x):
        if x == 5:
            raise KeyError("row five")
        return x

    dataset = Dataset.range(9).map(fails_at_five, 2, processes=processes).batch(3)
    seen = []
    with pytest.raises(KeyError, match="row five") as caught:
        seen.extend(part.tolist() for part in dataset)
    assert seen == [[0, 1, 2]]
    frames = [entry.name for entry in caught.traceback]
    if processes:
        assert isinstance(caught.value.__cause__, WorkerError)
        assert "in fails_at_five" in str(caught.value.__cause__)
    else:
        assert "fails_at_five" in frames


def test_an_error_that_cannot_travel_comes_as_text():
    def fails(x):
        raise CustomError("no", "where")

    node = Dataset.range(3).map(fails, 2, processes=True)._node
    with pytest.raises(WorkerError, match=r"(?s)worker process.*CustomError: nowhere"):
        node.gather([0, 1, 2])


def test_a_worker_that_dies_is_no_hang():
    def dies(x):
        if x == 7:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return x

    with pytest.raises(WorkerError, match="ended by signal 9"):
        list(Dataset.range(9).map(dies, 2, processes=True).batch(3))
    gc.collect()


def test_workers_end_with_the_dataset():
    dataset = Dataset.range(8).map(lambda x: x + 1, 2, processes=True).batch(4)
    assert [part.tolist() for part in dataset] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert len(children()) == 2
    del dataset
    assert ended()


def test_workers_see_no_launcher_and_never_start_mpi(monkeypatch):
    for name in (
        "PMI_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "SLURM_PROCID",
        "MPI_LOCALRANKID",
    ):
        monkeypatch.setenv(name, "3")

    def look(x):
        import os
        import sys

        launched = [k for k in os.environ if k.startswith(("PMI", "OMPI", "SLURM", "MPI"))]
        print("printed by a worker")  # must not disturb the answers
        return np.array([len(launched), "mpi4py.MPI" in sys.modules, "distrt" in sys.modules])

    (batch,) = Dataset.range(3).map(look, 2, processes=True).batch(3)
    assert batch[:, :2].tolist() == [[0, 0]] * 3


def test_what_cannot_travel_is_said():
    lock = threading.Lock()
    dataset = Dataset.range(3).map(lambda x: (lock, x)[1], 2, processes=True).batch(3)
    with pytest.raises(WorkerError, match="cannot be sent to another process"):
        list(dataset)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_error_in_a_process_is_raised_on_all_ranks(size, on_ranks):
    def fails(x):
        if x == 7:
            raise ValueError("seven")
        return x

    def body(ranks):
        dataset = Dataset.range(12).map(fails, 2, processes=True).batch(6)
        with pytest.raises(ValueError, match="seven") as caught:
            list(DistributedDataset(dataset, ranks))
        return isinstance(caught.value, InvalidArgumentError)

    assert sorted(on_ranks(size, body)) == [False] + [True] * (size - 1)
