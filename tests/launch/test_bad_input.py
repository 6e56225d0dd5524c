"""Bad input under plain python and mpirun: one clear error on every rank, within seconds.

Each rank catches the errors and prints them, so that the test sees that *every*
rank got each; that an uncaught one ends the job is tested in tests/health.
"""

import pytest

from tests.launching import mpirun

pytestmark = [pytest.mark.launches, pytest.mark.timeout(120)]

PROGRAM = """
import os, pathlib, sys, tempfile
import numpy as np, distrt
strategy = distrt.MultiWorkerMirroredStrategy(device="cpu")
rank, n = strategy.communicator.rank, strategy.communicator.size
Dataset = distrt.data.Dataset
sgd = distrt.train.SGD()
with strategy.scope():
    weight = distrt.Variable(np.zeros(3), name="weight")
    total = distrt.Variable(np.zeros(1), name="total", aggregation=distrt.VariableAggregation.SUM)

def in_scope(function):
    with strategy.scope():
        return function()

own_file = pathlib.Path(tempfile.gettempdir()) / f"distrt-bad-input-{os.getpid()}.npy"

def distribute_a_file_that_rank_1_lacks():
    if rank != 1:
        np.save(own_file, np.zeros(8))
    try:
        strategy.experimental_distribute_dataset(Dataset.from_npz(str(own_file)).batch(4))
    finally:
        own_file.unlink(missing_ok=True)

for name, action in CASES.items():
    try:
        eval(action)
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"[{rank}] {name}: {type(error).__name__}: {text}\\n", end="", flush=True)
# After all that the ranks are still in step.
assert strategy.reduce("SUM", rank) == 3
"""

# What is done, and what every rank must say.
CASES = {
    "an unbatched dataset": (
        "strategy.experimental_distribute_dataset(Dataset.range(8))",
        ["InvalidArgumentError", ".batch("],
    ),
    "a dataset file that is missing": (
        "strategy.experimental_distribute_dataset(Dataset.from_npz('nowhere.npz').batch(4))",
        ["NotFoundError", "nowhere.npz"],
    ),
    "a file that is missing on one rank": (
        "distribute_a_file_that_rank_1_lacks()",
        ["NotFoundError", "rank 1"],
    ),
    "a batch that is not divisible where it must be": (
        "distrt.InputContext(n, rank, n).get_per_replica_batch_size(8)",
        ["InvalidArgumentError", "8", "3"],
    ),
    "a wrong dtype": (
        "strategy.reduce('SUM', np.array(['a', 'b']))",
        ["DTypeError", "<U1", "float32"],
    ),
    "an op that makes no sense for the dtype": (
        "strategy.reduce('MAX', np.ones(2, complex))",
        ["DTypeError", "MAX is not defined for complex128", "SUM"],
    ),
    "an unknown op": (
        "strategy.reduce('AVERAGE', 1.0)",
        ["InvalidArgumentError", "'AVERAGE'", "SUM, MEAN, PROD, MIN, MAX"],
    ),
    "another dtype on one rank": (
        "strategy.reduce('SUM', np.ones(4, np.float64 if rank == 2 else np.float32))",
        ["CollectiveMismatchError", "ranks 0, 1:", "rank 2:", "float64[4]", "float32[4]"],
    ),
    "a bad dtype on one rank": (
        "strategy.reduce('SUM', np.ones(4, bool if rank == 0 else np.float32))",
        ["CollectiveMismatchError", "rank 0: call #", "SUM is not defined for bool"],
    ),
    "an unknown op on one rank": (
        "strategy.reduce('AVERAGE' if rank == 0 else 'SUM', 1.0)",
        ["CollectiveMismatchError", "rank 0: call #", "'AVERAGE'", "ranks 1, 2:"],
    ),
    "an axis that is not there on one rank": (
        "strategy.reduce('SUM', np.ones(() if rank == 1 else 3), axis=0)",
        ["CollectiveMismatchError", "rank 1: call #", "along axis 0"],
    ),
    "a ragged list on one rank": (
        "strategy.reduce('SUM', [np.ones(2), np.array([[1], [1, 2]], object) if rank == 2 else 1])",
        ["CollectiveMismatchError", "rank 2: call #", "value[1]: dtype object"],
    ),
    "a gradient of another shape on one rank": (
        "strategy.run(lambda: sgd.apply_gradients([(np.ones(3 + (rank == 1)), weight)]))",
        ["CollectiveMismatchError", "rank 1: call #", "gradient of weight: expected shape (3,)"],
    ),
    "no gradient on one rank": (
        "strategy.run(lambda: sgd.apply_gradients([(None if rank == 0 else np.ones(3), weight)]))",
        ["CollectiveMismatchError", "rank 0: call #", "no gradient for any variable"],
    ),
    "a variable whose value fails on one rank": (
        "in_scope(lambda: distrt.Variable(lambda: 1.0 / (rank - 2), name='odd'))",
        ["CollectiveMismatchError", "rank 2: call #", "Variable odd", "ZeroDivisionError"],
    ),
    "an assignment of another shape on one rank": (
        "strategy.run(lambda: total.assign(np.ones(1 + (rank == 1))))",
        ["CollectiveMismatchError", "rank 1: call #", "total: expected a value of shape (1,)"],
    ),
    "an object that cannot be pickled on one rank": (
        "strategy.communicator.all_gather_object(sys.stdout if rank == 1 else 1)",
        ["CollectiveMismatchError", "rank 1: call #", "TypeError", "pickle"],
    ),
    "other devices on one rank": (
        "distrt.MirroredStrategy([f'/cpu:{i}' for i in range(3 + (rank == 1))])",
        ["InvalidArgumentError", "rank 1:", "4 devices for 3 rank"],
    ),
    "a GPU where there is none": (
        "distrt.MultiWorkerMirroredStrategy(device='gpu')",
        ["DeviceError", "ranks 0, 1 and 2", "cpu"],
    ),
    "more devices than ranks": (
        "distrt.MirroredStrategy(['/cpu:0', '/cpu:1', '/cpu:2', '/cpu:3'])",
        ["InvalidArgumentError", "4 devices for 3 rank", "mpirun -n 4"],
    ),
}


