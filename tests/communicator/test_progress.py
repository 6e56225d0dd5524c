"""Calls in the background: order, failures, the thread and its end, on threads and real ranks."""

import os
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

import distrt
from distrt import poller
from distrt.arrays import DTYPES
from distrt.collectives import schedule
from distrt.collectives.ring import Ring, Slots
from distrt.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ContextError,
    PeerError,
)
from distrt.kernels import kernels_for
from distrt.progress import Queue, Refused
from distrt.reduce_op import ReduceOp
from distrt.transport.loopback import LoopbackWorld, single
from tests.launching import mpirun

launches = pytest.mark.launches


def all_reduce(transport, value, segment_bytes=1 << 19):
    """Sum float32 arrays along the ring: a program as the communicator's are."""
    transport.begin()
    if transport.size == 1:
        return value.copy()
    result = np.empty_like(value)
    ring = Ring(
        transport,
        kernels_for(value),
        schedule.all_reduce(transport.size, transport.rank),
        schedule.chunks(value.size, transport.size),
        row=DTYPES["f32"],
        op=ReduceOp.SUM,
        source=value,
        target=result,
        slots=Slots(),
        segment_bytes=segment_bytes,
    )
    while not ring.step():
        yield
    return result


def until(event):
    """Go on once ``event`` is set."""
    while not event.is_set():
        yield
    return "done"


def failing(error, turns=3):
    for _ in range(turns):
        yield
    raise error


def noting(notes, name, turns=5):
    notes.append(f"{name} begins")
    for _ in range(turns):
        yield
    notes.append(f"{name} ends")
    return name


def single_queue(threads=True, **changed):
    transport = single()
    transport.threads = threads
    for name, value in changed.items():
        setattr(transport, name, value)
    return Queue(transport)


