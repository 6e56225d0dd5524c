"""Datasets from a function, against the recorded behaviour of tf.distribute (tests/data)."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from distrt.data import (
    Dataset,
    DistributedDatasetsFromFunction,
    InputContext,
    InputOptions,
    InputReplicationMode,
    OutOfRangeError,
)
from distrt.errors import DTypeError, InvalidArgumentError
from tests.data_pipeline.test_data_recorded import same

FILE = Path(__file__).parents[1] / "data" / "03_from_function.json.gz"
CASES = {case["id"]: case for case in json.loads(gzip.decompress(FILE.read_bytes()))["cases"]}
PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


def sharded(size, batch):
    def make(context):
        dataset = Dataset.range(size).shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(batch)

    return make


FUNCTIONS = {
    "from_function_range10_b2": sharded(10, 2),
    "from_function_unbatched": lambda context: Dataset.range(5),
    "from_function_drop": lambda context: Dataset.range(7).batch(2, True),
    "from_function_tuple": lambda context: Dataset.zip((Dataset.range(5), Dataset.range(5))).batch(
        2
    ),
    "from_function_after_per_replica_mode": lambda context: Dataset.range(3).batch(1),
}
# TensorFlow's strategy remembers PER_REPLICA for later calls; here options count for their call.
OTHERWISE = {"from_function_after_per_replica_mode"}


def replicas_of(name):
    return int(name.rpartition("_n")[2])


GRID = {name: case for name, case in CASES.items() if "_grid_n" in name}
STEPS = [
    name
    for name in CASES
    if name.rpartition("_n")[0] in FUNCTIONS and name.rpartition("_n")[0] not in OTHERWISE
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_replicas_take_batches_in_turns_as_recorded(size, on_ranks):
    cases = {name: case for name, case in GRID.items() if replicas_of(name) == size}
    assert len(cases) > 10

    def body(ranks):
        seen = {}
        for name, case in cases.items():
            given = case["in"]
            distributed = DistributedDatasetsFromFunction(
                lambda _, g=given: Dataset.range(g["size"]).batch(g["per_replica_batch"]), ranks
            )
            seen[name] = [part.tolist() for part in distributed]
            assert distributed.cardinality() == len(seen[name])
        return seen

    seen = on_ranks(size, body)
    for name, case in cases.items():
        recorded = [[part["v"] for part in step] for step in case["out"]]
        steps = len(seen[0][name])
        assert [[seen[r][name][t] for r in range(size)] for t in range(steps)] == recorded, name


@pytest.mark.parametrize("name", STEPS)
def test_functions_as_recorded(name, on_ranks):
    size, out = replicas_of(name), CASES[name]["out"]
    function = FUNCTIONS[name.rpartition("_n")[0]]
    seen = on_ranks(size, lambda ranks: list(DistributedDatasetsFromFunction(function, ranks)))
    for rank, parts in enumerate(seen):
        assert len(parts) == len(out)
        for step, part in enumerate(parts):
            if isinstance(part, tuple):  # recorded by component, then by replica
                recorded = {"tu": [component["tu"][rank] for component in out[step]]}
            else:
                recorded = out[step][rank]
            assert same(recorded, part), (step, rank, part)


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith("from_function_per_replica_mode")]
)
def test_per_replica_mode_as_recorded(name, on_ranks):
    size, out = replicas_of(name), CASES[name]["out"]

    def body(ranks):
        contexts = []

        def make(context):
            contexts.append(
                [
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                ]
            )
            return sharded(10, 2)(context)

        parts = list(DistributedDatasetsFromFunction(make, ranks, options=PER_REPLICA))
        return contexts, [part.tolist() for part in parts]

    seen = on_ranks(size, body)
    assert [contexts[0] for contexts, _ in seen] == out["contexts"]
    recorded = [[part["v"] for part in step] for step in out["steps"]]
    assert [[seen[r][1][t] for r in range(size)] for t in range(len(recorded))] == recorded


WORKERS = [name for name in CASES if re.match(r"mwms_fromfn_range", name)]


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_as_recorded(workers, on_ranks):
    cases = {name: CASES[name] for name in WORKERS if CASES[name]["in"]["workers"] == workers}
    assert len(cases) > 15

    def body(ranks):
        seen = {}
        for name, case in cases.items():
            given = case["in"]

            def make(context, given=given):
                dataset = Dataset.range(given["size"])
                if given["sharded"]:
                    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
                return dataset.batch(given["batch"])

            distributed = DistributedDatasetsFromFunction(make, ranks, workers=True)
            seen[name] = [part.tolist() for part in distributed]
        return seen

    seen = on_ranks(workers, body)
    for name, case in cases.items():
        wanted = [out["steps"] for out in case["out"]["workers"]]
        assert [mine[name] for mine in seen] == wanted, name


def uneven(context, drop=False):
    ident = context.input_pipeline_id
    numbers = np.arange(1 if ident else 3, dtype=np.int64) + 10 * ident
    return Dataset.from_tensor_slices(numbers).batch(1, drop)


@pytest.mark.parametrize(
    "name", [n for n in CASES if re.match(r"mwms_fromfn_uneven_(eager|fnloop|get_next|static)", n)]
)
def test_workers_at_their_end_go_on_with_empty_batches(name, on_ranks):
    outs = CASES[name]["out"]["workers"]

    def body(ranks):
        iterator = iter(DistributedDatasetsFromFunction(uneven, ranks, workers=True))
        seen = []
        for _ in range(5):
            try:
                seen.append(iterator.get_next().tolist())
            except OutOfRangeError:
                seen.append("OutOfRangeError")
        return seen

    for rank, seen in enumerate(on_ranks(len(outs), body)):
        out = outs[rank]
        if isinstance(out, list):
            assert seen == [o["error"] if isinstance(o, dict) else o for o in out]
            continue
        steps = [part for part in seen if part != "OutOfRangeError"]
        assert len(steps) == out["num_steps"]
        if "static" in name:  # recorded with other values, of the same numbers of rows
            assert [len(part) for part in steps] == [len(part) for part in out["steps"]]
        elif "steps" in out:
            assert steps == out["steps"]
        else:
            assert [x for part in steps for x in part] == out["local_values"]


def test_scalars_cannot_be_padded(on_ranks):
    """A deliberate difference: TensorFlow hands over a 0 that no worker's data has."""

    def body(ranks):
        distributed = DistributedDatasetsFromFunction(
            lambda context: Dataset.range(3 + context.input_pipeline_id), ranks, workers=True
        )
        seen = []
        with pytest.raises(InvalidArgumentError, match=r"step 3 .* rank\(s\) \[0\] are at the end"):
            seen.extend(int(part) for part in distributed)
            raise AssertionError("the pass ended")
        return True

    assert on_ranks(2, body) == [True, True]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bad_functions_are_refused_on_all_ranks(size, on_ranks):
    def raises(context):
        if context.input_pipeline_id == size - 1:
            raise ValueError("no such data")
        return Dataset.range(4).batch(2)

    def body(ranks):
        for function in (lambda _: [1, 2], lambda _: None):
            with pytest.raises(DTypeError, match=r"expected a"):
                DistributedDatasetsFromFunction(function, ranks)
        with pytest.raises(
            InvalidArgumentError, match=f"rank {size - 1}: ValueError: no such data"
        ):
            DistributedDatasetsFromFunction(raises, ranks, workers=True)
        with pytest.raises(TypeError, match=r"no len"):
            len(DistributedDatasetsFromFunction(sharded(4, 2), ranks))
        return True

    assert on_ranks(size, body) == [True] * size


