#!/usr/bin/env python
"""Send more than 2^31 elements at once and check every one that arrives.

    mpirun -n 2 python scripts/large_messages.py

MPI counts in 32 bits, so 2^31 elements are where libraries break. Here a
broadcast, an all_reduce, an all_gather and a pickled object are longer than that,
and every rank compares every element with what it should be. Each step prints its
speed: the bytes of the result by the time of the slowest rank.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import distrt

EDGE = 1 << 31
GIB = 1 << 30

# In the largest steps each rank holds two arrays of the full size, or the object and
# its pickle: 2.2 bytes per element were measured.
BYTES_PER_ELEMENT = 2.5

# Element i of rank r is (i + r) % PERIOD. No power of two is a multiple of 7, so
# whatever goes missing, moves or wraps round at a limit of computers is seen; and
# the sum over the ranks still fits into int8.
PERIOD = 7
MOST_RANKS = 15
BLOCK = PERIOD << 20


# 1. The data, in blocks: a second array of the full size would not fit.
def blocks(elements, ranks):
    """Yield slices and the sum of the patterns of ``ranks`` in them."""
    period = np.add.outer(np.arange(PERIOD), list(ranks)) % PERIOD
    block = np.tile(period.sum(axis=1).astype(np.int8), BLOCK // PERIOD)
    for start in range(0, elements, BLOCK):
        stop = min(start + BLOCK, elements)
        yield slice(start, stop), block[: stop - start]


def filled(elements, rank):
    array = np.empty(elements, np.int8)
    for place, values in blocks(elements, [rank]):
        array[place] = values
    return array


def check(what, array, elements, ranks):
    if array.shape != (elements,) or array.dtype != np.int8:
        sys.exit(f"{what}: expected int8[{elements}], got {array.dtype}{list(array.shape)}")
    for place, values in blocks(elements, ranks):
        wrong = np.flatnonzero(array[place] != values)
        if wrong.size:
            first = wrong[0]
            sys.exit(
                f"{what}: element {place.start + first} should be {values[first]} "
                f"and is {array[place][first]}"
            )


# 2. The steps. Each checks its result and returns the result's bytes and the
# seconds of the collective alone, which all ranks start together.
def timed(communicator, call):
    communicator.barrier()
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def try_broadcast(communicator, elements):
    array = filled(elements, 0) if communicator.rank == 0 else np.empty(elements, np.int8)
    result, seconds = timed(communicator, lambda: communicator.broadcast(array))
    check("broadcast", result, elements, [0])
    return result.nbytes, seconds


def try_all_reduce(communicator, elements):
    array = filled(elements, communicator.rank)
    _, seconds = timed(communicator, lambda: communicator.all_reduce(array, "SUM", out=array))
    check("all_reduce", array, elements, range(communicator.size))
    return array.nbytes, seconds


def try_all_gather(communicator, elements):
    length = -(-elements // communicator.size)
    part = filled(length, communicator.rank)
    result, seconds = timed(communicator, lambda: communicator.all_gather(part))
    for rank, gathered in enumerate(np.split(result, communicator.size)):
        check(f"all_gather, part {rank}", gathered, length, [rank])
    return result.nbytes, seconds


def try_broadcast_object(communicator, elements):
    value = ["a pickle", filled(elements, 0)] if communicator.rank == 0 else None
    result, seconds = timed(communicator, lambda: communicator.broadcast_object(value))
    check("broadcast_object", result[1], elements, [0])
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
        beyond = "beyond" if options.elements > EDGE else "not beyond"
        print(f"{beyond} 2^31 elements, over {everyone.library}")


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
