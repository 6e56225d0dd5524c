#!/usr/bin/env python
"""Send more than 2^31 elements at once and check every one that arrives.

    mpirun -n 2 python scripts/large_messages.py

MPI counts in 32 bits, so 2^31 elements are where libraries break. Here a
broadcast, an all_reduce, an all_gather and a pickled object are longer than that.
The data are zeros with marks at both ends and around 2^31, so that whatever goes
missing, moves or wraps round is seen on every rank. Each step prints its speed:
the bytes of the result by the time of the slowest rank.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import distrt

EDGE = 1 << 31
GIB = 1 << 30

# The largest step is the object's: a receiver has the pickle and the object, and
# the sender's pickle grows by half its size at a time while it is made.
BYTES_PER_ELEMENT = 2.5
MOST_RANKS = 15  # the sum of their marks still fits into int8


# 1. The marks, place -> value. They depend on the place and the rank, so that an
# element that lands in another's place is seen.
def marks(elements, rank=0):
    wanted = (0, 1, EDGE // 2, EDGE - 1, EDGE, EDGE + 1, elements - 2, elements - 1)
    places = sorted({place for place in wanted if 0 <= place < elements})
    return {place: 1 + (n + rank) % 8 for n, place in enumerate(places)}


def marked(elements, rank=0):
    array = np.zeros(elements, np.int8)
    for place, value in marks(elements, rank).items():
        array[place] = value
    return array


def check(what, array, elements, expected):
    if array.shape != (elements,) or array.dtype != np.int8:
        sys.exit(f"{what}: expected int8[{elements}], got {array.dtype}{list(array.shape)}")
    for place, value in expected.items():
        if array[place] != value:
            sys.exit(f"{what}: element {place} should be {value} and is {array[place]}")
    nonzero = np.count_nonzero(array)
    if nonzero != len(expected):
        sys.exit(f"{what}: {nonzero} elements are not zero, expected {len(expected)}")


# 2. The steps. Each checks its result and returns the result's bytes and the
# seconds of the collective alone, which all ranks start together.
def timed(communicator, call):
    communicator.barrier()
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def try_broadcast(communicator, elements):
    array = marked(elements) if communicator.rank == 0 else np.zeros(elements, np.int8)
    result, seconds = timed(communicator, lambda: communicator.broadcast(array))
    check("broadcast", result, elements, marks(elements))
    return result.nbytes, seconds


def try_all_reduce(communicator, elements):
    array = marked(elements, communicator.rank)
    _, seconds = timed(communicator, lambda: communicator.all_reduce(array, "SUM", out=array))
    of_ranks = [marks(elements, rank) for rank in range(communicator.size)]
    sums = {place: sum(own[place] for own in of_ranks) for place in of_ranks[0]}
    check("all_reduce", array, elements, sums)
    return array.nbytes, seconds


def try_all_gather(communicator, elements):
    length = -(-elements // communicator.size)
    part = marked(length, communicator.rank)
    result, seconds = timed(communicator, lambda: communicator.all_gather(part))
    expected = {
        rank * length + place: value
        for rank in range(communicator.size)
        for place, value in marks(length, rank).items()
    }
    check("all_gather", result, length * communicator.size, expected)
    return result.nbytes, seconds


def try_broadcast_object(communicator, elements):
    value = ["a pickle", marked(elements)] if communicator.rank == 0 else None
    result, seconds = timed(communicator, lambda: communicator.broadcast_object(value))
    check("broadcast_object", result[1], elements, marks(elements))
    return result[1].nbytes, seconds


STEPS = {
    "broadcast": try_broadcast,
    "all_reduce": try_all_reduce,
    "all_gather": try_all_gather,
    "broadcast_object": try_broadcast_object,
}


# 3. Too little memory would end in the kernel killing a rank, so ask beforehand,
# on every host.
def available_memory():
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, amount = line.split(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def reason_to_refuse(everyone, elements):
    """Return the same text on all ranks, or None where all is well. All ranks must call."""
    communicator, topology = everyone.communicator, everyone.topology
    needed = int(BYTES_PER_ELEMENT * elements * topology.local_size)
    hosts = communicator.all_gather_object((needed, available_memory()))
    if communicator.rank == 0:
        text = "{} elements need about {:.1f} GiB on the host of rank 0, {:.1f} GiB are available"
        print(text.format(elements, needed / GIB, hosts[0][1] / GIB), flush=True)
    if not 2 <= communicator.size <= MOST_RANKS:
        return f"expected 2 to {MOST_RANKS} ranks, got {communicator.size}: mpirun -n 2 ..."
    for rank, (needs, has) in enumerate(hosts):
        if needs > has:
            return (
                f"the host of rank {rank} needs about {needs / GIB:.1f} GiB and has "
                f"{has / GIB:.1f} GiB available: try fewer --elements"
            )
    return None


def main():
    options = parse_options()
    everyone = distrt.world()
    communicator = everyone.communicator
    refused = reason_to_refuse(everyone, options.elements)
    if refused:
        if communicator.rank == 0:
            print(refused, file=sys.stderr, flush=True)
        communicator.barrier()  # a rank that exits first would cut rank 0 short
        sys.exit(2)
    for name in options.steps:
        size, seconds = STEPS[name](communicator, options.elements)
        slowest = communicator.all_reduce(seconds, "MAX")
        if communicator.rank == 0:
            rate = size / 1e9 / float(slowest)
            print(
                f"{name:16} {size:>14,} bytes  {float(slowest):8.2f} s  {rate:6.2f} GB/s  "
                f"right on {communicator.size} ranks",
                flush=True,
            )
    if communicator.rank == 0:
        beyond = "more than 2^31 elements" if options.elements > EDGE else "smaller than 2^31"
        print(f"{beyond}, over {everyone.library}")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--elements", type=int, default=EDGE + 8, help="of one byte each (default: 2^31 + 8)"
    )
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    options = parser.parse_args()
    if options.elements < 1:
        parser.error(f"--elements: expected at least 1, got {options.elements}")
    return options


if __name__ == "__main__":
    main()
