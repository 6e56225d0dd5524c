"""The sharder: the split, the push-down, and what a part looks like."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrt.data import ArraySpec, Dataset, DistributedDataset, InputContext
from distrt.data.sharder import Share
from distrt.errors import InvalidArgumentError


def parts_of(dataset_of, size, on_ranks):
    """Return parts[step][rank], after checking that all ranks took equally many steps."""
    walks = on_ranks(size, lambda ranks: list(DistributedDataset(dataset_of(ranks), ranks)))
    return [list(step) for step in zip(*walks, strict=True)]


def test_37_elements_by_8_on_4_ranks_take_5_steps(on_ranks):
    data = np.arange(37 * 4, dtype=np.float32).reshape(37, 2, 2)
    steps = parts_of(lambda _: Dataset.from_tensor_slices(data).batch(8), 4, on_ranks)
    assert [[len(part) for part in step] for step in steps] == [[2, 2, 2, 2]] * 4 + [[2, 2, 1, 0]]
    assert {(part.shape[1:], part.dtype) for step in steps for part in step} == {
        ((2, 2), np.dtype(np.float32))
    }
    assert np.concatenate([part for step in steps for part in step]).tolist() == data.tolist()


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 97])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 97, 98])
def test_shares_tile_the_batch_in_chunks_of_the_ceiling(length, size):
    shares = [Share(rank, size).of(length) for rank in range(size)]
    assert [row for share in shares for row in range(length)[share]] == list(range(length))
    chunk = -(-length // size)
    assert [len(range(length)[share]) for share in shares] == [
        min(chunk, max(length - rank * chunk, 0)) for rank in range(size)
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_put_together_are_the_global_batches(data, on_ranks):
    rows = data.draw(st.integers(0, 40), label="rows")
    batch = data.draw(st.integers(1, 17), label="batch")
    size = data.draw(st.integers(1, 5), label="ranks")
    drop = data.draw(st.booleans(), label="drop")
    change = {
        "map": lambda d: d.map(lambda pair: {"x": pair["x"] * 2, "y": pair["y"]}),
        "shuffle": lambda d: d.shuffle(5, seed=3),
        "repeat": lambda d: d.repeat(2),
        "take": lambda d: d.take(11),
        "skip": lambda d: d.skip(1),
        "prefetch": lambda d: d.prefetch(2),
    }
    names = st.lists(st.sampled_from(sorted(change)), max_size=4)
    before, after = data.draw(names, label="before"), data.draw(names, label="after")

    def make(_):
        source = {"x": np.arange(rows * 3).reshape(rows, 3), "y": np.arange(rows, dtype=np.int8)}
        dataset = Dataset.from_tensor_slices(source)
        for name in before:
            dataset = change[name](dataset)
        dataset = dataset.batch(batch, drop)
        for name in after:
            dataset = change[name](dataset)
        return dataset

    whole = list(make(None))
    parts = parts_of(make, size, on_ranks)
    assert len(parts) == len(whole)
    for step, expected in zip(parts, whole, strict=True):
        for name, leaf in expected.items():
            joined = np.concatenate([part[name] for part in step])
            assert joined.dtype == leaf.dtype
            assert joined.tolist() == leaf.tolist()
            assert [len(part[name]) for part in step] == [
                len(leaf[Share(rank, size).of(len(leaf))]) for rank in range(size)
            ]


class Calls:
    """Counts what a map function sees, per rank."""

    def __init__(self):
        self.seen = collections.defaultdict(list)

    def map(self, rank):
        def record(x):
            self.seen[rank].append(np.array(x).tolist())
            return x + 1

        return record


@pytest.mark.parametrize(
    "tail",
    [
        lambda d: d,
        lambda d: d.prefetch(2),
        lambda d: d.take(3).skip(1).repeat(2),
        lambda d: d.shuffle(3, seed=1),
    ],
)
def test_a_rank_makes_only_its_own_rows(tail, on_ranks):
    calls = Calls()

    def walk(ranks):
        # The prefetch before the batch must not make the rows of the others either.
        dataset = Dataset.range(40).map(calls.map(ranks.rank)).prefetch(2)
        distributed = DistributedDataset(tail(dataset.batch(8)), ranks)
        calls.seen[ranks.rank].clear()  # what distributing looked at
        return np.concatenate(list(distributed)).tolist()

    for rank, walked in enumerate(on_ranks(4, walk)):
        assert [x + 1 for x in calls.seen[rank]] == walked


def test_a_map_after_the_batch_sees_the_whole_batch_on_every_rank(on_ranks):
    calls = Calls()

    def walk(ranks):
        dataset = Dataset.range(9).batch(4).map(calls.map(ranks.rank)).prefetch(1)
        distributed = DistributedDataset(dataset, ranks)
        calls.seen[ranks.rank].clear()
        return [part.tolist() for part in distributed]

    walks = on_ranks(2, walk)
    assert walks == [[[1, 2], [5, 6], [9]], [[3, 4], [7, 8], []]]
    assert calls.seen[0] == calls.seen[1] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_components_are_cut_by_their_own_first_dimension(on_ranks):
    steps = parts_of(
        lambda _: Dataset.range(4).batch(4).map(lambda x: (x, np.append(x, x))), 3, on_ranks
    )
    assert [(a.tolist(), b.tolist()) for a, b in steps[0]] == [
        ([0, 1], [0, 1, 2]),
        ([2, 3], [3, 0, 1]),
        ([], [2, 3]),
    ]


def test_empty_parts_of_mapped_rows_keep_dtype_and_shape(on_ranks):
    def make(_):
        images = Dataset.from_tensor_slices(np.zeros((1, 28, 28), np.uint8))
        return images.map(lambda image: (image.astype(np.float32), 1)).batch(8)

    ((first, *others),) = parts_of(make, 4, on_ranks)
    assert first[0].shape == (1, 28, 28)
    for image, label in others:
        assert (image.shape, image.dtype) == ((0, 28, 28), np.float32)
        assert (label.shape, label.dtype) == ((0,), np.int32)


def test_the_spec_of_a_part_is_static_where_the_batch_divides(on_ranks):
    def spec(batch, drop):
        rows = Dataset.from_tensor_slices(np.zeros((32, 3), np.float32)).batch(batch, drop)
        return on_ranks(4, lambda ranks: DistributedDataset(rows, ranks).element_spec)

    assert spec(8, True) == [ArraySpec((2, 3), np.float32)] * 4
    assert spec(8, False) == spec(6, True) == [ArraySpec((None, 3), np.float32)] * 4


def test_place_is_applied_to_every_array(on_ranks):
    def walk(ranks):
        dataset = Dataset.from_tensor_slices({"x": [1, 2, 3], "y": [4, 5, 6]}).batch(3)
        (part,) = DistributedDataset(dataset, ranks, place=lambda leaf: leaf * 10)
        return {name: leaf.tolist() for name, leaf in part.items()}

    assert on_ranks(2, walk) == [{"x": [10, 20], "y": [40, 50]}, {"x": [30], "y": [60]}]


def test_one_rank_passes_everything_through(on_ranks):
    (elements,) = on_ranks(1, lambda ranks: list(DistributedDataset(Dataset.range(3), ranks)))
    assert elements == [0, 1, 2]


def test_lengths_count_steps(on_ranks):
    def walk(ranks):
        distributed = DistributedDataset(Dataset.range(10).batch(4), ranks)
        endless = DistributedDataset(Dataset.range(10).batch(4).repeat(), ranks)
        with pytest.raises(TypeError):
            len(endless)
        return len(distributed), distributed.cardinality(), endless.cardinality()

    assert on_ranks(3, walk) == [(3, 3, -1)] * 3


def test_two_iterators_interleave(on_ranks):
    def walk(ranks):
        distributed = DistributedDataset(Dataset.range(8).batch(4), ranks)
        one, two = iter(distributed), iter(distributed)
        return [next(iterator).tolist() for iterator in (one, two, one, two)]

    assert on_ranks(2, walk) == [
        [[0, 1], [0, 1], [4, 5], [4, 5]],
        [[2, 3], [2, 3], [6, 7], [6, 7]],
    ]


def test_input_context_divides_the_global_batch():
    context = InputContext(num_input_pipelines=4, input_pipeline_id=3, num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(32) == 8
    assert InputContext().get_per_replica_batch_size(7) == 7
    with pytest.raises(InvalidArgumentError, match=r"divisible by the 4 replicas.*28 and 32"):
        context.get_per_replica_batch_size(30)