@pytest.fixture(scope="module")
def said():
    """What the ranks print when each of them tries all the cases, and goes on after each."""
    actions = {name: action for name, (action, _) in CASES.items()}
    done = mpirun(3, f"CASES = {actions!r}\n{PROGRAM}", timeout=60)
    assert done.rc == 0, done
    return done.out.splitlines()


@pytest.mark.parametrize("name", CASES)
def test_every_rank_says_what_is_wrong(said, name):
    for rank in range(3):
        (line,) = (line for line in said if line.startswith(f"[{rank}] {name}: "))
        for text in CASES[name][1]:
            assert text in line


def test_a_missing_mpi_library_is_one_rank_without_a_launcher_and_an_error_with_one():
    program = """
import sys
sys.modules["mpi4py.MPI"] = None  # what Python does where the library cannot be loaded
import distrt
print("size", distrt.world().communicator.size, distrt.world().library)
"""
    done = mpirun(0, program)
    assert (done.rc, done.out) == (0, "size 1 no MPI\n"), done
    done = mpirun(0, program, env={"PMI_SIZE": "4", "PMI_RANK": "0"})
    assert done.rc == 1 and "LaunchError" in done.err and "distrt[mpich]" in done.err, done


@pytest.mark.parametrize("first", ["", "from mpi4py import MPI\n"], ids=["ours", "mpi4py_first"])
def test_a_rank_that_leaves_early_is_named_by_those_that_wait(first):
    program = """
import sys, numpy as np, distrt
strategy = distrt.MultiWorkerMirroredStrategy(device="cpu")
if strategy.communicator.rank == 1:
    sys.exit(0)
strategy.reduce("SUM", np.ones(3))
"""
    done = mpirun(3, first + program, timeout=60)
    assert done.rc != 0 and done.seconds < 20, done
    assert "PeerError: rank 1 has left" in done.err, done
    assert "waits in call #" in done.err and "all_reduce" in done.err, done


def test_a_rank_that_is_done_may_leave_while_others_wait_for_a_third():
    # Rank 1 gets its copy and ends at once; rank 2 still waits for rank 0, not for it.
    program = """
import time, distrt
comm = distrt.world().communicator
if comm.rank == 0:
    isend = comm.transport.isend
    def late(buffer, dest, tag):
        time.sleep(0.7 if dest == 2 else 0)
        return isend(buffer, dest, tag)
    comm.transport.isend = late
assert comm.broadcast_object("value" if comm.rank == 0 else None) == "value"
assert comm.all_gather_object(comm.rank) == [0, 1, 2]
"""
    done = mpirun(3, program, timeout=60)
    assert done.rc == 0, done
