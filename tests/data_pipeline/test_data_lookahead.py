"""What ranks say one step ahead: equal steps, errors on all ranks, early ends, same data."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from distrt.data import Dataset, DistributedDataset, DistributedDatasetsFromFunction
from distrt.data.pipeline import Stream
from distrt.errors import DataLossError, InvalidArgumentError

SIZES = [1, 2, 3, 4]


def failing_at(row, error):
    def check(x):
        if x == row:
            raise error
        return x

    return check


def lengths(counts, batch=2):
    """Datasets of so many rows for the ranks; numbered so that each row is told apart."""

    def make(context):
        rank = context.input_pipeline_id
        rows = 1000 * rank + np.arange(counts[rank % len(counts)])
        return Dataset.from_tensor_slices(rows).batch(batch)

    return make


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("row", [2, 5, 16])
def test_an_error_of_one_rank_is_raised_on_all(size, row, on_ranks):
    # Rows of the first step, of another, and of the last; each belongs to one rank.
    def body(ranks):
        dataset = Dataset.range(1, 18).map(failing_at(row + 1, KeyError("bad row"))).batch(4)
        seen = []
        with pytest.raises((KeyError, InvalidArgumentError)) as caught:
            seen.extend(len(part) for part in DistributedDataset(dataset, ranks))
        own = isinstance(caught.value, KeyError)
        if not own:
            assert "KeyError: 'bad row'" in str(caught.value), caught.value
            assert "in check" in str(caught.value)  # the traceback came along
            assert f"step {row // 4} of pass 0" in str(caught.value)
        return own, len(seen)

    seen = on_ranks(size, body)
    assert sum(own for own, _ in seen) == 1
    assert [steps for _, steps in seen] == [row // 4] * size


def test_an_error_keeps_its_class_on_the_other_ranks(on_ranks):
    def body(ranks):
        check = failing_at(1, DataLossError("file a: record cut short"))
        with pytest.raises(DataLossError, match="file a: record cut short"):
            list(DistributedDataset(Dataset.range(8).skip(1).map(check).batch(4), ranks))
        return True

    assert on_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("counts", [[0, 0], [5, 1], [1, 5], [0, 7, 3], [4, 4]])
def test_all_ranks_take_the_steps_of_the_longest(size, counts, on_ranks):
    def body(ranks):
        distributed = DistributedDatasetsFromFunction(lengths(counts), ranks, workers=True)
        return [[part.tolist() for part in distributed] for _ in range(2)]

    most = max(-(-counts[rank % len(counts)] // 2) for rank in range(size))
    for rank, passes in enumerate(on_ranks(size, body)):
        rows = 1000 * rank + np.arange(counts[rank % len(counts)])
        for steps in passes:
            assert len(steps) == most
            assert list(itertools.chain(*steps)) == rows.tolist()


@pytest.mark.parametrize("leavers", [[0], [2], [0, 1], [0, 1, 2]])
def test_a_rank_may_leave_a_pass_early(leavers, on_ranks):
    def body(ranks):
        distributed = DistributedDatasetsFromFunction(lengths([12, 12]), ranks, workers=True)
        seen = []
        for step, part in enumerate(distributed):
            seen.append(part.tolist())
            if ranks.rank in leavers and step == 1 + ranks.rank:
                break
        del part
        # The next pass is in step again, whoever left the first one, and when.
        return len(seen), [part.tolist() for part in distributed]

    for rank, (steps, after) in enumerate(on_ranks(3, body)):
        assert steps == (2 + rank if rank in leavers else 6)
        assert list(itertools.chain(*after)) == (1000 * rank + np.arange(12)).tolist()


def test_two_iterators_in_turns(on_ranks):
    def body(ranks):
        train = DistributedDataset(Dataset.range(20).map(lambda x: x + 1).batch(5), ranks)
        evaluation = DistributedDatasetsFromFunction(lengths([3, 1]), ranks, workers=True)
        seen = []
        for part in train:
            seen.append((part.tolist(), list(itertools.chain(*evaluation))))
        first, second = iter(train), iter(train)
        both = [(a.tolist(), b.tolist()) for a, b in zip(first, second, strict=True)]
        return seen, both

    for rank, (seen, both) in enumerate(on_ranks(2, body)):
        cut = slice(0, 3) if rank == 0 else slice(3, 5)
        parts = [list(range(5 * step + 1, 5 * step + 6))[cut] for step in range(4)]
        assert [part for part, _ in seen] == parts
        assert all(rows == [1000 * rank + i for i in range(3 - 2 * rank)] for _, rows in seen)
        assert both == [(part, part) for part in parts]


def test_no_answer_is_waited_for_that_is_still_to_be_made(on_ranks):
    """While rank 1 computes in step t, rank 0 gets step t + 1: its answer is already there."""
    gate = threading.Event()

    def body(ranks):
        distributed = iter(DistributedDataset(Dataset.range(9).map(abs).batch(3), ranks))
        next(distributed)
        if ranks.rank == 1:
            assert gate.wait(10)
        else:
            next(distributed)
            gate.set()
        return len(list(distributed))

    assert on_ranks(2, body) == [1, 2]


@dataclass(frozen=True, eq=False)
class Readings(Stream):
    """A stream that nothing proves equal on the ranks."""

    unproven = True
    rows: np.ndarray

    def handles(self, epoch):
        return iter(self.rows)

    def example(self, variant):
        return np.int64(0)

    @property
    def element_spec(self):
        return Dataset.range(1).element_spec

    def cardinality(self):
        return -2

    def describe(self):
        return "readings"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_read_other_data_are_told_before_the_batch(size, on_ranks):
    def body(ranks):
        rows = np.arange(12)
        assert sum(map(len, DistributedDataset(Dataset(Readings(rows)).batch(4), ranks))) in (
            12,
            -(-12 // size),
            -(-4 // size) * 3,
            3 * max(0, 4 - ranks.rank * -(-4 // size)),
        )
        if ranks.rank == size - 1:
            rows = rows.copy()
            rows[6] = 99
        seen = []
        try:
            for part in DistributedDataset(Dataset(Readings(rows)).batch(4).prefetch(2), ranks):
                seen.append(part)
        except InvalidArgumentError as error:
            assert "read different data up to step 1" in str(error)
            assert "Give shuffles and samplers a seed" in str(error)
        return len(seen)

    assert on_ranks(size, body) == [3 if size == 1 else 1] * size


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_deadline(on_ranks):
    from distrt.errors import PeerError

    def body(ranks):
        distributed = DistributedDataset(Dataset.range(8).map(abs).batch(4), ranks)
        distributed._channel.timeout_seconds = 0.5
        if ranks.rank == 1:
            time.sleep(1.5)
            return True
        with pytest.raises(PeerError, match="pass 0 over a distributed dataset"):
            next(iter(distributed))
        return True

    assert on_ranks(2, body) == [True, True]
