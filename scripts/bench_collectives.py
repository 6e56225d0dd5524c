#!/usr/bin/env python
"""Time distrt's collectives beside those of the MPI that carries them.

    mpirun -n 2 python scripts/bench_collectives.py
    mpirun -n 4 python scripts/bench_collectives.py --verbs all_gather --sizes 64K:16M:4 --plain

The columns are those of nccl-tests: size, count, type, redop, time, algbw (bytes by
time), busbw (what each link must carry), in decimal GB/s, and the number of wrong
elements, out of place and in place. The peer is the same call by MPI itself, or with
--peer gloo by torch.distributed (bench_peers.py). Both are measured in turn within one
run (ours, theirs, ours, theirs), each call by its slowest rank, and the median is shown:
on a shared machine only what alternates can be compared.

--cycle (default) shows what training pays: each rank writes fresh input, calls, and
reads the whole result; the time is that of this cycle less that of the same cycle
without the call. --repeat times the call alone on untouched buffers, as the OSU
tests do, which flatters shared memory. "limit" is the same memory traffic without
any synchronisation, in the same cycles of the same run, and "% limit" the share of it
that the call's own time reaches. Between hosts it is the wire (bench_wire.py): what the
call must carry over a host's link, at the TCP goodput measured in the same run, or at
--wire-gbps. A wrong element fails the run, and so does a call of 1 MiB or more (16 MiB
between hosts) that is over 5 % faster than its limit. With --plain the limit on one host is
no bound, only a mark: staged traffic is faster in step than without.

--plot FILE.png draws time, or busbw, against size (bench_plot.py).
"""

import argparse
import json
import math
import os
import platform
import sys
import time

import bench_plot
import bench_wire
import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np
from bench_peers import PEERS, MissingError, peer_of
from bench_report import header, problem_with, text_of, title

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
# What n ranks make of own, own + 1, ... own + n - 1.
OPS = {
    "SUM": lambda own, n: own * n + n * (n - 1) // 2,
    "MEAN": lambda own, n: own + (n - 1) / 2,
    "MIN": lambda own, n: own,
    "MAX": lambda own, n: own + n - 1,
    "PROD": lambda own, n: np.prod([own + r for r in range(n)], axis=0),
}


# 1. The verbs: buffers, how distrt is asked, and the right answer. Rank r
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
        "all_reduce": lambda: OPS[op](own, n),
        "reduce_scatter": lambda: OPS[op](own, n)[rank * part : (rank + 1) * part],
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
def run_row(comm, peer, verb, count, in_place, options):
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
    peer_dtype = peer and peer.dtype_for(verb, dtype)
    if peer_dtype is not None:
        plain = np.empty(lengths[0], peer_dtype)
        result = plain if in_place else np.empty(lengths[1], peer_dtype)
        calls.append(peer.call(verb, options.op, plain, result))
        cycles.append(Cycle(plain, result, comm.rank))
    medians = measure(comm, calls, cycles, options)
    wrong += count_wrong()
    size_bytes = max(lengths) * dtype.itemsize
    row = {
        "verb": verb,
        "size_bytes": size_bytes,
        "count": max(lengths),
        "dtype": options.dtype,
        "op": options.op if verb in ("all_reduce", "reduce_scatter") else "none",
        "algorithm": comm.algorithm_for(verb, size_bytes),
        "registered": options.registered,
        "in_place": in_place,
        "wrong": wrong,
        "peer": None if peer_dtype is None else options.peer,
        "peer_dtype": None if peer_dtype is None else peer_dtype.name,
    }
    limit = limit_of(comm, ours, cycle, row, options)
    return row | times_of(comm, row, medians, limit, options)


def limit_of(comm, call, cycle, row, options):
    """Return the seconds that the call takes at least, or None where nothing is known."""
    if not options.limit:
        return None
    if options.nodes > 1:
        rate, size = options.wire_gbps, row["size_bytes"]
        if rate is None:
            return None
        return bench_wire.seconds(row["verb"], size, options.nodes, comm.size, rate * 1e9)
    if row["algorithm"] != "direct":
        return None
    with comm.unsynchronised(call):
        alone = measure_alone(call, cycle, options)
    return float(comm.all_reduce(np.float64(alone), "MAX"))