def test_other_specs_are_refused(on_ranks):
    def body(ranks):
        def make(context):
            dtype = np.float32 if context.input_pipeline_id else np.float64
            return Dataset.from_tensor_slices(np.zeros(4, dtype)).batch(2)

        with pytest.raises(InvalidArgumentError, match=r"(?s)elements.*float64.*float32"):
            DistributedDatasetsFromFunction(make, ranks, workers=True)

    on_ranks(2, body)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("mwms_per_replica_batch_g")])
def test_per_replica_batch_sizes_as_recorded(name):
    given, outs = CASES[name]["in"], CASES[name]["out"]["workers"]
    for out in outs:
        context = InputContext(given["workers"], 0, given["workers"])
        if isinstance(out, dict):
            with pytest.raises(ValueError):
                context.get_per_replica_batch_size(given["global_batch"])
        else:
            assert context.get_per_replica_batch_size(given["global_batch"]) == out


def test_contexts_as_recorded(on_ranks):
    for size in (1, 2, 3):
        out = CASES[f"from_function_contexts_n{size}"]["out"]

        def body(ranks):
            contexts = []
            DistributedDatasetsFromFunction(
                lambda context: contexts.append(context) or Dataset.range(4).batch(2), ranks
            )
            return [vars(context) for context in contexts]

        assert on_ranks(size, body) == [out] * size
    recorded = CASES["mwms_input_context_w2"]["out"]["workers"]
    for rank, out in enumerate(recorded):
        context = InputContext(2, rank, 2)
        text = out.pop("str")
        assert vars(context) == out and str(context) == text.replace("tf.distribute", "distrt")
