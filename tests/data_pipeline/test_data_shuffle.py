"""Shuffles: permutations that depend on the seed and the epoch only, on all ranks alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distrt.data import Dataset, DistributedDataset


def order(dataset):
    return [int(x) for x in dataset]


@pytest.mark.parametrize("rows", [0, 1, 2, 6, 7, 8, 2500])
@pytest.mark.parametrize("buffer", [1, 2, 7, 3000])
def test_a_shuffle_is_a_permutation_within_its_buffer(rows, buffer):
    seen = order(Dataset.range(rows).shuffle(buffer, seed=3))
    assert sorted(seen) == list(range(rows))
    # An element can only be picked once it is in the buffer.
    assert all(value < place + buffer for place, value in enumerate(seen))
    if buffer == 1:
        assert seen == list(range(rows))


def test_picks_are_uniform():
    rows, epochs = 4, 4000
    shuffled = Dataset.range(rows).shuffle(rows, seed=0)
    counts = np.zeros((rows, rows))
    for _ in range(epochs):
        counts[np.arange(rows), order(shuffled)] += 1
    # 6 standard deviations of a binomial with p = 1/4.
    assert abs(counts - epochs / rows).max() < 6 * np.sqrt(epochs * 0.25 * 0.75)
    small = Dataset.range(3).shuffle(2, seed=1)
    firsts = [order(small)[0] for _ in range(epochs)]
    assert abs(firsts.count(0) - epochs / 2) < 6 * np.sqrt(epochs * 0.25)


@pytest.mark.parametrize("seed", [0, 123, -5, 2**40])
def test_another_order_each_epoch_and_the_same_in_a_second_run(seed):
    def run():
        dataset = Dataset.range(50).shuffle(20, seed=seed)
        return [order(dataset) for _ in range(4)]

    first, second = run(), run()
    assert first == second
    assert len({tuple(epoch) for epoch in first}) == 4
    assert first != [order(Dataset.range(50).shuffle(20, seed=seed + 1)) for _ in range(4)]


def test_without_a_seed_two_shuffles_differ():
    assert order(Dataset.range(50).shuffle(50)) != order(Dataset.range(50).shuffle(50))


def test_without_reshuffling_every_epoch_is_the_same():
    for seed in (None, 7):
        dataset = Dataset.range(50).shuffle(50, seed, reshuffle_each_iteration=False)
        first = order(dataset)
        assert order(dataset) == first
        assert order(dataset.repeat(2)) == first * 2


def test_each_repetition_is_reshuffled():
    seen = order(Dataset.range(30).shuffle(30, seed=1).repeat(3))
    parts = [tuple(seen[start : start + 30]) for start in (0, 30, 60)]
    assert all(sorted(part) == list(range(30)) for part in parts)
    assert len(set(parts)) == 3


def test_datasets_made_anew_from_a_shuffle_go_on_with_its_epochs():
    shuffled = Dataset.range(30).shuffle(30, seed=1)
    seen = [tuple(np.concatenate(list(shuffled.batch(8))).tolist()) for _ in range(3)]
    assert len(set(seen)) == 3
    again = Dataset.range(30).shuffle(30, seed=1).batch(8)
    assert seen == [tuple(np.concatenate(list(again)).tolist()) for _ in range(3)]


def test_a_shuffle_of_endless_data():
    seen = order(Dataset.range(3).repeat().shuffle(5, seed=2).take(3000))
    assert {seen.count(value) for value in range(3)} <= set(range(995, 1006))


@pytest.mark.parametrize("seed", [None, 0, 123])
@pytest.mark.parametrize("size", [2, 4])
def test_shards_are_disjoint_and_complete_in_every_epoch(size, seed, on_ranks):
    def walk(ranks):
        dataset = Dataset.range(1000).shuffle(1000, seed=seed).batch(64)
        if ranks.rank:
            next(iter(dataset))  # looking into it on one rank alone must not matter
        distributed = DistributedDataset(dataset, ranks)
        return [np.concatenate(list(distributed)).tolist() for _ in range(4)]

    def run():
        shards = on_ranks(size, walk)
        epochs = []
        for epoch in range(4):
            union = list(itertools.chain.from_iterable(shard[epoch] for shard in shards))
            assert sorted(union) == list(range(1000))
            epochs.append(tuple(union))
        assert len(set(epochs)) == 4
        return epochs

    assert (run() == run()) is (seed is not None)


def test_several_shuffles_without_seed_agree(on_ranks):
    def walk(ranks):
        dataset = Dataset.range(40).shuffle(40).map(lambda x: x).shuffle(9, seed=5)
        dataset = dataset.batch(8).shuffle(3).repeat(2)
        return [part.tolist() for part in DistributedDataset(dataset, ranks)]

    shards = on_ranks(3, walk)
    batches = [[*itertools.chain(*parts)] for parts in zip(*shards, strict=True)]
    for half in (batches[:5], batches[5:]):
        assert sorted(itertools.chain(*half)) == list(range(40))
    assert batches[:5] != batches[5:]
