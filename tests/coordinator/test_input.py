"""Input of both strategies on real ranks: policies, functions, errors, early ends, state."""

import itertools

import numpy as np
import pytest

import distrt
from distrt.data import (
    AutoShardPolicy,
    Dataset,
    Options,
    TFRecordDataset,
    TFRecordWriter,
)
from distrt.errors import InvalidArgumentError, NotFoundError
from tests.data_pipeline.test_data_autoshard_recorded import CASES, RANGES, steps_of, with_policy

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def mirrored():
    return distrt.MirroredStrategy(device="cpu")


@pytest.fixture(scope="module")
def workers():
    return distrt.MultiWorkerMirroredStrategy(device="cpu")


def where(strategy):
    return strategy.num_replicas_in_sync, strategy.communicator.rank


def everyone(strategy, value):
    return strategy.communicator.all_gather_object(value)


def test_ranges_are_sharded_as_recorded(workers):
    n, rank = where(workers)
    cases = [case for case in RANGES.values() if case["in"]["workers"] == n]
    assert len(cases) > 250 or n not in (2, 3)
    for case in cases[::7]:
        given, out = case["in"], case["out"]["workers"][rank]
        dataset = Dataset.range(given["size"]).batch(given["global_batch"], given["drop_remainder"])
        distributed = workers.experimental_distribute_dataset(with_policy(dataset, given["policy"]))
        parts = [part.tolist() for part in itertools.islice(distributed, 25)]
        if "local_values" in out:
            assert list(itertools.chain(*parts)) == out["local_values"], case["id"]
        else:
            assert parts == steps_of(out), case["id"]
    assert any(name.startswith("files") for name in CASES)


def test_files_by_rank_and_an_exact_evaluation(workers, tmp_path):
    """Each sample is counted once, whatever the files, and every rank takes the same steps."""
    n, rank = where(workers)
    folder = everyone(workers, str(tmp_path))[0]
    counts = [5, 0, 7, 1, 3][: max(n, 3)]
    if rank == 0:
        for file, count in enumerate(counts):
            with TFRecordWriter(f"{folder}/{file}.tfrecord") as writer:
                for index in range(count):
                    writer.write(str(100 * file + index).encode())
    workers.communicator.barrier()
    listed = Dataset.list_files(f"{folder}/*.tfrecord")
    numbers = listed.interleave(TFRecordDataset).map(lambda record: np.int64(int(record)))
    for name in ("FILE", "AUTO", "DATA", None):
        distributed = workers.experimental_distribute_dataset(with_policy(numbers.batch(4), name))
        for _ in range(2):
            total = count = np.int64(0)
            steps = 0
            for part in distributed:
                count = count + workers.reduce("SUM", np.int64(len(part)))
                total = total + workers.reduce("SUM", part.sum())
                steps += 1
            assert int(count) == sum(counts)
            assert int(total) == sum(100 * f + i for f, c in enumerate(counts) for i in range(c))
            assert len(set(everyone(workers, steps))) == 1


def test_policies_that_cannot_be_followed_are_refused_on_all(workers, tmp_path):
    n, _ = where(workers)
    if n == 1:
        pytest.skip("one worker has everything")
    with pytest.raises(NotFoundError, match="does not come from files"):
        workers.experimental_distribute_dataset(with_policy(Dataset.range(8).batch(4), "FILE"))
    path = tmp_path / "one.tfrecord"
    with TFRecordWriter(path) as writer:
        writer.write(b"1")
    with pytest.raises(InvalidArgumentError, match=f"each of the {n} workers, got 1"):
        workers.experimental_distribute_dataset(with_policy(TFRecordDataset(path).batch(4), "FILE"))


def test_missing_files_are_said_on_all_ranks(workers, tmp_path):
    n, rank = where(workers)
    path = tmp_path / "some.tfrecord"
    if rank == 0:
        with TFRecordWriter(path) as writer:
            writer.write(b"1")
    dataset = with_policy(TFRecordDataset(path).batch(4), "DATA")
    distributed = workers.experimental_distribute_dataset(dataset)
    if n == 1:
        assert len(list(distributed)) == 1
        return
    with pytest.raises(NotFoundError, match=r"some.tfrecord' does not exist on this rank"):
        list(distributed)
    assert int(workers.reduce("SUM", np.int64(1))) == n


