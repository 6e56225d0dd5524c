"""Distributing is one agreement: every rank raises the same error, or none does."""

from __future__ import annotations

import numpy as np
import pytest

from distrt.data import Dataset, DistributedDataset
from distrt.errors import DTypeError, InvalidArgumentError, NotFoundError


def refusals(on_ranks, size, dataset_of, kind):
    """Return the one text with which every rank refuses ``dataset_of(rank)``."""

    def walk(ranks):
        dataset = dataset_of(ranks.rank)
        with pytest.raises(kind) as caught:
            DistributedDataset(dataset, ranks)
        assert ranks.calls == 1
        return str(caught.value)

    (text,) = set(on_ranks(size, walk))
    return text


def test_the_ranks_talk_once_and_never_while_iterating(on_ranks):
    def walk(ranks):
        distributed = DistributedDataset(Dataset.range(20).shuffle(20).batch(4).prefetch(1), ranks)
        for _ in range(2):
            assert len(list(distributed)) == 5
        return ranks.calls

    assert on_ranks(3, walk) == [1, 1, 1]


def test_a_file_missing_on_one_rank_is_named_on_all(on_ranks, tmp_path):
    np.save(tmp_path / "here.npy", np.arange(8))

    def dataset_of(rank):
        return Dataset.from_npz(tmp_path / ("gone.npy" if rank == 2 else "here.npy")).batch(4)

    text = refusals(on_ranks, 3, dataset_of, NotFoundError)
    assert "rank 2" in text
    assert "gone.npy" in text
    assert "rank 0" not in text


def test_files_in_other_places_with_equal_contents_are_fine(on_ranks, tmp_path):
    for rank in range(2):
        np.save(tmp_path / f"copy{rank}.npy", np.arange(8))

    def walk(ranks):
        dataset = Dataset.from_npz(tmp_path / f"copy{ranks.rank}.npy").batch(8)
        return [part.tolist() for part in DistributedDataset(dataset, ranks)]

    assert on_ranks(2, walk) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_files_of_other_lengths_are_not(on_ranks, tmp_path):
    for rank in range(2):
        np.save(tmp_path / f"copy{rank}.npy", np.arange(8 + rank))

    def dataset_of(rank):
        return Dataset.from_npz(tmp_path / f"copy{rank}.npy").repeat().batch(8)

    text = refusals(on_ranks, 2, dataset_of, InvalidArgumentError)
    assert "from_npz(8 rows)" in text
    assert "from_npz(9 rows)" in text


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(7),
        Dataset.from_tensor_slices(np.ones((5, 4))),
        Dataset.range(7).shuffle(7).map(lambda x: x),
        Dataset.range(7).batch(4).map(np.sum),
        Dataset.range(7).batch(4).map(lambda x: {"x": x, "step": 1}),
        Dataset.from_tensors(5),
    ],
)
def test_elements_that_cannot_be_split_are_refused(on_ranks, dataset):
    text = refusals(on_ranks, 2, lambda _: dataset, InvalidArgumentError)
    assert ".batch(global_batch_size)" in text
    assert "  ranks 0, 1: " in text


def test_the_component_that_cannot_be_split_is_named(on_ranks):
    dataset = Dataset.range(7).batch(4).map(lambda x: {"x": x, "step": 1})
    assert "['step']" in refusals(on_ranks, 2, lambda _: dataset, InvalidArgumentError)


@pytest.mark.parametrize(
    ("dataset_of", "found"),
    [
        (lambda rank: Dataset.range(8 + (rank == 1)).batch(4), "range(0, 9, 1, int64)"),
        (lambda rank: Dataset.range(8).batch(4 + (rank == 1)), "batch(5, False)"),
        (lambda rank: Dataset.range(8).shuffle(8, seed=rank).batch(4), "seed=1"),
        (
            lambda rank: Dataset.from_tensor_slices(np.ones(8, "f8" if rank == 1 else "f4")).batch(
                4
            ),
            "element: float64[None]",
        ),
    ],
)
def test_different_datasets_are_told_apart_by_rank(on_ranks, dataset_of, found):
    text = refusals(on_ranks, 3, dataset_of, InvalidArgumentError)
    assert "  rank 0: " in text or "  ranks 0, 2: " in text
    assert any(line.strip().startswith("rank 1:") and found in line for line in text.split("\n"))


def test_a_map_function_that_fails_on_one_rank(on_ranks):
    def failing(x):
        raise KeyError("label")

    text = refusals(
        on_ranks,
        2,
        lambda rank: Dataset.range(8).map(failing if rank else lambda x: x).batch(4),
        InvalidArgumentError,
    )
    assert "rank 1: KeyError: 'label'" in text


def test_the_failing_rank_keeps_the_cause(on_ranks):
    def failing(x):
        raise KeyError("label")

    def walk(ranks):
        dataset = Dataset.range(8).map(failing if ranks.rank else lambda x: x).batch(4)
        with pytest.raises(InvalidArgumentError) as caught:
            DistributedDataset(dataset, ranks)
        return type(caught.value.__cause__)

    assert on_ranks(2, walk) == [type(None), KeyError]


@pytest.mark.parametrize(
    ("thing", "got"),
    [
        ([1, 2, 3], "got a list of numbers"),
        (np.ones(4), "got ndarray"),
        ((np.ones(4), np.ones(4)), "got tuple"),
        ({"x": np.ones(4)}, "got dict"),
        ("text", "got str"),
        (None, "got NoneType"),
        (7, "got int"),
    ],
)
def test_what_is_no_dataset_is_refused(on_ranks, thing, got):
    assert got in refusals(on_ranks, 2, lambda _: thing, DTypeError)


def test_a_distributed_dataset_is_not_distributed_again(on_ranks):
    def walk(ranks):
        once = DistributedDataset(Dataset.range(8).batch(4), ranks)
        with pytest.raises(DTypeError, match="got DistributedDataset"):
            DistributedDataset(once, ranks)
        return True

    assert on_ranks(2, walk) == [True, True]
