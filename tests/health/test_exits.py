"""A failing rank ends the whole job: real jobs, under plain ``python``."""

from __future__ import annotations

import os
import signal
import time

import pytest

from distrt.health.exits import leave_rounds
from tests.launching import Job, is_open_mpi, mpirun, start

# As transport/mpi.py starts MPI; a program may also have done it in its own way.
OURS = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
MPI.Init_thread()
"""
THEIRS = "from mpi4py import MPI\n"
PROGRAM = """
import os, signal, sys, threading, time
from distrt.errors import PeerError
from distrt.health import exits

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
exits.install(comm)
exits.install(comm)  # a second call changes nothing

def wait():  # as the transport waits: it asks now and then who has left
    while True:
        gone = exits.departed()
        if gone is not None:
            raise PeerError(f"rank {gone[0]} has left after {gone[1]} calls")
        time.sleep(0.05)

"""
FAST = 10  # seconds

launches = pytest.mark.launches
both_starts = pytest.mark.parametrize("begin", [OURS, THEIRS], ids=["ours", "theirs"])


def run(n: int, body: str, begin: str = OURS):
    return mpirun(n, begin + PROGRAM + body, timeout=40)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 13, 64])
def test_leave_barrier_hears_of_everyone(size):
    rounds = [leave_rounds(rank, size) for rank in range(size)]
    heard = [{rank} for rank in range(size)]
    assert {len(own) for own in rounds} == {(size - 1).bit_length()}
    for k in range(len(rounds[0])):
        for rank in range(size):
            target, source = rounds[rank][k]
            assert rounds[target][k][1] == rank  # every send has its receive
            assert rounds[source][k][0] == rank
        heard = [heard[rank] | heard[rounds[rank][k][1]] for rank in range(size)]
    assert heard == [set(range(size))] * size


@launches
@both_starts
def test_an_exception_ends_the_job(begin):
    job = run(3, "if rank == 1: raise ValueError('the cause')\ncomm.Barrier()", begin)
    assert job.rc == 1
    assert job.seconds < FAST
    assert "ValueError: the cause" in job.err
    assert "rank 1 of 3 raised ValueError: ending the job" in job.err
    assert job.err.count("Traceback") == 1


@launches
def test_an_exception_beside_a_living_thread():
    body = """
if rank == 1:
    threading.Thread(target=time.sleep, args=(100,)).start()
    raise ValueError("the cause")
wait()
"""
    job = run(3, body)
    assert (job.rc, job.err.count("ValueError: the cause")) == (1, 1)
    assert job.seconds < FAST


@launches
def test_the_hook_before_ours_shows_the_exception():
    before = "import sys\nsys.excepthook = lambda kind, value, trace: print('SHOWN', value)\n"
    job = run(2, "if rank == 1: raise ValueError('the cause')\nwait()", before + OURS)
    assert job.rc == 1
    assert "SHOWN the cause" in job.out
    assert "Traceback" not in job.err


@launches
@pytest.mark.parametrize(
    ("leave", "rc"),
    [("sys.exit(3)", 3), ("raise SystemExit(5)", 5), ("sys.exit('a reason')", 1)],
)
def test_an_exit_code_is_the_jobs(leave, rc):
    job = run(3, f"if rank == 1: {leave}\nwait()")
    assert job.rc == rc
    assert job.seconds < FAST
    assert "PeerError" not in job.err
    assert ("a reason" in job.err) is (rc == 1)


@launches
def test_an_exit_code_where_mpi4py_finalizes():
    # Nobody knows the code before MPI is finalized: the rank counts as having left.
    job = run(3, "if rank == 1: sys.exit(3)\nwait()", THEIRS)
    assert job.rc != 0
    assert job.seconds < FAST
    assert "PeerError: rank 1 has left" in job.err


@launches
@both_starts
def test_leaving_early_is_noticed(begin):
    job = run(3, "if rank == 1: sys.exit(0)\nwait()", begin)
    assert job.rc == 1
    assert job.seconds < FAST
    assert "PeerError: rank 1 has left" in job.err
    assert "rank 2 of 3 raised PeerError" in job.err


@launches
@both_starts
def test_a_normal_end(begin):
    n = 3
    job = run(n, "if rank == 1: time.sleep(1.5)\nsys.stdout.write(f'end {rank}\\n')", begin)
    assert job.rc == 0, job.err
    assert sorted(job.out.split("\n")) == ["", *(f"end {rank}" for rank in range(n))]
    assert job.err == ""


@launches
def test_caught_exceptions_and_forked_children_do_not_count():
    body = """
try:
    raise ValueError
except ValueError:
    pass
try:
    sys.exit(3)
except SystemExit:
    pass
if rank == 1:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
comm.Barrier()
print("fine")
"""
    job = run(2, body)
    assert job.rc == 0, job.err
    assert job.out.count("fine") == 2


@launches
@pytest.mark.parametrize(
    "death", ["os._exit(5)", "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), 15)"]
)
def test_a_death_without_exit_ends_the_job(death):
    job = run(3, f"if rank == 1: {death}\nwait()")
    assert job.rc != 0
    assert job.seconds < FAST


@launches
def test_an_interrupted_rank():
    job = run(3, "if rank == 1: os.kill(os.getpid(), signal.SIGINT)\nwait()")
    assert job.rc == 130
    assert job.seconds < FAST
    assert "rank 1: interrupted, ending the job" in job.err
    assert "Traceback" not in job.err


def ended_by(job: Job, number: signal.Signals):
    """Send a signal to mpirun once all ranks wait; return (its end, seconds after the signal)."""
    job.wait_for("waiting", times=3)
    begun = time.monotonic()
    os.kill(job.process.pid, number)
    finished = job.finish(timeout=30)
    return finished, time.monotonic() - begun


@launches
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_mpirun(number):
    with start(3, OURS + PROGRAM + "print('waiting', flush=True)\nwait()") as job:
        finished, seconds = ended_by(job, number)
    assert finished.rc != 0
    assert seconds < FAST
    assert "Traceback" not in finished.err
    assert finished.err.count("interrupted, ending the job") <= 1


ALONE = [
    ("", 0, ""),
    ("sys.exit(3)", 3, ""),
    ("raise ValueError('the cause')", 1, "ValueError: the cause"),
    ("sys.exit('a reason')", 1, "a reason"),
]


@launches
@pytest.mark.parametrize(("body", "rc", "shown"), ALONE)
def test_a_world_of_one_ends_as_python_does(body, rc, shown):
    job = run(0, body)
    assert job.rc == rc
    assert shown in job.err
    assert "ending the job" not in job.err
    assert "MPI_Abort" not in job.err + job.out


@launches
def test_mpi_is_finalized_in_a_world_of_one_under_mpirun():
    # Open MPI's mpirun complains about a rank that leaves without MPI_Finalize.
    job = run(1, "print(exits.departed())")
    assert (job.rc, job.out, job.err) == (0, "None\n", "")


@launches
def test_launcher_and_mpi_disagree():
    if not is_open_mpi():
        pytest.skip("stands for Open MPI's Python under MPICH's mpiexec")
    body = """
from distrt.cluster.launcher import check_size
check_size(comm.Get_size(), os.environ)
"""
    with start(0, OURS + PROGRAM + body, env={"PMI_RANK": "0", "PMI_SIZE": "3"}) as job:
        finished = job.finish()
    assert finished.rc == 1
    assert "LaunchError: the launcher says 3 tasks (PMI_SIZE=3" in finished.err
