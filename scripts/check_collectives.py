#!/usr/bin/env python
"""Check every verb, dtype, op, size and algorithm against the answer in closed form.

    for n in 1 2 3 4 5 6 7 8; do mpirun -n $n python scripts/check_collectives.py; done

Every case runs several times: out of place, in place, on registered memory and in the
background in turn, and must give the same bits each time; --repeats for the all_reduce of
``direct``, a fifth of it for everything else, three times from 100,000 elements on.
``hierarchical`` runs over pretended hosts, groups of ranks that share memory among themselves
only, of unequal numbers where the ranks do not divide. Prints a row for each verb and algorithm;
exits with 1 and the first wrong case otherwise.
"""

import argparse
import hashlib
import itertools
import sys
import time
from collections import Counter

import ml_dtypes
import numpy as np

import distrt
from distrt.communicator import Communicator
from distrt.reduce_op import ReduceOp
from distrt.transport.shared_memory import share

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
TWINS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
OPS = (*TWINS, "MEAN")
ALGORITHMS = ("direct", "ring", "halving_doubling", "hierarchical")
# Inputs repeat after so many elements, and so do the answers.
PERIOD = 63
LONG = 100_000


def values(rank, count, dtype, op="SUM"):
    at = np.arange(PERIOD) + rank
    # PROD: ones and a few twos, so that eight ranks stay exact in every dtype.
    period = np.where(at % 9 == 0, 2, 1) if op == "PROD" else (3 * at + 2 * rank) % 7
    return np.resize(period.astype(dtype), count)


def truth(n, count, dtype, op):
    # The wide type holds every partial result, and the last rounding is that of the dtype.
    whole = np.dtype(dtype).kind in "iu"
    wide = np.int64 if whole else np.float64
    parts = [values(r, PERIOD, dtype, op).astype(wide) for r in range(n)]
    fold = TWINS["SUM" if op == "MEAN" else op]
    result = parts[0]
    for part in parts[1:]:
        result = fold(result, part)
    if op == "MEAN":
        # The mean of integers is a float.
        mean = (np.float32 if np.dtype(dtype).itemsize <= 2 else np.float64) if whole else dtype
        result = (result.astype(np.float64) / n).astype(mean)
    else:
        result = result.astype(dtype)
    return np.resize(result, count)


class WrongError(Exception):
    """A wrong result."""


