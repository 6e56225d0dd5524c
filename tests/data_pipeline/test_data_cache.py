"""cache: each element made once, by its own rank; files; damage."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from distrt.data import Dataset, DistributedDataset, TFRecordDataset, TFRecordWriter
from distrt.errors import InvalidArgumentError


class Counter:
    def __init__(self):
        self.made, self._lock = [], threading.Lock()

    def __call__(self, x):
        with self._lock:
            self.made.append(int(x))
        return {"x": x * 2, "row": np.full((2, int(x) % 3), x, np.float32)}


def plain(dataset):
    return [(int(e["x"]), e["row"].tolist()) for e in dataset]


def test_each_element_is_made_once_and_handed_out_as_a_copy():
    count = Counter()
    dataset = Dataset.range(7).map(count).cache()
    wanted = [(2 * i, np.full((2, i % 3), i, np.float32).tolist()) for i in range(7)]
    for element in dataset:
        element["row"][:] = -1  # the caller's
    count.made.clear()
    assert plain(dataset) == plain(dataset) == wanted
    assert count.made == []
    assert plain(dataset.take(3)) == wanted[:3] and count.made == []


def test_a_shuffle_below_is_frozen_and_one_above_is_not():
    below = Dataset.range(20).shuffle(20).cache()
    first = [int(x) for x in below]
    assert [int(x) for x in below] == first and sorted(first) == list(range(20))
    above = Dataset.range(20).cache().shuffle(20)
    assert [int(x) for x in above] != [int(x) for x in above]


def test_a_stream_is_walked_to_its_end_once():
    passes = []

    def rows():
        passes.append("pass")
        yield from np.arange(5)

    dataset = Dataset.from_generator(rows).cache()
    passes.clear()
    assert len(list(dataset.take(2))) == 2  # left early: made again
    assert [int(x) for x in dataset] == list(range(5))
    assert [int(x) for x in dataset] == list(range(5))
    assert passes == ["pass", "pass"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_keeps_its_own_rows(size, on_ranks):
    def body(ranks):
        count = Counter()
        dataset = Dataset.range(12).map(count).map(lambda e: e["x"]).cache().batch(6)
        distributed = DistributedDataset(dataset, ranks)
        count.made.clear()
        passes = [[part.tolist() for part in distributed] for _ in range(2)]
        assert passes[0] == passes[1]
        own = [x // 2 for part in passes[0] for x in part]
        # Streams above may be asked about ahead, so the order is no one's business.
        assert sorted(count.made) == sorted(own)
        return own

    assert sorted(x for own in on_ranks(size, body) for x in own) == list(range(12))


def test_a_file_serves_the_next_run(tmp_path, on_ranks):
    name = tmp_path / "folder" / "cache"

    def run(ranks, passes=1):
        count = Counter()
        dataset = Dataset.range(9).shuffle(9, seed=1).map(count).cache(name)
        batches = dataset.map(lambda e: e["x"]).batch(4)
        distributed = DistributedDataset(batches, ranks)
        rows = [[part.tolist() for part in distributed] for _ in range(passes)]
        # Rows 0 and 1 are the examples, which are made whenever a spec is asked for.
        return rows[-1], sorted(row for row in count.made if row > 1)

    first = on_ranks(2, lambda ranks: run(ranks, 2))
    assert sorted(row for _, made in first for row in made) == list(range(2, 9))
    assert sorted(path.name for path in name.parent.iterdir()) == ["cache_0_of_2", "cache_1_of_2"]
    second = on_ranks(2, run)
    assert [rows for rows, _ in second] == [rows for rows, _ in first]
    assert [made for _, made in second] == [[], []]


def records(tmp_path):
    with TFRecordWriter(tmp_path / "r") as writer:
        for record in (b"a\0", b"", b"ccc"):
            writer.write(record)
    return TFRecordDataset(tmp_path / "r")


def test_files_keep_bytes_text_and_halves(tmp_path):
    import ml_dtypes

    def describe(record):
        return (record, f"n{len(record)}", np.full(2, len(record), ml_dtypes.bfloat16))

    wanted = [(b"a\0", "n2", [2, 2]), (b"", "n0", [0, 0]), (b"ccc", "n3", [3, 3])]
    for _ in range(2):
        dataset = records(tmp_path).map(describe).cache(tmp_path / "cache")
        seen = [(e[0], str(e[1]), e[2].tolist()) for e in dataset.as_numpy_iterator()]
        assert seen == wanted
        assert next(iter(dataset))[2].dtype == ml_dtypes.bfloat16


def test_a_file_cut_short_is_made_whole_again(tmp_path):
    def run():
        count = Counter()
        seen = plain(Dataset.range(6).map(count).cache(tmp_path / "cache"))
        return seen, len(count.made)

    wanted, _ = run()
    whole = (tmp_path / "cache").read_bytes()
    for cut in (1, 100, len(whole) // 2):
        (tmp_path / "cache").write_bytes(whole[:-cut])
        seen, _ = run()
        assert seen == wanted
        assert (tmp_path / "cache").stat().st_size == len(whole)


def test_a_streams_file_knows_its_length(tmp_path):
    passes = []

    def rows():
        passes.append("pass")
        yield from np.arange(5)

    def make():
        return Dataset.from_generator(rows).cache(tmp_path / "cache")

    assert [int(x) for x in make()] == list(range(5))
    dataset = make()
    passes.clear()
    assert [int(x) for x in dataset] == list(range(5))
    assert passes == []


def test_files_of_other_datasets_are_refused(tmp_path):
    name = tmp_path / "cache"
    list(Dataset.range(3).cache(name))
    with pytest.raises(InvalidArgumentError, match=r"of another dataset \(dataset\).*range\(0, 4"):
        list(Dataset.range(4).cache(name))
    name.write_bytes(b"something else\n")
    with pytest.raises(InvalidArgumentError, match="no file of distrt's cache"):
        list(Dataset.range(3).cache(name))
    with pytest.raises(InvalidArgumentError, match="nobody gave a seed"):
        Dataset.range(3).shuffle(3).cache(name)
