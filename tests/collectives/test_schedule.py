"""The ring schedules, run with integers only: no bytes, no threads, no processes."""

from collections import deque

import pytest

from distrt.collectives import schedule
from distrt.collectives.schedule import Action, Span

SIZES = range(2, 65)


def simulate(programs, window=None):
    """Run the programs of all ranks over rendezvous channels; return what each rank holds.

    A chunk travels as the list of the ranks that have folded their input into
    it. With a window, a rank accepts at most that many chunks before it acts on
    them, and a send leaves only when it is accepted: a schedule that could
    deadlock does so here.
    """
    size = len(programs)
    todo = [deque(p) for p in programs]
    outbox = [deque() for _ in range(size)]
    inbox = [deque() for _ in range(size)]
    stored = [{} for _ in range(size)]
    room = window or 10**9
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            right = (rank + 1) % size
            while outbox[rank] and len(inbox[right]) < room:
                inbox[right].append(outbox[rank].popleft())
                moved = True
            while todo[rank] and (not todo[rank][0].receives or inbox[rank]):
                hop = todo[rank].popleft()
                moved = True
                if hop.receives:
                    chunk, history = inbox[rank].popleft()
                    assert chunk == hop.chunk, f"rank {rank} expected {hop.chunk}, got {chunk}"
                else:
                    chunk, history = hop.chunk, []
                if hop.action is not Action.STORE:
                    history = [*history, rank]
                if hop.action in (Action.FINISH, Action.STORE):
                    assert chunk not in stored[rank], "stored twice"
                    stored[rank][chunk] = history
                if hop.sends:
                    outbox[rank].append((chunk, history))
    assert not any(todo), "deadlock"
    assert not any(outbox) and not any(inbox), "messages nobody expects"
    return stored


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_folds_every_rank_once_and_reaches_all(size, window):
    stored = simulate([schedule.all_reduce(size, r) for r in range(size)], window)
    for rank in range(size):
        assert sorted(stored[rank]) == list(range(size))
        for chunk, history in stored[rank].items():
            assert sorted(history) == list(range(size))
            assert history == stored[0][chunk], "ranks would end with different bits"


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_is_reduce_scatter_and_all_gather_on_the_same_chunks(size):
    scattered = simulate([schedule.reduce_scatter(size, r) for r in range(size)])
    assert [list(s) for s in scattered] == [[r] for r in range(size)]
    both = simulate([schedule.all_reduce(size, r) for r in range(size)])
    for rank in range(size):
        assert both[rank][rank] == scattered[rank][rank]
    gathered = simulate([schedule.all_gather(size, r) for r in range(size)])
    for rank in range(size):
        assert gathered[rank] == {c: [c] for c in range(size) if c != rank}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 64])
def test_broadcast_and_reduce_for_every_root(size):
    for root in range(size):
        stored = simulate([schedule.broadcast(size, r, root) for r in range(size)])
        assert all(stored[r] == ({} if r == root else {0: [root]}) for r in range(size))
        stored = simulate([schedule.reduce(size, r, root) for r in range(size)])
        assert [r for r in range(size) if stored[r]] == [root]
        assert sorted(stored[root][0]) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_balanced(size):
    for rank in range(size):
        hops = schedule.all_reduce(size, rank)
        assert sum(hop.sends for hop in hops) == 2 * (size - 1)
        assert sum(hop.receives for hop in hops) == 2 * (size - 1)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 6, 7, 8, 63, 64, 65, 1009])
def test_chunks_cover_the_buffer_evenly(count, parts):
    spans = schedule.chunks(count, parts)
    assert len(spans) == parts
    assert [i for s in spans for i in range(s.offset, s.offset + s.length)] == list(range(count))
    assert max(s.length for s in spans) - min(s.length for s in spans) <= 1


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 100])
def test_segments_cover_the_span(limit):
    for count in (0, 1, 2, 3, 4, 5, 11):
        pieces = list(schedule.segments(Span(10, count), limit))
        covered = [i for s in pieces for i in range(s.offset, s.offset + s.length)]
        assert covered == list(range(10, 10 + count))
        assert all(1 <= s.length <= limit for s in pieces)


def meet(programs, count):
    """Run the rounds of all ranks; return what each rank holds, element by element.

    A partial result is (first rank, last rank + 1): whatever is folded must be neighbours,
    the lower ones first. A complete one is marked. A rank is in one round at a time, so
    a schedule in which ranks wait for each other in a circle gets stuck here.
    """
    todo = [deque(program) for program in programs]
    held = [[(rank, rank + 1)] * count for rank in range(len(programs))]
    moved = True
    while moved:
        moved = False
        for low in range(len(programs)):
            high = todo[low][0].peer if todo[low] else low
            if low >= high or not todo[high] or todo[high][0].peer != low:
                continue
            moved, both = True, {low: todo[low].popleft(), high: todo[high].popleft()}
            assert both[low].sent.length == both[high].received.length
            before = {rank: list(held[rank]) for rank in both}
            for rank, other in ((low, high), (high, low)):
                act, into = both[rank].action, both[rank].received
                assert not into.length or into == both[other].sent
                assert (act is Action.LOAD) == (into == Span(0, 0) and both[rank].sent.length > 0)
                for i in range(into.offset, into.offset + into.length):
                    a, b = before[low][i], before[high][i]
                    if act is Action.STORE:
                        held[rank][i] = before[other][i]
                        assert held[rank][i] == "complete"
                    else:
                        assert a[1] == b[0], "folded out of order, or twice"
                        held[rank][i] = (a[0], b[1])
                        if act is Action.FINISH:
                            assert held[rank][i] == (0, len(programs))
                            held[rank][i] = "complete"
    assert not any(todo), "deadlock"
    return held


@pytest.mark.parametrize("make", [schedule.recursive_doubling, schedule.halving_doubling])
@pytest.mark.parametrize("size", range(1, 65))
def test_pairs_fold_every_rank_once_in_order_and_complete_all(size, make):
    for count in (1, 2, size - 1, size, size + 1, 3 * size + 1):
        held = meet([make(size, rank, count) for rank in range(size)], count)
        expected = "complete" if size > 1 else (0, 1)
        assert held == [[expected] * count] * size


@pytest.mark.parametrize("size", SIZES)
def test_steps_and_bytes_of_pairs(size):
    power = 1 << (size.bit_length() - 1)
    log, extra, count = power.bit_length() - 1, size > power, 4 * power
    for rank in range(size):
        short = schedule.recursive_doubling(size, rank, count)
        long = schedule.halving_doubling(size, rank, count)
        assert len(short) <= log + 2 * extra and len(long) <= 2 * log + 2 * extra
        assert sum(r.sent.length for r in short) <= count * (log + extra)
        assert sum(r.sent.length for r in long) <= 2 * (count - count // power) + count * extra
        # The same number of rounds for any count: ranks cannot lose step over short buffers.
        assert len(schedule.halving_doubling(size, rank, 0)) == len(long)
