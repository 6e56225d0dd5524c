#!/usr/bin/env python
"""Time distrt's collectives beside those of the MPI that carries them.

    mpirun -n 2 python scripts/bench_collectives.py
    mpirun -n 4 python scripts/bench_collectives.py --verbs all_gather --sizes 64K:16M:4 --plain

The columns are those of nccl-tests: size, count, type, redop, time, algbw (bytes by
time), busbw (what each link must carry), in decimal GB/s, and the number of wrong
elements, out of place and in place. "mpi" is the same call by MPI itself. Both are
measured in turn within one run (ours, theirs, ours, theirs), each call by its
slowest rank, and the median is shown: on a shared machine only what alternates
can be compared.

--cycle (default) shows what training pays: each rank writes fresh input, calls, and
reads the whole result; the time is that of this cycle less that of the same cycle
without the call. --repeat times the call alone on untouched buffers, as the OSU
tests do, which flatters shared memory. "limit" is the same memory traffic without
any synchronisation, in the same cycles of the same run, and "% limit" the share of it
that the call's own time reaches. A wrong element fails the run, and so does a call of
1 MiB or more that is over 5 % faster than its limit.
"""

import argparse
import json
import math
import os
import platform
import sys
import time

import numpy as np

import distrt

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# The share of the buffer that a link carries, for n ranks. Source: nccl-tests' notes.
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
IN_PLACE = ("all_reduce", "broadcast")
# What n ranks make of own, own + 1, ... own + n - 1, and MPI's nearest op (it has no mean).
OPS = {
    "SUM": (lambda own, n: own * n + n * (n - 1) // 2, "SUM"),
    "MEAN": (lambda own, n: own + (n - 1) / 2, "SUM"),
    "MIN": (lambda own, n: own, "MIN"),
    "MAX": (lambda own, n: own + n - 1, "MAX"),
    "PROD": (lambda own, n: np.prod([own + r for r in range(n)], axis=0), "PROD"),
}


# 1. The verbs: buffers, how distrt and MPI are asked, and the right answer. Rank r
# fills its input with pattern(count) + r, so every result is known in closed form.
def pattern(count, dtype):
    return (np.arange(count) % 5).astype(dtype)


def shapes(verb, count, n):
    """Return the lengths of input and output; ``count`` is that of the whole buffer."""
    whole = count // n * n if verb not in ("all_reduce", "broadcast") else count
    return {
        "reduce_scatter": (whole, whole // n),
        "all_gather": (whole // n, whole),
        "all_to_all": (whole, whole),
    }.get(verb, (count, count))


def expected(verb, op, lengths, rank, n, dtype):
    own = pattern(lengths[0], dtype).astype(np.float64)
    part = lengths[0] // n
    return {
        "all_reduce": lambda: OPS[op][0](own, n),
        "reduce_scatter": lambda: OPS[op][0](own, n)[rank * part : (rank + 1) * part],
        "all_gather": lambda: np.concatenate([own + r for r in range(n)]),
        "all_to_all": lambda: np.concatenate(
            [(own + r)[rank * part : (rank + 1) * part] for r in range(n)]
        ),
        "broadcast": lambda: own,
    }[verb]().astype(dtype)


def our_call(comm, verb, op, source, target):
    op = distrt.ReduceOp[op]
    return {
        "all_reduce": lambda: comm.all_reduce(source, op, out=target),
        "reduce_scatter": lambda: comm.reduce_scatter(source, op, out=target),
        "all_gather": lambda: comm.all_gather(source, out=target),
        "all_to_all": lambda: comm.all_to_all(source, out=target),
        "broadcast": lambda: comm.broadcast(source, 0, out=target),
    }[verb]


def mpi_call(verb, op, source, target):
    """Return MPI's call on these arrays, or None where this MPI has no such type."""
    # distrt has started MPI by now; imported earlier, mpi4py would.
    from mpi4py import MPI

    comm, place, op = MPI.COMM_WORLD, source is target, getattr(MPI, OPS[op][1])
    # Halves view as bytes where they only move.
    type_of = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int32": MPI.INT32_T}
    kind = type_of.get(source.dtype.name)
    if kind is None and verb in ("all_reduce", "reduce_scatter"):
        kind = half_type(MPI, source.dtype.name)
        if kind is None:
            return None
    if kind is None:
        kind, source, target = MPI.BYTE, source.view(np.uint8), target.view(np.uint8)
    given, result = [source, kind], [target, kind]
    if verb == "broadcast":

        def broadcast():
            if comm.rank == 0 and not place:
                target[...] = source
            comm.Bcast(result, 0)

        return broadcast
    return {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE if place else given, result, op),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(given, result, op=op),
        "all_gather": lambda: comm.Allgather(given, result),
        "all_to_all": lambda: comm.Alltoall(given, result),
    }[verb]


def half_type(MPI, name):
    """Return MPI's type of a half, which most MPIs have for float16 only, or None."""
    kind = getattr(MPI, {"float16": "FLOAT16_T", "bfloat16": "BFLOAT16_T"}.get(name, ""), None)
    return None if kind is None or kind == MPI.DATATYPE_NULL else kind


# 2. Timing. A cycle writes the input, calls, and reads the whole result; what the
# same cycle takes without the call is measured in the same round and taken off.
class Cycle:
    """The write and the read around a call."""

    def __init__(self, source, target, rank):
        self.source, self.target = source, target
        self.fresh = pattern(source.size, source.dtype) + source.dtype.type(rank)
        self.words = target.view(np.uint8)[: target.nbytes // 8 * 8].view(np.uint64)

    def write(self):
        """Write fresh input, as its owner."""
        np.copyto(self.source, self.fresh)

    def read(self):
        """Read the whole result."""
        if self.words.size:
            np.bitwise_or.reduce(self.words)


def timed(start, call, cycle):
    """Return the seconds of the whole cycle and of the call in it; ``cycle``: None for none."""
    start()
    started = time.perf_counter()
    if cycle:
        cycle.write()
    before = time.perf_counter()
    call()
    after = time.perf_counter()
    if cycle:
        cycle.read()
    return time.perf_counter() - started, after - before


def nothing():
    pass


def measure(comm, calls, cycles, options):
    """Return (cycle, call) medians of each call over all rounds, each by its slowest rank."""
    with_rest = [*zip(calls, cycles, strict=True), (nothing, cycles[0])]
    if not options.cycle:
        with_rest = [(call, None) for call, _ in with_rest]
    warm = 0.0
    for _ in range(2):
        warm = sum(timed(comm.barrier, call, cycle)[0] for call, cycle in with_rest)
    warm = float(comm.all_reduce(np.float64(warm), "MAX"))
    rounds = int(min(options.iters, max(7, options.seconds / max(warm, 1e-6))))
    times = np.empty((rounds, len(with_rest), 2))
    for row in times:
        for column, (call, cycle) in enumerate(with_rest):
            row[column] = timed(comm.barrier, call, cycle)
    return np.median(comm.all_reduce(times, "MAX"), axis=0)


def net(medians, column, options):
    """Return (call, net): the cycle less the empty one; None where noise ate the difference."""
    cycle, call = medians[column]
    if not options.cycle:
        return call, call
    left = cycle - medians[-1][0]
    return call, left if left > 0.2 * call else None


# 3. One row: a verb, a size, in or out of place.
def run_row(comm, verb, count, in_place, options):
    make = distrt.empty if options.registered else np.empty
    dtype, n = np.dtype(options.dtype), comm.size
    lengths = shapes(verb, count, n)
    source = make(lengths[0], dtype)
    target = source if in_place else make(lengths[1], dtype)
    cycle = Cycle(source, target, comm.rank)
    ours = our_call(comm, verb, options.op, source, target)
    right = expected(verb, options.op, lengths, comm.rank, n, dtype)

    def count_wrong():
        cycle.write()
        ours()
        return int(comm.all_reduce(np.int64((target != right).sum())))

    wrong = count_wrong()
    calls, cycles = [ours], [cycle]
    if options.peer == "mpi":
        plain = np.empty(lengths[0], dtype)
        result = plain if in_place else np.empty(lengths[1], dtype)
        call = mpi_call(verb, options.op, plain, result)
        if call is not None:
            calls.append(call)
            cycles.append(Cycle(plain, result, comm.rank))
    medians = measure(comm, calls, cycles, options)
    wrong += count_wrong()
    limit = None
    if options.limit and comm.algorithm_for(verb) == "direct":
        with comm.unsynchronised(ours):
            limit = measure_alone(ours, cycle, options)
        limit = float(comm.all_reduce(np.float64(limit), "MAX"))
    return row_of(comm, verb, lengths, in_place, wrong, medians, limit, len(calls) > 1, options)


def measure_alone(call, cycle, options):
    # The channel waits for nobody now, so MPI's barrier makes the ranks start together.
    from mpi4py import MPI

    start, around = MPI.COMM_WORLD.Barrier, cycle if options.cycle else None
    times = [timed(start, call, around)[1] for _ in range(min(options.iters, 50))]
    return float(np.median(times))


def row_of(comm, verb, lengths, in_place, wrong, medians, limit, has_peer, options):
    size_bytes = max(lengths) * np.dtype(options.dtype).itemsize
    call, shown = net(medians, 0, options)
    peer_call, peer_shown = net(medians, 1, options) if has_peer else (None, None)
    algbw = size_bytes / call / 1e9
    micro = lambda seconds: None if seconds is None else seconds * 1e6  # noqa: E731
    return {
        "verb": verb,
        "size_bytes": size_bytes,
        "count": max(lengths),
        "dtype": options.dtype,
        "op": options.op if verb in ("all_reduce", "reduce_scatter") else "none",
        "algorithm": comm.algorithm_for(verb),
        "registered": options.registered,
        "in_place": in_place,
        "time_us": micro(call),
        "cycle_us": micro(shown),
        "algbw_gbps": algbw,
        "busbw_gbps": algbw * BUS[verb](comm.size),
        "wrong": wrong,
        "peer": options.peer if has_peer else None,
        "peer_time_us": micro(peer_call),
        "peer_cycle_us": micro(peer_shown),
        "limit_us": micro(limit),
    }


HEADER = (
    "#       size       count     type  redop place |    time  algbw  busbw #wrong |    net us"
    " |   mpi net vs mpi | % limit"
)


def text_of(row):
    ours, peer, limit = row["cycle_us"], row["peer_cycle_us"], row["limit_us"]
    return (
        f"{row['size_bytes']:>12} {row['count']:>11} {row['dtype']:>8} {row['op']:>6} "
        f"{'in' if row['in_place'] else 'out':>5} | {row['time_us']:>7.1f} "
        f"{row['algbw_gbps']:>6.2f} {row['busbw_gbps']:>6.2f} {row['wrong']:>6} | "
        + (f"{ours:>9.2f} | " if ours else f"{'-':>9} | ")
        + (f"{peer:>9.2f}" if peer else f"{'-':>9}")
        + (f" {peer / ours:>5.2f}x" if peer and ours else f" {'-':>6}")
        + (f" | {100 * limit / row['time_us']:>6.0f} %" if limit else f" | {'-':>8}")
    )


def problem_with(row):
    """Return why a row cannot be right, or an empty text."""
    if row["wrong"]:
        return f"{row['verb']} of {row['size_bytes']} bytes: {row['wrong']} wrong elements"
    limit = row["limit_us"]
    # Below 20 us the two are within the clock's and the scheduler's noise.
    if limit and limit > 20 and limit > 1.05 * row["time_us"] and row["size_bytes"] >= 1 << 20:
        share = 100 * limit / row["time_us"]
        return (
            f"{row['verb']} of {row['size_bytes']} bytes took {share:.0f} % of its limit's speed: "
            "the limit or the call was disturbed, run it again"
        )
    return ""


def main():
    options = parse_options()
    if options.algorithm:
        os.environ["DISTRT_ALGORITHM"] = options.algorithm
    world = distrt.world()
    comm = world.communicator
    trip = comm.flag_round_trip()
    report = {
        "ranks": comm.size,
        "nodes": world.topology.nodes,
        "mpi": world.library,
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "flag_round_trip_us": None if trip is None else trip * 1e6,
        "rows": [],
    }
    chief = comm.rank == 0
    if chief:
        flag = "no shared memory" if trip is None else f"flag round trip {trip * 1e6:.2f} us"
        kind = "registered" if options.registered else "plain"
        mode = "net cost in a write, call, read cycle" if options.cycle else "call alone, repeated"
        print(f"# {comm.size} ranks on {world.topology.nodes} host(s), {world.library}; {flag}")
        print(f"# {kind} arrays; net us: {mode}; medians of the slowest rank", flush=True)
    problems = []
    for verb in options.verbs:
        if chief:
            print(f"# {verb}, {comm.algorithm_for(verb)}\n{HEADER}", flush=True)
        for size in options.sizes:
            count = max(1, size // np.dtype(options.dtype).itemsize)
            for in_place in (False, True) if verb in IN_PLACE else (False,):
                row = run_row(comm, verb, count, in_place, options)
                report["rows"].append(row)
                problems.append(problem_with(row))
                if chief:
                    print(text_of(row), flush=True)
    if chief and options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    problems = [problem for problem in problems if problem]
    if problems:
        if chief:
            print("\n".join(problems), file=sys.stderr)
        comm.barrier()
        sys.exit(1)


def parse_bytes(text):
    number = text.rstrip("KMG")
    return int(number) * UNITS[text[len(number) :]]


def parse_sizes(text):
    """Read ``64``, ``64,4K,1M`` or ``4:64M:2`` (from, to, factor)."""
    if ":" not in text:
        return [parse_bytes(part) for part in text.split(",")]
    first, last, *factor = text.split(":")
    low, high, step = parse_bytes(first), parse_bytes(last), int(factor[0]) if factor else 2
    if low < 1 or step < 2:
        raise argparse.ArgumentTypeError("sizes begin at 1 byte and the factor is at least 2")
    steps = int(math.log(high / low) / math.log(step) + 1e-9)
    return [low * step**i for i in range(steps + 1)]


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = lambda text: list(BUS) if text == "all" else text.split(",")  # noqa: E731
    parser.add_argument("--verbs", type=verbs, default=["all_reduce"], help="a,b or all")
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("64:64M:4"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--op", default="SUM", choices=OPS)
    parser.add_argument("--algorithm", choices=["direct", "ring"], help="DISTRT_ALGORITHM")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--registered", action="store_true", default=True)
    kind.add_argument("--plain", dest="registered", action="store_false")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cycle", action="store_true", default=True)
    mode.add_argument("--repeat", dest="cycle", action="store_false")
    parser.add_argument("--iters", type=int, default=300, help="at most this many rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="about this long for each row")
    parser.add_argument("--peer", choices=["mpi", "none"], default="mpi")
    parser.add_argument("--no-limit", dest="limit", action="store_false")
    parser.add_argument("--json", help="write the report to this file")
    options = parser.parse_args()
    unknown = set(options.verbs) - set(BUS)
    if unknown:
        parser.error(f"unknown verbs {sorted(unknown)}: expected some of {', '.join(BUS)}")
    return options


if __name__ == "__main__":
    main()
