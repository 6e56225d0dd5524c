"""The recorded AutoShardPolicy behaviour of tf.distribute (tests/data), followed case by case."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from distrt.data import AutoShardPolicy, Dataset, DistributedDataset, Options, OutOfRangeError
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
}
# The order of a seeded shuffle is TensorFlow's own; only that it is a permutation carries over.
PERMUTED = {"shuffle_seed": lambda: Dataset.range(8).shuffle(8, seed=7).batch(4)}
NOT_FOLLOWED = {
    "fewer files than workers": "AUTO takes DATA, FILE is refused on all ranks",
}


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