def silent(call):
    """Call without the warning of the mode that has no thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return call()


both_modes = pytest.mark.parametrize("threads", [True, False], ids=["thread", "no thread"])


# ------------------------------------------------------------------ a queue alone


@both_modes
def test_calls_run_one_after_the_other_in_the_order_of_the_calls(threads):
    queue, notes = single_queue(threads), []
    works = [silent(lambda i=i: queue.submit(noting(notes, i, 5 - i), f"{i}")) for i in range(5)]
    assert queue.run(noting(notes, 5), "behind the pending ones") == 5
    assert all(work.done() for work in works)
    assert [work.wait() for work in works] == list(range(5))
    assert works[0].wait() == 0  # again
    assert notes == [f"{i} {verb}" for i in range(6) for verb in ("begins", "ends")]


def test_a_synchronous_call_with_nothing_before_it_stays_in_its_thread():
    queue, idents = single_queue(), []

    def program():
        idents.append(threading.get_ident())
        assert queue.patience == pytest.approx(0.02)
        yield
        idents.append(threading.get_ident())

    queue.run(program(), "here")
    assert idents == [threading.get_ident()] * 2
    queue.submit(program(), "there").wait()
    assert threading.get_ident() not in idents[2:]
    assert len(set(idents[2:])) == 1


@both_modes
def test_done_and_held(threads):
    held = {"own": 0, "other": 0, "later": 0}

    def queue_of(name):
        def hold(number):
            held[name] += number

        transport = single()
        transport.threads = threads
        return Queue(transport, hold=hold)

    queue, _other, event = queue_of("own"), queue_of("other"), threading.Event()
    work = silent(lambda: queue.submit(until(event), "until"))
    time.sleep(0.05)
    _later = queue_of("later")
    # Without a thread a call past any queue would stop this one.
    assert not work.done()
    assert held == {"own": 1, "other": int(not threads), "later": int(not threads)}
    event.set()
    assert work.wait() == "done" and work.done()
    assert held == dict.fromkeys(held, 0)
    queue.run(noting([], "synchronous"), "held by its caller, if need be")
    assert held == dict.fromkeys(held, 0)


@both_modes
def test_a_refused_call_raises_and_leaves_the_queue_in_order(threads):
    queue, error = single_queue(threads), KeyError("mine")

    def refused():
        yield
        return Refused(error)

    work = silent(lambda: queue.submit(refused(), "refused"))
    with pytest.raises(KeyError, match="mine"):
        work.wait()
    with pytest.raises(KeyError, match="mine"):
        queue.run(refused(), "refused")
    assert queue.run(noting([], "next"), "next") == "next"


def test_without_a_thread_only_waiting_makes_progress_and_it_is_said_once(monkeypatch):
    monkeypatch.setattr(poller, "IN_WAITS", poller.Poller(threaded=False))
    one, other, notes = single_queue(False), single_queue(False), []
    with pytest.warns(UserWarning, match="MPI allows one thread only.*thread_level") as caught:
        first = one.submit(noting(notes, "first"), "first")
        second = other.submit(noting(notes, "second"), "second")
    assert len(caught) == 1
    time.sleep(0.05)
    assert notes == []
    second.wait()  # all queues take part
    assert "first begins" in notes
    assert first.wait() == "first"
    third = one.submit(noting(notes, "third", 1), "third")
    other.run(noting(notes, "fourth"), "fourth")  # in a synchronous call too
    assert third.done()


@both_modes
def test_patience_is_for_the_only_one(threads):
    # Fresh ones: the calls of another test must not count.
    queue, other, seen, event = single_queue(threads), single_queue(threads), {}, threading.Event()

    def program(name, queue):
        while not event.is_set():
            yield
            seen.setdefault(name, set()).add(queue.patience)

    work = silent(lambda: queue.submit(program("alone", queue), "alone"))
    for _ in range(100):
        if not threads:
            poller.IN_WAITS.poll()
        time.sleep(0.001)
    assert seen["alone"] == {0.02}
    works = [other.submit(program("other", other), "other"), work]
    for _ in range(100):
        if not threads:
            poller.IN_WAITS.poll()
        time.sleep(0.001)
    assert seen["other"] == {0.0}
    event.set()
    for work in works:
        work.wait()


# ---------------------------------------------------------------------- failures


@both_modes
def test_an_agreed_error_fails_its_own_call_only(threads):
    queue = single_queue(threads)
    error = CollectiveMismatchError("the ranks differ")
    work = silent(lambda: queue.submit(failing(error), "bad"))
    good = queue.submit(noting([], "good"), "good")
    for _ in range(2):  # each time with the traceback of the program, and no longer one
        with pytest.raises(CollectiveMismatchError, match="the ranks differ") as caught:
            work.wait()
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names.count("wait") == 1 and names[-1] == "failing"
    assert good.wait() == "good"
    with pytest.raises(CollectiveMismatchError):
        queue.run(failing(error), "bad")
    assert queue.run(noting([], "better"), "better") == "better"
    assert work.done() and poller.IN_THREAD._unheard == poller.IN_WAITS._unheard == []


@both_modes
@pytest.mark.parametrize("error", [PeerError("lost"), ValueError("a bug"), MemoryError("full")])
def test_any_other_error_gives_the_queue_up(error, threads):
    given_up = []
    queue = single_queue(threads)
    queue._abandon = lambda: given_up.append(True)
    work = silent(lambda: queue.submit(failing(error), "the first"))
    pending = [queue.submit(noting([], i), f"pending {i}") for i in range(2)]
    with pytest.raises(type(error), match=str(error)):
        work.wait()
    for i, behind in enumerate(pending):
        with pytest.raises(PeerError, match=f"cannot make pending {i}.*given up") as caught:
            behind.wait()
        assert caught.value.__cause__ is error  # what happened is not lost
    for make in (queue.submit, queue.run):
        with pytest.raises(PeerError, match=r"cannot make (call #1 )?a later one.*given up"):
            make(noting([], "never"), "a later one")
    assert given_up
    other = single_queue(threads)
    assert other.run(noting([], "fine"), "another queue goes on") == "fine"


@both_modes
def test_the_deadline_is_watched_in_the_background(threads):
    queue, event = single_queue(threads, timeout_seconds=0.2), threading.Event()
    work = silent(lambda: queue.submit(until(event), "all_reduce"))
    behind = queue.submit(until(event), "call #2 barrier")
    with pytest.raises(CollectiveTimeoutError, match=r"waited 0.2 s in call #1 all_reduce with"):
        work.wait()
    with pytest.raises(PeerError, match="cannot make call #2 barrier"):
        behind.wait()


def test_a_deadline_counts_from_the_turn_of_the_call():
    queue = single_queue(timeout_seconds=0.5)

    def slow():
        end = time.monotonic() + 0.35
        while time.monotonic() < end:
            yield

    for work in [queue.submit(slow(), f"{i}") for i in range(3)]:
        work.wait()


def test_buffers_of_a_call_that_was_given_up_live_on():
    buffers, queue = [], single_queue(timeout_seconds=0.2)

    class Buffer:
        def __del__(self):
            buffers.append("freed")

    def program():
        buffer = Buffer()
        while buffer:
            yield

    with pytest.raises(CollectiveTimeoutError):
        queue.submit(program(), "call").wait()
    del queue
    assert buffers == []


def test_an_interrupt_ends_the_waiting_and_not_the_call():
    queue, event = single_queue(), threading.Event()
    work = queue.submit(until(event), "until")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert time.monotonic() - begun < 1
    timer.join()
    event.set()
    assert work.wait() == "done"
    assert queue.run(noting([], "next"), "next") == "next"


@both_modes
def test_an_interrupt_inside_a_call_gives_it_up(threads):
    queue = single_queue(threads)
    with pytest.raises(KeyboardInterrupt):
        queue.run(failing(KeyboardInterrupt()), "synchronous")
    with pytest.raises(PeerError, match="given up"):
        queue.run(noting([], "next"), "next")
    if not threads:
        queue, other = single_queue(threads), single_queue(threads)
        work = queue.submit(failing(KeyboardInterrupt()), "asynchronous")
        with pytest.raises(KeyboardInterrupt):  # whoever polls is told at once
            other.submit(noting([], "other", 20), "other").wait()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        with pytest.raises(PeerError, match="given up"):
            queue.submit(noting([], "next"), "next")


@both_modes
def test_a_call_from_inside_another_one_is_refused(threads):
    queue = single_queue(threads)

    def outer():
        yield
        queue.run(noting([], "inner"), "inner")

    with pytest.raises(ContextError, match="from inside another one of rank 0"):
        queue.run(outer(), "outer")
    with pytest.raises(ContextError, match="from inside another one of rank 0"):
        silent(lambda: queue.submit(outer(), "outer").wait())
    assert queue.run(noting([], "fine"), "fine") == "fine"


# ------------------------------------------------------------------------ the thread


def thread_seconds():
    """CPU time of the progress thread."""
    thread = poller.IN_THREAD._thread
    text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    return int(text.split()[0]) * 1e-9


def test_the_thread_is_one_and_sleeps_while_nothing_is_pending():
    queues = [single_queue() for _ in range(4)]
    for queue in queues:
        queue.submit(noting([], "one"), "one").wait()
    assert [t.name for t in threading.enumerate()].count("distrt progress") == 1
    time.sleep(0.02)
    before = thread_seconds()
    time.sleep(0.5)
    assert thread_seconds() - before < 0.002


def test_the_thread_leaves_the_core_to_the_program_while_a_call_waits():
    queue, event = single_queue(), threading.Event()
    work = queue.submit(until(event), "until")
    time.sleep(0.05)
    before = thread_seconds()
    time.sleep(0.5)
    spent = thread_seconds() - before
    event.set()
    work.wait()
    assert spent < 0.2, spent


def test_synchronous_calls_start_no_thread():
    program = """
