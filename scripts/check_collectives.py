#!/usr/bin/env python
"""Check every verb, dtype, op, size and algorithm against the answer in closed form.

    for n in 1 2 3 4 5 6 7 8; do mpirun -n $n python scripts/check_collectives.py; done

Prints a line for each algorithm: calls made and elements compared. Exits with 1 and
the first wrong case otherwise. Every case runs --repeats times, out of place, in
place and on registered memory in turn, and must give the same bits each time.
"""

import argparse
import hashlib
import itertools
import sys

import ml_dtypes
import numpy as np

import distrt
from distrt.communicator import Communicator
from distrt.reduce_op import ReduceOp

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
TWINS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


def values(rank, count, dtype, op):
    # PROD: ones and a few twos, so that eight ranks stay exact in every dtype.
    if op == "PROD":
        return np.where((np.arange(count) + rank) % 9 == 0, 2, 1).astype(dtype)
    return ((np.arange(count) * 3 + rank * 5) % 7).astype(dtype)


def truth(n, count, dtype, op):
    # float32 holds every partial result, and the last rounding is that of the dtype.
    wide = np.float64 if np.dtype(dtype).kind not in "iu" else np.int64
    parts = [values(r, count, dtype, op).astype(wide) for r in range(n)]
    fold = TWINS["SUM" if op == "MEAN" else op]
    result = parts[0]
    for part in parts[1:]:
        result = fold(result, part)
    if op == "MEAN":
        kind = np.float64 if wide is np.float64 else distrt_mean(dtype)
        return (result.astype(np.float64) / n).astype(dtype if wide is np.float64 else kind)
    return result.astype(dtype)


def distrt_mean(dtype):
    return np.float32 if np.dtype(dtype).itemsize <= 2 else np.float64


class WrongError(Exception):
    """A wrong result."""


def same(found, expected, *case):
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise WrongError(
            f"{case}: {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
        )
    wrong = int((found != expected).sum())
    if wrong:
        raise WrongError(
            f"{case}: {wrong} wrong elements, first {np.flatnonzero(found != expected)[0]}"
        )
    return expected.size


def check(comm, sizes, repeats):
    calls = elements = 0
    n, rank = comm.size, comm.rank
    for count, dtype, op in itertools.product(sizes, FLOATS + INTEGERS, [*TWINS, "MEAN"]):
        name, expected = np.dtype(dtype).name, truth(n, count, dtype, op)
        mine, bits = values(rank, count, dtype, op), set()
        for turn in range(repeats):
            source, out = mine.copy(), None
            if turn % 3 == 2 and expected.dtype == mine.dtype:
                source = comm.empty(mine, count, dtype)
                source[:] = mine
            if turn % 3 and expected.dtype == mine.dtype:
                out = source
            result = comm.all_reduce(source, ReduceOp[op], out=out)
            if turn == 0:
                elements += same(result, expected, "all_reduce", op, name, count, "rank", rank)
            bits.add(hashlib.sha1(result.tobytes()).digest())
            calls += 1
        if len(bits) != 1:
            raise WrongError(f"all_reduce {op} {name} {count}: not the same bits each time")
        part = comm.reduce_scatter(mine, ReduceOp[op]) if count else expected
        spans = np.array_split(np.arange(count), n)[rank] if count else slice(0)
        elements += same(part, expected[spans], "reduce_scatter", op, name, count, "rank", rank)
        root = count % n
        result = comm.reduce(mine, ReduceOp[op], root)
        if rank == root:
            elements += same(result, expected, "reduce", op, name, count)
        calls += 2
    for count, dtype in itertools.product(sizes, FLOATS + INTEGERS):
        parts = [values(r, count, dtype, "SUM") for r in range(n)]
        case = (np.dtype(dtype).name, count, "rank", rank)
        elements += same(comm.all_gather(parts[rank]), np.concatenate(parts), "all_gather", *case)
        elements += same(comm.broadcast(parts[rank], n - 1), parts[n - 1], "broadcast", *case)
        cuts = [np.array_split(part, n) for part in parts]
        counts = [len(cut) for cut in cuts[rank]]
        expected = np.concatenate([cut[rank] for cut in cuts])
        elements += same(comm.all_to_all(parts[rank], counts), expected, "all_to_all", *case)
        calls += 3
    return calls, elements


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--sizes", type=lambda t: [int(s) for s in t.split(",")])
    options = parser.parse_args()
    everyone = distrt.world().communicator
    n = everyone.size
    sizes = options.sizes or sorted({0, 1, n - 1, n, n + 1, 1023, 70001})
    for algorithm in ("ring", "direct"):
        settings = everyone.settings._replace(algorithm=algorithm)
        comm = Communicator(everyone.transport, settings, everyone.node)
        try:
            calls, elements = check(comm, sizes, options.repeats)
        except WrongError as failure:
            print(f"rank {comm.rank}: {algorithm}: {failure}", flush=True)
            sys.exit(1)
        used = comm.algorithm_for("all_reduce")
        if everyone.rank == 0:
            print(f"{n} ranks, {used}: {calls} calls, {elements} elements, none wrong", flush=True)


if __name__ == "__main__":
    main()