class Checked:
    """Makes calls of one communicator, and counts them by verb."""

    def __init__(self, comm, repeats):
        self.comm, self.repeats, self.calls = comm, repeats, Counter()
        self.turns = repeats

    def case(self, count, dtype, ops, others):
        """Check all_reduce and, where asked, the ``others`` with arrays of ``count`` elements."""
        self.turns = 3 if count >= LONG else self.repeats
        turns = self.turns
        for op in ops:
            self.turns = turns
            self._all_reduce(count, dtype, op)
            self.turns = min(turns, 20)
            if others:
                self._reductions(count, dtype, op)
        if others:
            self._moves(count, dtype)

    def same(self, verb, call, expected, *case):
        """Repeat ``call(turn)``; every result must have the expected elements and the same bits."""
        bits = set()
        for turn in range(self.turns):
            found = call(turn)
            self.calls[verb] += 1
            if expected is None or found is None:
                if found is not expected:
                    raise WrongError(f"{verb} {case}: {found!r}, not {expected!r}")
                continue
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                raise WrongError(f"{verb} {case}: {found.dtype}{found.shape}")
            if not turn and (found != expected).any():
                wrong = np.flatnonzero(found != expected)
                raise WrongError(f"{verb} {case}: {wrong.size} wrong elements, first {wrong[0]}")
            bits.add(hashlib.sha1(found.tobytes()).digest())
        if len(bits) > 1:
            raise WrongError(f"{verb} {case}: not the same bits each time")

    def _all_reduce(self, count, dtype, op):
        comm, n, rank = self.comm, self.comm.size, self.comm.rank
        mine, expected = values(rank, count, dtype, op), truth(n, count, dtype, op)
        case, parsed = (op, np.dtype(dtype).name, count, "rank", rank), ReduceOp[op]

        def all_reduce(turn):
            source = comm.empty(mine, count, dtype) if turn % 4 == 2 else np.empty_like(mine)
            source[:] = mine
            out = source if turn % 2 and expected.dtype == mine.dtype else None
            if turn % 4 == 3:
                return comm.all_reduce(source, parsed, out=out, async_op=True).wait()
            return comm.all_reduce(source, parsed, out=out)

        self.same("all_reduce", all_reduce, expected, *case)

    def _reductions(self, count, dtype, op):
        comm, n, rank = self.comm, self.comm.size, self.comm.rank
        mine, expected = values(rank, count, dtype, op), truth(n, count, dtype, op)
        case, parsed = (op, np.dtype(dtype).name, count, "rank", rank), ReduceOp[op]
        own = np.array_split(expected, n)[rank]
        self.same("reduce_scatter", lambda _: comm.reduce_scatter(mine, parsed), own, *case)
        root = count % n
        result = expected if rank == root else None
        self.same("reduce", lambda _: comm.reduce(mine, parsed, root), result, *case)

    def _moves(self, count, dtype):
        comm, n, rank = self.comm, self.comm.size, self.comm.rank
        parts = [values(r, count, dtype) for r in range(n)]
        mine, case = parts[rank], (np.dtype(dtype).name, count, "rank", rank)
        root, cuts = (count + 1) % n, [np.array_split(part, n) for part in parts]
        counts = [len(cut) for cut in cuts[rank]]
        joined = np.concatenate(parts)
        self.same("all_gather", lambda _: comm.all_gather(mine), joined, *case)
        gathered = joined if rank == root else None
        self.same("gather", lambda _: comm.gather(mine, root), gathered, *case)
        self.same("broadcast", lambda _: comm.broadcast(mine, root), parts[root], *case)
        self.same("scatter", lambda _: comm.scatter(mine, root), cuts[root][rank], *case)
        came = np.concatenate([cut[rank] for cut in cuts])
        self.same("all_to_all", lambda _: comm.all_to_all(mine, counts), came, *case)

    def strided(self):
        """A strided view that is reduced in place leaves its neighbours untouched."""
        n, rank, whole = self.comm.size, self.comm.rank, np.arange(3001, dtype=np.float32)
        mine = whole + rank
        self.comm.all_reduce(mine[::3], out=mine[::3])
        expected = whole + rank
        expected[::3] = n * whole[::3] + n * (n - 1) // 2
        self.same("all_reduce", lambda _: mine, expected, "strided view")

    def two_at_once(self):
        """Two communicators in opposite order on odd ranks do not wait for each other."""
        twin, ones, self.turns = self.comm.dup(), np.ones(5001, np.float32), 1
        pair = [(self.comm, 2), (twin, 3)][:: 1 if self.comm.rank % 2 else -1]
        for _ in range(self.repeats):
            works = [(c.all_reduce(ones * factor, async_op=True), factor) for c, factor in pair]
            for work, factor in works:
                expected = ones * factor * self.comm.size
                self.same("all_reduce", lambda _, w=work: w.wait(), expected, "two at once")
        twin.free()


def communicator(everyone, algorithm):
    """Return a communicator whose calls take ``algorithm`` where they can, or None."""
    n, rank = everyone.size, everyone.rank
    forced = {"direct": "direct", "hierarchical": "hierarchical"}
    settings = everyone.settings._replace(
        algorithm=forced.get(algorithm, f"ring,exchange,{algorithm}")
    )
    if algorithm != "hierarchical":
        return Communicator(everyone.transport, settings, everyone.node)
    if n < 3:
        return None
    hosts = 2 if n < 6 else 3
    group = [r for r in range(n) if r % hosts == rank % hosts]
    return Communicator(everyone.transport, settings, share(everyone.transport, group, settings))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--sizes", type=lambda t: [int(s) for s in t.split(",")])
    options = parser.parse_args()
    everyone = distrt.world().communicator
    n = everyone.size
    sizes = options.sizes or sorted({0, 1, n - 1, n, n + 1, 1023, 10**6 + 7})
    if everyone.rank == 0:
        print(f"# {n} ranks, sizes {sizes}, {len(FLOATS + INTEGERS)} dtypes, 5 ops", flush=True)
    for algorithm in ALGORITHMS:
        comm, started = communicator(everyone, algorithm), time.perf_counter()
        if comm is None:
            continue
        repeats = options.repeats if algorithm == "direct" else max(4, options.repeats // 5)
        checked = Checked(comm, repeats)
        try:
            for count, dtype in itertools.product(sizes, FLOATS + INTEGERS):
                # Only all_reduce is another one in pairs, or over hosts.
                checked.case(count, dtype, OPS, algorithm in ("direct", "ring"))
            checked.strided()
            checked.two_at_once()
        except WrongError as failure:
            print(f"rank {comm.rank}: {algorithm}: {failure}", flush=True)
            sys.exit(1)
        if everyone.rank == 0:
            calls = ", ".join(f"{verb} {count:,}" for verb, count in checked.calls.items())
            seconds = time.perf_counter() - started
            print(f"{algorithm}: none wrong in {calls} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
