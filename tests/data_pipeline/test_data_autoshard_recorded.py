"""The recorded AutoShardPolicy behaviour of tf.distribute (tests/data), followed case by case."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from distrt.data import (
    ArraySpec,
    AutoShardPolicy,
    Dataset,
    DistributedDataset,
    Options,
    OutOfRangeError,
    TextLineDataset,
    TFRecordDataset,
    TFRecordWriter,
)
from distrt.errors import InvalidArgumentError, NotFoundError

FILE = Path(__file__).parents[1] / "data" / "02_autoshard.json.gz"
CASES = {case["id"]: case for case in json.loads(gzip.decompress(FILE.read_bytes()))["cases"]}
LIMIT = 25  # the recording stopped after so many steps

PIPELINES = {
    "repeat2_before": lambda: Dataset.range(5).repeat(2).batch(4),
    "repeat2_after": lambda: Dataset.range(5).batch(4).repeat(2),
    "map_after": lambda: Dataset.range(9).batch(4).map(lambda x: x * x),
    "take_before": lambda: Dataset.range(20).take(7).batch(4),
    "take_after": lambda: Dataset.range(20).batch(4).take(2),
    "skip_before": lambda: Dataset.range(14).skip(3).batch(4),
    "prefetch": lambda: Dataset.range(9).batch(4).prefetch(2),
    "from_tensor_slices": lambda: Dataset.from_tensor_slices(np.arange(9)).batch(4),
    "from_tensors": lambda: Dataset.from_tensors(np.arange(6)),
    "unbatched": lambda: Dataset.range(7),
    "filter_before": lambda: Dataset.range(12).filter(lambda x: x % 2 == 1).batch(4),
    "unbatch_rebatch": lambda: Dataset.range(9).batch(4).unbatch().batch(6),
    "concat": lambda: Dataset.range(5).batch(4).concatenate(Dataset.range(10, 15).batch(4)),
    "shard_manual": lambda: Dataset.range(12).shard(2, 1).batch(2),
    "generator": lambda: Dataset.from_generator(
        lambda: range(7), output_signature=ArraySpec((), np.int64)
    ).batch(4),
    "cache": lambda: Dataset.range(9).cache().batch(4),
    "zip": lambda: Dataset.zip((Dataset.range(9), Dataset.range(0, 90, 10))).map(np.add).batch(4),
}
# The order of a seeded shuffle is TensorFlow's own; only that it is a permutation carries over.
PERMUTED = {"shuffle_seed": lambda: Dataset.range(8).shuffle(8, seed=7).batch(4)}


def with_policy(dataset, name):
    if name is None:
        return dataset
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[name]
    return dataset.with_options(options)


def walk(make, policy, ranks, limit=LIMIT):
    distributed = DistributedDataset(with_policy(make(), policy), ranks, workers=True)
    return [part.tolist() for part in itertools.islice(distributed, limit)]


def workers_of(case):
    return case["in"]["workers"]


RANGES = {
    name: case
    for name, case in CASES.items()
    if re.match(r"(eagerreduce_|fnloop_)?range\d+_gb", name)
}


def steps_of(out):
    return out.get("steps", [local for local, _ in out.get("steps [local, global_sum]", [])])


@pytest.mark.parametrize("workers", [2, 3])
def test_ranges_are_sharded_as_recorded(workers, on_ranks):
    cases = {name: case for name, case in RANGES.items() if workers_of(case) == workers}
    assert len(cases) > 250

    def body(ranks):
        seen = {}
        for name, case in cases.items():
            given = case["in"]

            def make(given=given):
                return Dataset.range(given["size"]).batch(
                    given["global_batch"], given["drop_remainder"]
                )

            seen[name] = walk(make, given["policy"], ranks)
            distributed = DistributedDataset(
                with_policy(make(), given["policy"]), ranks, workers=True
            )
            assert distributed.cardinality() in (-2, len(seen[name])) or len(seen[name]) == LIMIT
        return seen

    seen = on_ranks(workers, body)
    wrong = []
    for name, case in cases.items():
        for rank, out in enumerate(case["out"]["workers"]):
            mine = seen[rank][name]
            if "local_values" in out:
                same = list(itertools.chain(*mine)) == out["local_values"]
            else:
                same = mine == steps_of(out)
            if not same or len(mine) != out["num_steps"]:
                wrong.append((name, rank, mine, out))
    assert wrong == []


PIPES = {
    name: match[1]
    for name in CASES
    if (match := re.match(r"pipe_(.*)_(?:OFF|DATA|AUTO|FILE|HINT)_w\d", name))
}


@pytest.mark.parametrize("name", [name for name, pipe in PIPES.items() if pipe in PIPELINES])
def test_pipelines_are_sharded_as_recorded(name, on_ranks):
    case, make = CASES[name], PIPELINES[PIPES[name]]
    policy, outs = case["in"]["policy"], case["out"]["workers"]
    errors = {out.get("error") for out in outs}
    if errors != {None}:
        kind = NotFoundError if errors == {"NotFoundError"} else InvalidArgumentError

        def refused(ranks):
            with pytest.raises(kind) as caught:
                walk(make, policy, ranks)
            return str(caught.value)

        assert len(set(on_ranks(len(outs), refused))) == 1
        return
    seen = on_ranks(len(outs), lambda ranks: walk(make, policy, ranks))
    assert seen == [out["steps"] for out in outs]


@pytest.mark.parametrize("name", [name for name, pipe in PIPES.items() if pipe in PERMUTED])
def test_shuffles_are_sharded_in_the_recorded_sizes(name, on_ranks):
    case, make = CASES[name], PERMUTED[PIPES[name]]
    outs = case["out"]["workers"]
    seen = on_ranks(len(outs), lambda ranks: walk(make, case["in"]["policy"], ranks))
    recorded = [out["steps"] for out in outs]
    assert [[len(part) for part in mine] for mine in seen] == [
        [len(part) for part in steps] for steps in recorded
    ]
    flat = [sorted(itertools.chain(*steps)) for steps in (*seen, *recorded)]
    assert flat[: len(outs)] == flat[len(outs) :] or case["in"]["policy"] != "OFF"
    assert sorted(itertools.chain(*flat[: len(outs)])) == sorted(
        itertools.chain(*flat[len(outs) :])
    )


FILES = {name: case for name, case in CASES.items() if "files" in name}


def lines_of(path):
    return TextLineDataset(path).map(lambda line: np.int64(int(line)))


def records_of(path):
    return TFRecordDataset(path).map(lambda record: np.int64(int(record)))


SOURCES = {
    "tfrecord": lambda folder: records_of(sorted(folder.glob("*.tfrecord"))),
    "text": lambda folder: lines_of(sorted(folder.glob("*.txt"))),
    "listfiles_interleave": lambda folder: Dataset.list_files(
        f"{folder}/*.tfrecord", shuffle=False
    ).interleave(records_of, 2),
    "listfiles_flat_map": lambda folder: Dataset.list_files(
        f"{folder}/*.tfrecord", shuffle=False
    ).flat_map(records_of),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of files for each list of numbers of records."""
    made = {}
    for case in FILES.values():
        counts = tuple(case["in"]["records_per_file"])
        if counts in made:
            continue
        made[counts] = folder = tmp_path_factory.mktemp("files")
        for file, count in enumerate(counts):
            values = [str(100 * file + index).encode() for index in range(count)]
            (folder / f"{file}.txt").write_bytes(b"".join(value + b"\n" for value in values))
            with TFRecordWriter(folder / f"{file}.tfrecord") as writer:
                for value in values:
                    writer.write(value)
    return made