import threading
from distrt.progress import Queue, Refused
from distrt.transport.loopback import single
def program():
    yield
    return 5
assert Queue(single()).run(program(), "call") == 5
assert threading.active_count() == 1
"""
    assert mpirun(0, program).rc == 0


# ---------------------------------------------------------------------- several ranks


def check_opposite_order(one, other):
    """Two communicators, used in opposite order, asynchronously and synchronously."""
    value = np.full(5001, one.rank + 1, np.float32)
    expected = one.size * (one.size + 1) // 2
    queues = [Queue(one), Queue(other)]
    mine = queues if one.rank % 2 == 0 else queues[::-1]
    for _ in range(5):
        works = [
            silent(lambda q=q: q.submit(all_reduce(q.transport, value, 64), "1")) for q in mine
        ]
        results = [work.wait() for work in works]
        first = mine[0].submit(all_reduce(mine[0].transport, value, 64), "2")
        results.append(mine[1].run(all_reduce(mine[1].transport, value, 64), "3"))
        for result in [*results, first.wait()]:
            assert (result == expected).all()
    assert one.calls == other.calls == 10


@both_modes
@pytest.mark.parametrize("size", [2, 3])
def test_opposite_order_on_two_communicators(size, threads):
    def body(transport):
        transport.threads = threads
        check_opposite_order(transport, transport.dup())

    LoopbackWorld(size).run(body)


@pytest.mark.mpi
@pytest.mark.timeout(60)
@both_modes
def test_opposite_order_on_two_communicators_of_real_ranks(threads):
    transport = distrt.world().communicator.transport.dup()
    transport.threads = threads
    check_opposite_order(transport, transport.dup())


@both_modes
def test_many_calls_mixed_with_synchronous_ones(threads):
    def body(transport):
        transport.threads = threads
        queue = Queue(transport)
        values = [np.full(k, transport.rank + k, np.float32) for k in range(1, 40)]
        works = []
        for k, value in enumerate(values):
            program = all_reduce(transport, value, 16)
            if k % 5 == 4:
                assert (queue.run(program, "now") == 3 * (k + 1) + 3).all()
                assert all(work.done() for work in works)
            else:
                works.append(silent(lambda program=program: queue.submit(program, "later")))
        results = iter([work.wait() for work in works])
        for k in range(len(values)):
            if k % 5 != 4:
                assert (next(results) == 3 * (k + 1) + 3).all()

    LoopbackWorld(3).run(body)


@pytest.mark.mpi
@pytest.mark.timeout(60)
def test_a_long_call_passes_while_the_program_sleeps():
    transport = distrt.world().communicator.transport.dup()
    assert transport.threads
    queue, value = Queue(transport), np.ones(1 << 22, np.float32)
    transport.all_gather_object(None)
    work = queue.submit(all_reduce(transport, value), "all_reduce")
    deadline = time.monotonic() + 20
    while not work.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert work.done()
    begun = time.monotonic()
    assert (work.wait() == transport.size).all()
    assert time.monotonic() - begun < 0.1


def test_a_rank_that_fails_frees_those_that_wait_in_the_background():
    def body(transport):
        if transport.rank == 1:
            raise KeyError("mine")
        work = Queue(transport).submit(all_reduce(transport, np.ones(9, np.float32)), "the sum")
        with pytest.raises(PeerError, match="rank 1 failed while rank 0 was in the sum"):
            work.wait()

    with pytest.raises(KeyError, match="mine"):
        LoopbackWorld(2).run(body)


# -------------------------------------------------------------------------- the end

PROGRAM = """
import sys, time
import numpy as np
import distrt
from distrt.errors import PeerError
from distrt.progress import Queue, Refused
from tests.communicator.test_progress import all_reduce, failing, until
world = distrt.world().communicator
transport = world.transport.dup()
rank, queue = transport.rank, Queue(transport)
def start(n=1 << 22):
    return queue.submit(all_reduce(transport, np.ones(n, np.float32)), "the sum")
