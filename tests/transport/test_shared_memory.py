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


def mappings():
    return Path("/proc/self/maps").read_text().count("distrt-")


def leftovers():
    return {path.name for path in SHM.glob("distrt-*")}


@pytest.mark.parametrize("kind", ["memfd", "file", "auto"])
def test_ranks_see_each_others_memory_and_no_name_is_left(kind):
    nodes, before = {}, leftovers()

    def body(transport):
        node = nodes[transport.rank] = share(transport, range(3), Settings(shared_memory=kind))
        assert node.world_ranks == tuple(range(transport.size))
        assert node.bases[transport.rank] == node.arena.base
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


@pytest.mark.parametrize("kind", ["memfd", "file", "auto"])
@pytest.mark.parametrize("short", [(0,), (1,), (0, 1)])
def test_where_one_rank_has_no_room_no_rank_shares_and_one_of_them_warns(kind, short):
    before = leftovers()

    def body(transport):
        heap_bytes = 1 << 50 if transport.rank in short else 1 << 16
        return share(transport, range(2), Settings(shared_memory=kind, heap_bytes=heap_bytes))

    mapped = mappings()
    # Around all threads: the list of filters is one for the process.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert LoopbackWorld(2).run(body) == [None, None]
    (warning,) = [w for w in caught if w.category is UserWarning]
    assert str(1 << 50) in str(warning.message) and "[0, 1]" in str(warning.message)
    assert leftovers() == before
    assert mappings() == mapped, "the rank that had room gives it back"


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
assert "direct" not in comm.algorithms("all_reduce") and comm.flag_round_trip() is None
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
    time.sleep(60)  # never comes; the other rank's end is this one's too
comm.all_reduce(np.ones(4, np.float32), out=np.ones(4, np.float32))
"""
    with start(2, program) as job:
        job.wait_for("ready", 2)
        time.sleep(0.5)  # until the rank waits inside the call, which nobody outside can see
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
    time.sleep(3)  # lives on: the other rank learns it from the word, not from an end
else:
    time.sleep(1)  # until the other rank has given up
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


@pytest.mark.launches
@pytest.mark.timeout(60)
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_gave_a_call_up_and_left_is_missed(n, algorithm):
    # Were the call counted as made, the others would wait for a part of it that never comes.
    program = """
import numpy as np, distrt, signal, time
comm = distrt.world().communicator
array = np.ones(4, np.float32)
comm.all_reduce(array, out=array)
if comm.rank == 1:
    signal.signal(signal.SIGALRM, lambda *a: (_ for _ in ()).throw(RuntimeError("alarm")))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    for _ in range(3):  # the later ones are refused, and count as little
        try:
            comm.all_reduce(array, out=array)
        except (RuntimeError, distrt.errors.PeerError):
            pass
else:
    time.sleep(1)  # until rank 1 has given up
    for _ in range(3):
        comm.all_reduce(array, out=array)
"""
    done = mpirun(n, program, env={"DISTRT_ALGORITHM": algorithm, "DISTRT_TIMEOUT": "50"})
    assert done.rc != 0 and "PeerError" in done.err and done.seconds < 30, done