def test_from_function(mirrored, workers):
    n, rank = where(workers)

    def make(context):
        rows = Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(2)

    own = [part.tolist() for part in workers.distribute_datasets_from_function(make)]
    rows = list(range(10))[rank::n]
    steps = -(-len(range(0, 10, n)) // 2)
    assert own == [rows[2 * step : 2 * step + 2] for step in range(steps)]
    turns = [part.tolist() for part in mirrored.distribute_datasets_from_function(make)]
    batches = [list(range(start, start + 2)) for start in range(0, 10, 2)]
    mine = batches[rank::n]
    assert turns == mine + [[]] * (-(-5 // n) - len(mine))


def test_values_from_function(mirrored):
    n, rank = where(mirrored)
    value = mirrored.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group * 10 + context.num_replicas_in_sync
    )
    assert (value.dtype, int(value)) == (np.int32, rank * 10 + n)


def test_an_error_of_one_rank_is_raised_on_all_and_nobody_hangs(mirrored):
    n, rank = where(mirrored)

    def decode(x):
        if x == 13:
            raise OSError("cannot decode row 13")
        return x

    dataset = Dataset.range(16).map(decode).batch(4)
    distributed = mirrored.experimental_distribute_dataset(dataset)
    seen = []
    with pytest.raises((OSError, InvalidArgumentError), match="cannot decode row 13") as caught:
        seen.extend(distributed)
    assert len(seen) == 3
    owner = 1 // -(-4 // n) == rank
    assert isinstance(caught.value, InvalidArgumentError) != owner
    assert int(mirrored.reduce("SUM", np.int64(1))) == n  # the ranks are still together


@pytest.mark.parametrize("leavers", [{0}, {1}, {0, 1, 2, 3}])
def test_a_break_leaves_nobody_waiting(mirrored, leavers):
    _, rank = where(mirrored)
    dataset = Dataset.range(48).map(lambda x: x + 1).batch(8)
    distributed = mirrored.experimental_distribute_dataset(dataset)
    for step, _part in enumerate(distributed):
        if rank in leavers and step == 1:
            break
    del _part
    again = [part.tolist() for part in distributed]
    everything = everyone(mirrored, again)
    assert [len(parts) for parts in everything] == [6] * len(everything)
    assert sorted(row for parts in everything for p in parts for row in p) == list(range(1, 49))


def test_training_and_evaluation_in_turns(mirrored):
    train = mirrored.experimental_distribute_dataset(Dataset.range(12).map(abs).batch(4))
    evaluation = mirrored.experimental_distribute_dataset(
        Dataset.range(7).filter(lambda x: x > 2).batch(3)
    )
    totals = []
    for part in train:
        seen = sum(int(mirrored.reduce("SUM", np.int64(len(p)))) for p in evaluation)
        totals.append((int(mirrored.reduce("SUM", part.sum())), seen))
    assert totals == [(6, 4), (22, 4), (38, 4)]


def test_resumed_passes_are_the_very_ones(workers):
    def make():
        return Dataset.range(29).shuffle(29).map(lambda x: x * 2).batch(6)

    whole = workers.experimental_distribute_dataset(make())
    next(iter(whole))
    iterator = iter(whole)
    for _ in range(3):
        next(iterator)
    state = everyone(workers, iterator.get_state())[0]
    rest = [part.tolist() for part in iterator]
    after = [part.tolist() for part in whole]
    again = workers.experimental_distribute_dataset(make())
    resumed = iter(again)
    resumed.set_state(state)
    assert [part.tolist() for part in resumed] == rest
    assert [part.tolist() for part in again] == after


def test_options_and_optionals(mirrored):
    options = distrt.InputOptions(experimental_fetch_to_device=False)
    dataset = Dataset.range(5).batch(4)
    iterator = iter(mirrored.experimental_distribute_dataset(dataset, options))
    for _ in range(2):
        assert iterator.get_next_as_optional().has_value()
    last = iterator.get_next_as_optional()
    assert not last.has_value()
    with pytest.raises(InvalidArgumentError, match="the optional is empty"):
        last.get_value()
    replicated = distrt.InputOptions(
        experimental_replication_mode=distrt.InputReplicationMode.PER_REPLICA
    )
    with pytest.raises(InvalidArgumentError, match="made by a function"):
        mirrored.experimental_distribute_dataset(dataset, replicated)


def test_ranks_that_read_other_data_are_told(mirrored):
    n, rank = where(mirrored)
    batches = [np.arange(4), np.arange(4) + (rank == n - 1)]
    if n == 1:
        assert len(list(mirrored.experimental_distribute_dataset(b for b in batches))) == 2
        return
    with pytest.raises(InvalidArgumentError, match="read different data up to step 1"):
        list(mirrored.experimental_distribute_dataset(b for b in batches))


def test_off_gives_every_worker_everything(workers):
    n, _ = where(workers)
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    dataset = Dataset.range(24).map(lambda x: x).batch(4 * n).with_options(options)
    distributed = workers.experimental_distribute_dataset(dataset)
    rows = [int(row) for part in distributed for row in part]
    assert sorted(rows) == list(range(24))
