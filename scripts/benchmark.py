#!/usr/bin/env python
"""Time distrt's collectives beside those of the MPI that carries them.

    mpirun -n 2 python scripts/benchmark.py
    mpirun -n 4 python scripts/benchmark.py --verb all_gather --max-bytes 16M --dtype float16

The columns are those of nccl-tests: for each size the time of a call, algbw
(bytes by time), busbw (what each link must carry, so that verbs and numbers of
ranks can be compared), in decimal GB/s, and the number of wrong elements. Sizes
are those of the whole buffer. "mpi" is the same call by MPI itself on the same
arrays. Both are measured in turn within one run (ours, theirs, ours, theirs),
each call by its slowest rank, and the median is shown: on a shared machine only
what alternates can be compared.
"""

import argparse
import time

import numpy as np

import distrt

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


# 1. The verbs: how distrt and MPI are asked, and what share of the buffer a link
# carries for n ranks. Source of the factors: nccl-tests' performance notes.
def all_reduce(comm, mpi, array, result):
    ours = lambda: comm.all_reduce(array, out=result)  # noqa: E731
    theirs = lambda: mpi.Allreduce(array, result)  # noqa: E731
    return ours, theirs, lambda: comm.size * (comm.size + 1) // 2


def broadcast(comm, mpi, array, result):
    def theirs():
        result[...] = array
        mpi.Bcast(result)
        return result

    return lambda: comm.broadcast(array), theirs, lambda: 1


def all_gather(comm, mpi, array, result):
    part = array[: array.size // comm.size]
    whole = result[: part.size * comm.size]
    ranks = np.repeat(np.arange(1, comm.size + 1), part.size).astype(array.dtype)
    return lambda: comm.all_gather(part), lambda: mpi.Allgather(part, whole), lambda: ranks


VERBS = {
    "all_reduce": (all_reduce, lambda n: 2 * (n - 1) / n),
    "broadcast": (broadcast, lambda n: 1.0),
    "all_gather": (all_gather, lambda n: (n - 1) / n),
}


def bandwidths(verb, size, seconds, ranks):
    """Return (algbw, busbw) in decimal GB/s of a call on ``size`` bytes."""
    algbw = size / seconds / 1e9
    return algbw, algbw * VERBS[verb][1](ranks)


# 2. A call is as slow as its slowest rank; all start together.
def timed(comm, call):
    comm.barrier()
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def measure(comm, calls, seconds, most):
    """Return each call's median time, and its last result. All ranks must call."""
    results = [call() for call in calls]
    warm = float(comm.all_reduce(sum(timed(comm, call)[0] for call in calls), "MAX"))
    rounds = int(min(most, max(3, seconds / max(warm, 1e-6))))
    times = np.empty((rounds, len(calls)))
    for row in times:
        for column, call in enumerate(calls):
            row[column], results[column] = timed(comm, call)
    return np.median(comm.all_reduce(times, "MAX"), axis=0), results


def parse_bytes(text):
    number, unit = text.rstrip("KMG"), text[len(text.rstrip("KMG")) :]
    return int(number) * UNITS[unit]


def main():
    options = parse_options()
    world = distrt.world()
    comm, verb = world.communicator, VERBS[options.verb][0]
    # MPI itself, for comparison; distrt has started it by now.
    from mpi4py import MPI

    chief = comm.rank == 0
    if chief:
        print(
            f"# {options.verb} {options.dtype}, {comm.size} ranks on {world.topology.nodes} host(s)"
        )
        print(f"# {world.library}; algorithm {comm.algorithm}; medians, times in us, GB/s decimal")
        print("#    bytes       time   algbw   busbw  #wrong |   mpi time   busbw | mpi / distrt")
    size = options.min_bytes
    while size <= options.max_bytes:
        array = np.full(
            max(1, size // np.dtype(options.dtype).itemsize), comm.rank + 1, options.dtype
        )
        ours, theirs, expected = verb(comm, MPI.COMM_WORLD, array, np.empty_like(array))
        medians, results = measure(comm, (ours, theirs), options.seconds, options.rounds)
        wrong = comm.all_reduce(np.count_nonzero(results[0] != expected()))
        algbw, busbw = bandwidths(options.verb, array.nbytes, medians[0], comm.size)
        other = bandwidths(options.verb, array.nbytes, medians[1], comm.size)[1]
        if chief:
            print(
                f"{array.nbytes:>10} {medians[0] * 1e6:>10.1f} {algbw:>7.2f} {busbw:>7.2f} "
                f"{int(wrong):>7} | {medians[1] * 1e6:>10.1f} {other:>7.2f} | "
                f"{medians[1] / medians[0]:>6.2f}x",
                flush=True,
            )
        size *= options.factor


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verb", choices=VERBS, default="all_reduce")
    parser.add_argument("--dtype", default="float32", choices=["float16", "float32", "float64"])
    parser.add_argument("--min-bytes", type=parse_bytes, default=64, help="such as 64, 4K, 1M")
    parser.add_argument("--max-bytes", type=parse_bytes, default=64 << 20)
    parser.add_argument("--factor", type=int, default=4, help="from size to size")
    parser.add_argument("--seconds", type=float, default=1.0, help="about this long for each size")
    parser.add_argument("--rounds", type=int, default=500, help="at most this many for each size")
    options = parser.parse_args()
    if options.factor < 2 or options.min_bytes < 1:
        parser.error("--factor must be at least 2 and --min-bytes at least 1")
    return options


if __name__ == "__main__":
    main()