@pytest.mark.parametrize("name", FILES)
def test_files_are_sharded_as_recorded(name, on_ranks, folders):
    given, outs = FILES[name]["in"], FILES[name]["out"]["workers"]
    folder = folders[tuple(given["records_per_file"])]
    workers = len(outs)

    def make():
        return SOURCES[given["source"]](folder).batch(given["global_batch"])

    # TensorFlow fails on some workers and leaves the others waiting. A deliberate difference:
    # FILE is refused on all, AUTO divides by rows.
    if "error" in outs[0]:
        assert given["files"] < workers
        if given["policy"] == "AUTO":
            with pytest.warns(UserWarning, match=rf"{given['files']} file\(s\) for {workers}"):
                seen = on_ranks(workers, lambda ranks: walk(make, "AUTO", ranks))
            assert seen == on_ranks(workers, lambda ranks: walk(make, "DATA", ranks))
            return

        def refused(ranks):
            with pytest.raises(InvalidArgumentError, match="at least one file for each of the"):
                walk(make, given["policy"], ranks)
            return True

        assert on_ranks(workers, refused) == [True] * workers
        return
    seen = on_ranks(workers, lambda ranks: walk(make, given["policy"], ranks))
    for mine, out in zip(seen, outs, strict=True):
        assert len(mine) == out["num_steps"]
        if "steps" in out:
            assert mine == out["steps"]
        else:
            assert list(itertools.chain(*mine)) == out["local_values"]


def test_most_cases_are_followed():
    followed = len(RANGES) + len(FILES) + len(PIPES)
    others = [name for name in CASES if name not in {*RANGES, *FILES, *PIPES}]
    assert {re.sub(r"\d+", "", name) for name in others} == {
        "get_next_past_end_size_gb_w",
        "repr_batch_w",
    }
    assert {*PIPES.values()} == {*PIPELINES, *PERMUTED}
    assert followed > 790
    assert len([n for n, case in FILES.items() if "error" in case["out"]["workers"][0]]) < 20


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("get_next_past_end_")])
def test_get_next_past_the_end_as_recorded(name, on_ranks):
    given, outs = CASES[name]["in"], CASES[name]["out"]["workers"]

    def body(ranks):
        dataset = with_policy(Dataset.range(given["size"]).batch(given["global_batch"]), "DATA")
        iterator, seen = iter(DistributedDataset(dataset, ranks, workers=True)), []
        for _ in range(5):
            try:
                seen.append(iterator.get_next().tolist())
            except OutOfRangeError:
                seen.append("OutOfRangeError")
        return seen

    wanted = [[o["error"] if isinstance(o, dict) else o for o in out] for out in outs]
    assert on_ranks(len(outs), body) == wanted