def measure_alone(call, cycle, options):
    # The channel waits for nobody now, so MPI's barrier makes the ranks start together.
    from mpi4py import MPI

    start, around = MPI.COMM_WORLD.Barrier, cycle if options.cycle else None
    times = [timed(start, call, around)[1] for _ in range(min(options.iters, 50))]
    return float(np.median(times))


def times_of(comm, row, medians, limit, options):
    call, shown = net(medians, 0, options)
    peer_call, peer_shown = net(medians, 1, options) if row["peer"] else (None, None)
    algbw = row["size_bytes"] / call / 1e9
    micro = lambda seconds: None if seconds is None else seconds * 1e6  # noqa: E731
    return {
        "time_us": micro(call),
        "cycle_us": micro(shown),
        "algbw_gbps": algbw,
        "busbw_gbps": algbw * BUS[row["verb"]](comm.size),
        "peer_time_us": micro(peer_call),
        "peer_cycle_us": micro(peer_shown),
        "limit_us": micro(limit),
        "limit": None if limit is None else "wire" if options.nodes > 1 else "memory",
    }


def main():
    options = parse_options()
    if options.algorithm:
        os.environ["DISTRT_ALGORITHM"] = options.algorithm
    world = distrt.world()
    comm, chief = world.communicator, world.communicator.rank == 0
    options.nodes = world.topology.nodes
    if chief and options.plot:
        bench_plot.pyplot()  # a plot that cannot be drawn is better known before than after
    try:
        peer = peer_of(options.peer, world)
    except MissingError as error:
        sys.exit(f"bench_collectives: {error}" if chief else 1)
    if options.nodes > 1 and options.limit and options.wire_gbps is None:
        rate = bench_wire.goodput(world)
        options.wire_gbps = rate and rate / 1e9
    trip = comm.flag_round_trip()
    report = {
        "ranks": comm.size,
        "nodes": world.topology.nodes,
        "mpi": world.library,
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "flag_round_trip_us": None if trip is None else trip * 1e6,
        "wire_gbps": options.wire_gbps,
        "rows": [],
    }
    if chief:
        print(title(report, peer, options), flush=True)
    for verb in options.verbs:
        run_verb(comm, peer, verb, report["rows"], options)
    if peer:
        peer.close()
    if chief and options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    if chief and options.plot:
        bench_plot.draw(report, options.plot_of, options.plot)
    problems = [problem for problem in map(problem_with, report["rows"]) if problem]
    if problems:
        if chief:
            print("\n".join(problems), file=sys.stderr)
        comm.barrier()
        sys.exit(1)


def run_verb(comm, peer, verb, rows, options):
    """Measure all sizes of a verb and append their rows."""
    itemsize, chief = np.dtype(options.dtype).itemsize, comm.rank == 0
    said = None
    for size in options.sizes:
        count = max(1, size // itemsize)
        for in_place in (False, True) if verb in IN_PLACE else (False,):
            row = run_row(comm, peer, verb, count, in_place, options)
            rows.append(row)
            if chief and row["algorithm"] != said:
                said = row["algorithm"]
                print(f"# {verb}, {said}\n{header(peer.name if peer else 'peer')}", flush=True)
            if chief:
                print(text_of(row), flush=True)


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
    parser.add_argument("--algorithm", help="as DISTRT_ALGORITHM: ring, direct, ...")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--registered", action="store_true", default=True)
    kind.add_argument("--plain", dest="registered", action="store_false")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cycle", action="store_true", default=True)
    mode.add_argument("--repeat", dest="cycle", action="store_false")
    parser.add_argument("--iters", type=int, default=300, help="at most this many rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="about this long for each row")
    parser.add_argument("--peer", choices=PEERS, default="mpi")
    parser.add_argument("--no-limit", dest="limit", action="store_false")
    parser.add_argument(
        "--wire-gbps", type=float, metavar="GOODPUT", help="GB/s each way; default: measured"
    )
    parser.add_argument("--json", help="write the report to this file")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    parser.add_argument("--plot-of", choices=bench_plot.KINDS, default="time")
    options = parser.parse_args()
    unknown = set(options.verbs) - set(BUS)
    if unknown:
        parser.error(f"unknown verbs {sorted(unknown)}: expected some of {', '.join(BUS)}")
    return options


if __name__ == "__main__":
    main()
