"""get_state and set_state: the very batches that would have come, on as many ranks or on others."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from distrt.data import AutoShardPolicy, Dataset, DistributedDataset, Options
from distrt.errors import InvalidArgumentError

SIZES = [1, 2, 3, 4]
PIPELINES = {
    "shuffled": lambda: Dataset.range(23).shuffle(23, seed=5).batch(4),
    "drawn": lambda: Dataset.range(23).shuffle(7).batch(4),
    "mapped": lambda: Dataset.range(23).shuffle(23, seed=5).map(lambda x: x * 3).batch(4),
    "prefetched": lambda: Dataset.range(23).shuffle(23).batch(4).map(lambda x: x + 1).prefetch(2),
    "repeated": lambda: Dataset.range(11).shuffle(11).repeat(2).batch(4),
}


def walk(distributed, passes):
    return [[part.tolist() for part in distributed] for _ in range(passes)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("step", [0, 1, 3, 6])
def test_a_pass_goes_on_where_it_stood(size, name, step, on_ranks):
    def body(ranks):
        whole = DistributedDataset(PIPELINES[name](), ranks)
        first = [part.tolist() for part in whole]
        iterator = iter(whole)
        taken = [part.tolist() for part in itertools.islice(iterator, step)]
        state = json.loads(json.dumps(iterator.get_state()))
        rest = [part.tolist() for part in iterator]
        after = walk(whole, 2)

        # Another process, as it were: another dataset with, where it draws one, another seed.
        again = DistributedDataset(PIPELINES[name](), ranks)
        resumed = iter(again)
        resumed.set_state(state)
        assert [part.tolist() for part in resumed] == rest
        assert walk(again, 2) == after
        assert ranks.rank or first != taken + rest
        return state

    states = on_ranks(size, body)
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_on_other_ranks_each_row_that_is_left_is_seen_once(before, after, on_ranks):
    def make():
        return Dataset.range(23).shuffle(23).map(lambda x: x).batch(4)

    def start(ranks):
        iterator = iter(DistributedDataset(make(), ranks))
        taken = [part.tolist() for part in itertools.islice(iterator, 3)]
        return iterator.get_state(), taken

    def go_on(ranks):
        distributed = DistributedDataset(make(), ranks)
        iterator = iter(distributed)
        iterator.set_state(state)
        return [part.tolist() for part in iterator], walk(distributed, 1)[0]

    started = on_ranks(before, start)
    state = started[0][0]
    resumed = on_ranks(after, go_on)
    seen = [row for _, taken in started for part in taken for row in part]
    seen += [row for rest, _ in resumed for part in rest for row in part]
    assert sorted(seen) == list(range(23))
    assert len({len(rest) for rest, _ in resumed}) == 1
    assert sorted(row for _, steps in resumed for part in steps for row in part) == list(range(23))


def off(dataset):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    return dataset.with_options(options)


def test_what_cannot_be_divided_anew_is_refused(on_ranks):
    def start(ranks):
        iterator = iter(DistributedDataset(off(Dataset.range(9).batch(4)), ranks, workers=True))
        next(iterator)
        return iterator.get_state()

    state = on_ranks(2, start)[0]

    def body(ranks):
        iterator = iter(DistributedDataset(off(Dataset.range(9).batch(4)), ranks, workers=True))
        with pytest.raises(InvalidArgumentError, match=r"of 2 ranks, these are 3.*OFF"):
            iterator.set_state(state)
        return True

    assert on_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("state", [{}, {"version": 1}, None, {"version": 2}])
def test_no_state_and_states_of_other_pipelines_are_refused(state, on_ranks):
    def body(ranks):
        iterator = iter(DistributedDataset(Dataset.range(9).batch(4), ranks))
        with pytest.raises(InvalidArgumentError, match="expected what get_state gives"):
            iterator.set_state(state)
        other = iter(DistributedDataset(Dataset.range(9).batch(5), ranks)).get_state()
        with pytest.raises(InvalidArgumentError, match=r"another dataset: expected .*batch\(4"):
            iterator.set_state(other)
        return [part.tolist() for part in iterator]

    parts = on_ranks(1, body)[0]
    assert np.concatenate(parts).tolist() == list(range(9))


def test_rows_before_the_step_are_not_made_again(on_ranks):
    made = []

    def note(x):
        made.append(int(x))
        return x

    def body(ranks):
        dataset = Dataset.range(12).map(note).batch(4)
        iterator = iter(DistributedDataset(dataset, ranks))
        next(iterator)
        state = iterator.get_state()
        again = iter(DistributedDataset(dataset, ranks))
        again.set_state(state)
        made.clear()
        list(again)
        return sorted(made)

    assert on_ranks(1, body) == [list(range(4, 12))]