def never():
    transport.begin()
    while True: yield
"""
FAST = 15  # seconds


def end(body, n=2, before=""):
    return mpirun(n, before + PROGRAM + body, timeout=50)


@launches
def test_a_program_that_waits_for_its_calls_ends_silently():
    job = end("works = [start() for _ in range(3)]\nfor work in works: work.wait()\nstart().wait()")
    assert (job.rc, job.err) == (0, "")


@launches
@pytest.mark.parametrize("n", [2, 3])
def test_calls_that_nobody_waits_for_are_dropped_and_counted(n):
    body = "works = [start() for _ in range(2)]\nqueue.submit(never(), 'x')\nworld.barrier()"
    job = end(body, n)
    assert job.rc == 0, job.err
    assert job.seconds < FAST
    for rank in range(n):
        assert f"rank {rank}: " in job.err
    # A rank that is late to leave may have seen another one go: then its call has failed.
    assert job.err.count("never waited for and did not end (the first: ") == n
    assert "Abort" not in job.err


@launches
def test_an_exit_code_passes_the_calls_that_are_under_way():
    job = end(
        "start(), queue.submit(never(), 'x')\nif rank == 1: sys.exit(3)\nqueue.run(never(), 'y')"
    )
    assert job.rc == 3, job.err
    assert job.seconds < FAST


@launches
@pytest.mark.parametrize("wait", [".wait()", "; time.sleep(100)"], ids=["waiting", "sleeping"])
def test_an_exception_beside_calls_under_way_ends_the_job(wait):
    job = end(f"work = start(1 << 24)\nif rank == 1: raise ValueError('the cause')\nwork{wait}", 3)
    assert job.rc == 1, job.err
    assert job.seconds < FAST
    assert job.err.count("ValueError: the cause") == 1
    assert "rank 1 of 3 raised ValueError: ending the job" in job.err


@launches
def test_those_who_wait_learn_that_a_rank_has_dropped_its_part():
    # It had begun the call, and will not end it: that does not count as made.
    body = "work = queue.submit(never(), 'the call')\ntime.sleep(0.1)\nif rank == 0: work.wait()"
    job = end(body)
    assert job.rc == 1, job.err
    assert job.seconds < FAST
    assert "rank 1: 1 collective call was never waited for" in job.err
    assert "PeerError: rank 1 has left: its program ended after 0 collective calls, and " in job.err
    assert "rank 0 waits in call #1 the call" in job.err


@launches
def test_a_call_that_was_given_up_does_not_count_as_made():
    # Rank 1 drops its part, rank 2 gives its own up for that and leaves as if all were
    # well, and rank 0, who hears of rank 2 only, must not wait for the deadline.
    job = end(
        """
