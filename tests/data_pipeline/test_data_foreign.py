"""Sequences, iterables, torch's and TensorFlow's datasets in place of a Dataset."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from distrt.data import ArraySpec, Dataset, DistributedDataset, as_dataset
from distrt.errors import DTypeError, InvalidArgumentError

SIZES = [1, 2, 3, 4]


def together(on_ranks, size, make, passes=1):
    """Return the batches of each pass, put together from the parts of all ranks."""

    def body(ranks):
        distributed = DistributedDataset(make(ranks.rank), ranks)
        return [list(distributed) for _ in range(passes)]

    seen = on_ranks(size, body)
    return [
        [np.concatenate(parts) for parts in zip(*(mine[p] for mine in seen), strict=True)]
        for p in range(passes)
    ]


def lists(batches):
    return [batch.tolist() for batch in batches]


BATCHES = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 9)]


class Sequence:
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return BATCHES[range(len(BATCHES))[index]]


class Anew:
    def __iter__(self):
        return iter(BATCHES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [lambda: BATCHES, Sequence, Anew, lambda: iter(BATCHES)])
def test_sequences_and_iterables_of_batches(size, make, on_ranks):
    (batches,) = together(on_ranks, size, lambda rank: make())
    assert lists(batches) == lists(BATCHES)
    batches[0][:] = -1  # the caller's own
    assert BATCHES[0].tolist() == [0, 1, 2, 3]


def test_structures_and_specs():
    rows = as_dataset([{"x": np.float32(i), "y": (i, [i, i])} for i in range(5)])
    assert rows.element_spec == {
        "x": ArraySpec((), np.float32),
        "y": (ArraySpec((), np.int32), ArraySpec((2,), np.int32)),
    }
    assert [len(batch["x"]) for batch in rows.batch(2)] == [2, 2, 1]
    assert len(rows) == 5 and as_dataset(rows) is rows
    assert as_dataset(BATCHES).element_spec == ArraySpec((None,), np.int64)
    assert as_dataset(Anew()).element_spec == ArraySpec((None,), np.int64)


def test_an_iterator_is_good_for_one_pass(on_ranks):
    def body(ranks):
        distributed = DistributedDataset(iter(BATCHES), ranks)
        assert len(list(distributed)) == 3
        with pytest.raises(InvalidArgumentError, match="can be iterated once and has been"):
            list(distributed)
        return True

    assert on_ranks(2, body) == [True, True]


def test_iterables_that_differ_are_told(on_ranks):
    def body(ranks):
        batches = [*BATCHES[:2], BATCHES[2] + ranks.rank]
        seen = []
        with pytest.raises(InvalidArgumentError, match="different data up to step 2"):
            seen.extend(DistributedDataset((b for b in batches), ranks))
        return True

    assert on_ranks(2, body) == [True, True]


def test_what_is_empty_is_refused():
    for empty in ([], (x for x in ())):
        with pytest.raises(InvalidArgumentError, match="not known"):
            _ = as_dataset(empty).element_spec


# ------------------------------------------------------------------------- torch


class Samples:
    """A map-style dataset that counts who reads what; made a torch Dataset below."""

    def __init__(self, count):
        self.count, self.read, self._lock = count, [], threading.Lock()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import torch

        with self._lock:
            self.read.append(index)
        return torch.tensor([index, -index]), torch.tensor(float(index))


def torch_samples(count):
    from torch.utils.data import Dataset as TorchDataset

    return type("TorchSamples", (Samples, TorchDataset), {})(count)


@pytest.mark.parametrize("size", SIZES)
def test_a_torch_dataset_is_read_row_by_row(size, on_ranks):
    pytest.importorskip("torch")
    read = {}

    def body(ranks):
        samples = torch_samples(10)
        dataset = as_dataset(samples).batch(4)
        distributed = DistributedDataset(dataset, ranks)
        samples.read.clear()
        parts = list(distributed)
        read[ranks.rank] = sorted(samples.read)
        return [(x.tolist(), y.tolist(), x.dtype, y.dtype) for x, y in parts]

    seen = on_ranks(size, body)
    for step, rows in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
        assert [x for mine in seen for x in mine[step][0]] == [[i, -i] for i in rows]
        assert [y for mine in seen for y in mine[step][1]] == [float(i) for i in rows]
        assert {(mine[step][2], mine[step][3]) for mine in seen} == {
            (np.dtype(np.int64), np.dtype(np.float32))
        }
    own = [[int(y) for step in mine for y in step[1]] for mine in seen]
    # Empty parts are made of an example, whose row is read too.
    assert all(set(own[rank]) <= set(read[rank]) <= {*own[rank], 0, 9} for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_shuffling_loader_is_one_permutation_over_the_ranks(size, drop_last, on_ranks):
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    def make(rank):
        return DataLoader(torch_samples(11), 4, shuffle=True, drop_last=drop_last)

    def body(ranks):
        distributed = DistributedDataset(make(ranks.rank), ranks)
        state = None
        passes = []
        for number in range(2):
            iterator = iter(distributed)
            parts = []
            for part in iterator:
                parts.append(part[1].tolist())
                if number == 1 and len(parts) == 1:
                    state = iterator.get_state()
            passes.append(parts)
        again = DistributedDataset(make(ranks.rank), ranks)
        resumed = iter(again)
        resumed.set_state(state)
        assert [part[1].tolist() for part in resumed] == passes[1][1:]
        assert len(distributed) == len(passes[0])
        return passes

    seen, orders = on_ranks(size, body), []
    for number in range(2):
        steps = zip(*(mine[number] for mine in seen), strict=True)
        batches = [list(itertools.chain(*parts)) for parts in steps]
        assert [len(batch) for batch in batches] == [4, 4] + [3] * (not drop_last)
        orders.append(list(itertools.chain(*batches)))
        assert len(set(orders[-1])) == len(orders[-1]) and set(orders[-1]) <= set(range(11))
    assert orders[0] != orders[1]


def test_a_seeded_loader_and_its_collate(on_ranks):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    def collate(samples):
        return {"sum": torch.stack([x for x, _ in samples]).sum(1), "n": torch.ones(len(samples))}

    def make(rank):
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            torch_samples(9), 4, shuffle=True, generator=generator, collate_fn=collate
        )

    def body(ranks):
        return [
            [part["n"].tolist() for part in DistributedDataset(make(0), ranks)] for _ in range(2)
        ]

    for mine in on_ranks(2, body):
        assert mine[0] == mine[1]
        assert [len(part) for part in mine[0]] in ([2, 2, 1], [2, 2, 0])


def test_other_loaders_are_streams(on_ranks):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, IterableDataset, Sampler

    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(9))

    class Backwards(Sampler):
        def __iter__(self):
            return iter(range(8, -1, -1))

        def __len__(self):
            return 9

    for make, wanted in (
        (lambda rank: DataLoader(Numbers(), 4), lists(BATCHES)),
        (lambda rank: as_dataset(Numbers()).batch(4), lists(BATCHES)),
        (
            lambda rank: as_dataset(DataLoader(torch_samples(9), 4, sampler=Backwards())).map(
                lambda x, y: y
            ),
            [[8, 7, 6, 5], [4, 3, 2, 1], [0]],
        ),
    ):
        (batches,) = together(on_ranks, 2, make)
        assert lists(batches) == wanted


def test_loaders_that_shard_or_differ_are_refused(on_ranks):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

    samples = torch_samples(8)
    loader = DataLoader(samples, 4, sampler=DistributedSampler(samples, 2, 0))
    with pytest.raises(InvalidArgumentError, match="a part of a part"):
        as_dataset(loader)

    class Random(IterableDataset):
        def __iter__(self):
            return iter(torch.rand(8))

    def body(ranks):
        with pytest.raises(InvalidArgumentError, match="read different data"):
            list(DistributedDataset(DataLoader(Random(), 4), ranks))
        return True

    assert on_ranks(2, body) == [True, True]


def test_torch_halves_keep_their_dtype():
    torch = pytest.importorskip("torch")
    import ml_dtypes

    (pair,) = as_dataset([(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.half))])
    assert pair[0].dtype == ml_dtypes.bfloat16 and pair[1].dtype == np.float16
    assert pair[0].tolist() == [1.0, 1.0]


# -------------------------------------------------------------------- TensorFlow


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_tf_dataset_is_a_stream_of_global_batches(size, on_ranks):
    tf = pytest.importorskip("tensorflow")

    def make(rank):
        numbers = tf.data.Dataset.range(9)
        return numbers.map(lambda x: (x, tf.strings.as_string(x))).batch(4)

    assert as_dataset(make(0)).element_spec == (
        ArraySpec((None,), np.int64),
        ArraySpec((None,), object),
    )
    assert as_dataset(make(0)).cardinality() == 3

    def body(ranks):
        parts = list(DistributedDataset(make(0), ranks))
        return [(x.tolist(), y.tolist()) for x, y in parts]

    seen = on_ranks(size, body)
    for step, batch in enumerate(lists(BATCHES)):
        assert [x for mine in seen for x in mine[step][0]] == batch
        assert [y for mine in seen for y in mine[step][1]] == [str(x).encode() for x in batch]


def test_an_unseeded_tf_shuffle_is_told(on_ranks):
    tf = pytest.importorskip("tensorflow")

    def body(ranks):
        dataset = tf.data.Dataset.range(1000).shuffle(1000).batch(500)
        with pytest.raises(InvalidArgumentError, match="Give shuffles and samplers a seed"):
            list(DistributedDataset(dataset, ranks))
        return True

    assert on_ranks(2, body) == [True, True]
    assert Dataset.range(1).element_spec == ArraySpec((), np.int64)


def test_none_of_these_is_refused():
    with pytest.raises(DTypeError, match="torch Dataset or DataLoader"):
        as_dataset(object())
