"""Exchange by itself, over threads: any pattern of moves, any window, memory far from messages."""

import random

import numpy as np
import pytest

from distrt.collectives import exchange, schedule
from distrt.collectives.exchange import Exchange, Move
from distrt.transport.base import Tag
from distrt.transport.loopback import LoopbackWorld
from tests.collectives.far_memory import FarMemory


def message(source, dest, number, length):
    return ((np.arange(length) + 7 * source + 31 * dest + 101 * number) % 251).astype(np.uint8)


def run(size, moves, window=2, segment_bytes=3, order=None):
    """Move ``moves``, a list of (source, dest, length), and compare what arrives."""

    def body(transport):
        rank, seen, sends, receives = transport.rank, {}, [], []
        for source, dest, length in moves:
            number = seen[source, dest] = seen.get((source, dest), -1) + 1
            what = message(source, dest, number, length)
            if source == rank:
                sends.append(Move(dest, what))
            if dest == rank:
                receives.append((Move(source, np.full(length, 255, np.uint8)), what))
        if order is not None:
            # A rank may list its peers in any order, but each peer's moves in theirs.
            key = random.Random(order + rank).random
            places = [key() for _ in range(size)]
            sends.sort(key=lambda move: places[move.peer])
            receives.sort(key=lambda pair: places[-1 - pair[0].peer])
        done = Exchange(
            transport,
            sends,
            [move for move, _ in receives],
            window,
            segment_bytes=segment_bytes,
        )
        transport.drive(done.step, "the test")
        assert done.step(), "done stays done"
        for move, expected in receives:
            assert (move.view == expected).all()

    world = LoopbackWorld(size)
    world.run(body)
    assert not any(world._sends.values()) and not any(world._receives.values())


@pytest.mark.parametrize("window", [1, 2, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_to_all_gather_and_scatter(size, window):
    ranks = range(size)
    run(size, [(s, d, (3 * s + 5 * d) % 11) for s in ranks for d in ranks], window)
    run(size, [(s, size - 1, 4) for s in ranks], window)
    run(size, [(0, d, d) for d in ranks], window)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_no_pattern_locks(seed, window):
    """With a window of one, circles of ranks that each send first would, in any other order."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4, 7])
    length = [0, 1, 2, 3, 4, 9]
    moves = [
        (draw.randrange(size), draw.randrange(size), draw.choice(length))
        for _ in range(draw.randrange(40))
    ]
    run(size, moves, window, order=seed)


def test_a_circle_in_the_least_friendly_order():
    run(3, [(0, 1, 5), (1, 2, 5), (2, 0, 5), (0, 2, 5), (2, 1, 5), (1, 0, 5)], 1)
    run(3, [(0, 2, 5), (2, 1, 5), (1, 0, 5), (0, 1, 5), (1, 2, 5), (2, 0, 5)], 1)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 6, 7, 1009])
def test_segments_and_the_default_message_limit(length):
    run(2, [(0, 1, length), (1, 1, length), (1, 0, length)], segment_bytes=3)

    def body(transport):
        transport.max_message_bytes = 4
        other, got = 1 - transport.rank, np.empty(length, np.uint8)
        sent = message(transport.rank, other, 0, length)
        step = Exchange(transport, [Move(other, sent)], [Move(other, got)]).step
        transport.drive(step, "the test")
        assert (got == message(other, transport.rank, 0, length)).all()

    LoopbackWorld(2).run(body)


def test_far_memory_is_staged_within_the_window(monkeypatch):
    kernels = FarMemory()
    monkeypatch.setattr(exchange, "kernels_for", lambda view: kernels)
    run(4, [(s, d, 1 + s + d) for s in range(4) for d in range(4)], window=1)
    world = LoopbackWorld(2)
    sends = [Move(1, np.zeros(30, np.uint8))]
    receives = [Move(1, np.zeros(20, np.uint8))]
    done = Exchange(world.transport(0), sends, receives, 2, segment_bytes=5)
    assert not done.step()
    for queues in (world._sends, world._receives):
        assert [len(queue) for queue in queues.values() if queue] == [2]


def test_calls_with_tags_of_their_own_do_not_mix():
    def body(transport):
        other = 1 - transport.rank
        got = [np.empty(4, np.uint8), np.empty(4, np.uint8)]
        steps = [
            Exchange(
                transport,
                [Move(other, np.full(4, number, np.uint8))],
                [Move(other, got[number])],
                tag=Tag.EXCHANGE + 100 + number,
            ).step
            for number in (0, 1)
        ]
        # The ranks begin them in opposite order.
        for step in steps[:: 1 if transport.rank else -1]:
            step()
        for step in steps:
            transport.drive(step, "the test")
        assert [part.tolist() for part in got] == [[0] * 4, [1] * 4]

    LoopbackWorld(2).run(body)


def test_parts_of_one_array_are_the_moves_of_an_all_to_all():
    def body(transport):
        size, rank = transport.size, transport.rank
        lengths = [1 + rank + other for other in range(size)]
        out, into = np.full(sum(lengths), rank, np.uint8), np.empty(sum(lengths), np.uint8)
        spans = schedule.joined(lengths)
        sends = [Move(other, out[spans[other].slice]) for other in range(size)]
        receives = [Move(other, into[spans[other].slice]) for other in range(size)]
        transport.drive(Exchange(transport, sends, receives).step, "the test")
        assert into.tolist() == [r for r in range(size) for _ in range(lengths[r])]

    LoopbackWorld(3).run(body)