work = start(1 << 24) if rank != 1 else queue.submit(never(), "the sum")
time.sleep(0.1)
if rank == 0: work.wait()
if rank == 2:
    try: work.wait()
    except PeerError: print("given up")
""",
        3,
    )
    assert (job.rc, job.out.count("given up")) == (1, 1), job.err
    assert job.seconds < FAST
    assert "PeerError: rank 2 has left: its program ended after 0 collective calls" in job.err


@launches
@pytest.mark.parametrize("more", ["", "queue.run(never(), 'more')"], ids=["equal", "more"])
def test_calls_of_a_duplicate_count_for_leaving_and_those_of_a_part_do_not(more):
    body = f"""
part = transport.split(0 if rank < 2 else None)
value = np.ones(3, np.float32)
for k in range(4):
    queue.run(all_reduce(transport, value), "all")
if rank == 2:
    sys.exit(0)  # it has made all of its calls
time.sleep(0.5)
{more}
for k in range(9):  # more calls than rank 2 has made
    Queue(part).run(all_reduce(part, value), "part")
def slow():  # enough to ask who has left
    begun = time.monotonic()
    while time.monotonic() < begun + 0.5:
        yield
Queue(part).run(slow(), "slow")
print("fine")
"""
    job = end(body, 3)
    assert job.seconds < FAST
    if more:
        assert job.rc == 1
        assert "rank 2 has left: its program ended after 4 collective calls" in job.err
    else:
        assert (job.rc, job.out.count("fine"), job.err) == (0, 2, "")


@launches
def test_a_failure_that_nobody_waits_for_is_shown_at_exit():
    body = """
from distrt.errors import InvalidArgumentError
work = queue.submit(failing(InvalidArgumentError("refused by all")), "the call")
queue.run(all_reduce(transport, np.ones(3, np.float32)), "the next")
if rank == 0: print(type(queue.submit(failing(InvalidArgumentError("heard")), "another")._error))
"""
    job = end(body)
    assert job.rc == 0
    assert job.err.count("nobody waited for the call, which failed:") == 2
    assert job.err.count("InvalidArgumentError: refused by all") == 2
    assert job.err.count("in failing") >= 2


@launches
def test_the_thread_ends_before_mpi_however_mpi_was_started():
    for before in ("", "from mpi4py import MPI\n"):
        job = end("start().wait()\nstart()", 2, before)
        assert job.rc == 0, job.err
        assert "Traceback" not in job.err


@launches
def test_mpi_without_threads():
    before = "import mpi4py; mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI\n"
    body = """
assert not transport.threads and not transport.dup().threads
work, other = start(), Queue(transport.dup())
assert (other.run(all_reduce(other.transport, np.ones(9, np.float32)), "y") == 2).all()
assert (work.wait() == 2).all()
import threading
assert threading.active_count() == 1
start()
"""
    job = end(body, 2, before)
    assert job.rc == 0, job.err
    assert job.err.count("UserWarning: MPI allows one thread only") == 1
    assert job.err.count("1 collective call was never waited for") == 2
