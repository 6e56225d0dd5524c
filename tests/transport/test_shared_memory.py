"""Memory that ranks share: it is really the neighbour's, and nothing of it stays behind."""

import fcntl
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from distrt.errors import DistrtError
from distrt.settings import Settings
from distrt.transport import shared_memory
from distrt.transport.loopback import LoopbackWorld
from distrt.transport.shared_memory import share
from tests.launching import mpirun, start

SHM = Path("/dev/shm")


def leftovers():
    return {path.name for path in SHM.glob("distrt-*")}


@pytest.mark.parametrize("kind", ["memfd", "file", "auto"])
def test_ranks_see_each_others_memory_and_no_name_is_left(kind):
    nodes, before = {}, leftovers()

    def body(transport):
        node = nodes[transport.rank] = share(transport, range(3), Settings(shared_memory=kind))
        assert node.rank == transport.rank and node.bases[node.rank] == node.arena.base
        mine = node.arena.heap.empty(4, np.int64)
        mine[:] = transport.rank
        places = transport.all_gather_object(mine.ctypes.data - node.arena.base)
        for rank, (base, offset) in enumerate(zip(node.bases, places, strict=True)):
            seen = np.ctypeslib.as_array(
                (shared_memory.ctypes.c_int64 * 4).from_address(base + offset)
            )
            assert (seen == rank).all()
        transport.all_gather_object(None)

    LoopbackWorld(3).run(body)
    for node in nodes.values():
        node.close()
    assert leftovers() == before


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_no_room_is_no_shared_memory_and_says_how_much_was_needed(kind):
    settings = Settings(shared_memory=kind, heap_bytes=1 << 50)

    def body(transport):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert share(transport, range(1), settings) is None
        return [str(w.message) for w in caught]

    (texts,) = LoopbackWorld(1).run(body)
    assert len(texts) == 1 and str(1 << 50) in texts[0] and "share no memory" in texts[0]
    assert not leftovers()


def test_off_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        off = Settings(shared_memory="off")
        assert LoopbackWorld(2).run(lambda t: share(t, range(2), off)) == [None, None]


def test_memory_of_someone_else_is_refused():
    arena = shared_memory.Arena("file", 1 << 20, 0)
    stranger = shared_memory._Shared(arena.path, b"x" * 16, "")
    with pytest.raises(DistrtError, match="not the neighbour's memory"):
        shared_memory._open(stranger, 1 << 20)
    arena.forget_name()
    with pytest.raises(DistrtError, match="not the neighbour's memory"):
        shared_memory._open(shared_memory._Shared("/proc/self/fd/1", b"", ""), 1 << 20)
    arena.close()


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_stay():
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead, locked = SHM / f"distrt-{gone.pid}-dead", SHM / f"distrt-{gone.pid}-locked"
    alive = SHM / f"distrt-{os.getpid()}-alive"
    for path in (dead, locked, alive):
        path.touch()
    with locked.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        shared_memory._sweep()
        assert [dead.exists(), locked.exists(), alive.exists()] == [False, True, True]
    locked.unlink()
    alive.unlink()


LOOP = """
import numpy as np, distrt, time
comm = distrt.world().communicator
array = distrt.zeros(1000)
assert comm.algorithm_for("all_reduce") == "direct"
print("ready", flush=True)
while True:
    comm.all_reduce(array, out=array)
"""


@pytest.mark.launches
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["memfd", "file"])
@pytest.mark.parametrize("victims", ["one", "all"])
def test_nothing_is_left_after_a_kill(kind, victims):
    before = leftovers()
    with start(2, LOOP, env={"DISTRT_SHARED_MEMORY": kind}) as job:
        job.wait_for("ready", 2)
        ranks = ranks_of(job)
        for pid in ranks[: 1 if victims == "one" else 2]:
            os.kill(pid, signal.SIGKILL)
        assert job.finish(30).rc != 0
    assert leftovers() == before


def ranks_of(job):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        try:
            command = (path.parent / "cmdline").read_bytes()
            launches = b"mpirun" in command or b"mpiexec" in command
            if b"program.py" in command and not launches and descends(pid, job.process.pid):
                found.append(pid)
        except OSError:
            continue
    assert len(found) >= 2, found
    return sorted(found)[-2:]


def descends(pid, ancestor):
    while pid > 1:
        if pid == ancestor:
            return True
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
    return False


@pytest.mark.launches
@pytest.mark.timeout(60)
def test_a_job_without_room_goes_around_the_ring_and_says_so():
    program = """
import numpy as np, distrt
comm = distrt.world().communicator
assert comm.algorithm_for("all_reduce") == "ring" and comm.flag_round_trip() is None
assert (comm.all_reduce(distrt.full(5, comm.rank + 1)) == 3).all()
"""
    done = mpirun(2, program, env={"DISTRT_HEAP_BYTES": str(1 << 50)})
    assert done.rc == 0, done
    assert done.err.count("share no memory") == 1 and str(1 << 50) in done.err


@pytest.mark.launches
@pytest.mark.timeout(60)
def test_an_interrupt_ends_a_quick_call_and_the_job():
    program = """
import numpy as np, distrt, time
comm = distrt.world().communicator
comm.barrier()
print("ready", flush=True)
if comm.rank == 0:
    time.sleep(60)
comm.all_reduce(np.ones(4, np.float32), out=np.ones(4, np.float32))
"""
    with start(2, program) as job:
        job.wait_for("ready", 2)
        time.sleep(0.5)
        os.kill(ranks_of(job)[1], signal.SIGINT)
        done = job.finish(20)
    assert done.rc != 0 and "interrupted" in done.err


@pytest.mark.launches
@pytest.mark.timeout(60)
def test_a_neighbour_learns_that_a_quick_call_was_given_up():
    program = """
import numpy as np, distrt, signal, time
comm = distrt.world().communicator
array = np.ones(4, np.float32)
comm.all_reduce(array, out=array)
if comm.rank == 1:
    signal.signal(signal.SIGALRM, lambda *a: (_ for _ in ()).throw(RuntimeError("alarm")))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        comm.all_reduce(array, out=array)
    except RuntimeError as error:
        assert "alarm" in str(error)
    try:
        comm.all_reduce(array, out=array)
    except distrt.errors.PeerError as error:
        assert "given up" in str(error)
        print("refused", flush=True)
    time.sleep(3)
else:
    time.sleep(1)
    comm.all_reduce(array, out=array)  # rank 1 had come to this one before it gave it up
    try:
        comm.all_reduce(array, out=array)
    except distrt.errors.PeerError as error:
        assert "rank 1 of this host gave" in str(error)
        print("learnt", flush=True)
    import os
    os._exit(0)
"""
    done = mpirun(2, program)
    assert "refused" in done.out and "learnt" in done.out, done
