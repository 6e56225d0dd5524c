#!/usr/bin/env python
"""Time distrt's input pipelines beside torch's and TensorFlow's, and beside a bare copy.

    mpirun -n 2 python scripts/bench_input.py --peer torch
    mpirun -n 2 python scripts/bench_input.py --peer tf --json report.json
    mpirun -n 2 python scripts/bench_input.py --stream --rows 2000000

Two pipelines, whose global batches all ranks share:

shuffle  from_tensor_slices, shuffle over all rows, batch
map      the same with a Python function of --map-us microseconds before the batch, which
         keeps its processor busy; the ideal is each rank calling it for its share of the rows,
         and nothing else

Peers do the same work: torch a DataLoader(TensorDataset) with a DistributedSampler in each
rank; tf a tf.data pipeline under MirroredStrategy, with a replica for each rank, all fed by
rank 0; tf-workers the same under MultiWorkerMirroredStrategy, a worker in each rank. Ours
and theirs take epochs in turn within one run, after one that is not counted. The rate is
that of the job: all rows by the time of the slowest rank, the median over the epochs.

"limit" is what the shuffle cannot do without: each rank takes its own rows of the array by
numpy.take, into a new array for each batch ("fresh") or one array over and over ("reused").
--stream walks an iterable of batches instead, and shows that memory does not grow with it.
A row that is missing, or is there twice, fails the run.
"""

import argparse
import json
import os
import platform
import sys
import time

import numpy as np
from bench_input_peers import PEERS, MissingError, peer_of, sleep_barrier

import distrt
from distrt.data import Dataset, DistributedDataset, as_dataset


# 1. What is walked. Column 0 of row i holds i, so that a walk can be checked.
def make_rows(options):
    rows = np.zeros((options.rows, options.width), np.float32)
    rows[:, 0] = np.arange(options.rows)
    return rows


def busy(microseconds):
    """Return a function of a row that spins for so long and returns the row."""
    seconds, clock = microseconds / 1e6, time.perf_counter

    def spin(row):
        end = clock() + seconds
        while clock() < end:
            pass
        return row

    return spin


def our_walk(comm, rows, function, options):
    dataset = Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=1)
    dataset = dataset if function is None else dataset.map(function)
    distributed = DistributedDataset(dataset.batch(options.batch), comm)

    def walk():
        started, seen = time.perf_counter(), 0
        for part in distributed:
            seen += len(part)
        return time.perf_counter() - started, seen

    return distributed, walk


def ideal_walk(comm, rows, function):
    """Return the walk that only calls the function, for this rank's share of the rows."""
    own = np.array_split(np.arange(len(rows)), comm.size)[comm.rank].tolist()

    def walk():
        started = time.perf_counter()
        for _ in own:
            function(rows)
        return time.perf_counter() - started, len(own)

    return walk


def limit_walk(comm, rows, reused, options):
    """Return the walk that only gathers: this rank's rows of each batch, in a random order."""
    order = np.random.default_rng(1).permutation(len(rows))
    starts = range(0, len(rows), options.batch)
    batches = [np.array_split(order[i : i + options.batch], comm.size)[comm.rank] for i in starts]
    buffer = np.empty((-(-options.batch // comm.size), options.width), np.float32)

    def walk():
        started, seen = time.perf_counter(), 0
        for own in batches:
            if reused:
                # With mode="raise" NumPy would gather into a copy of the output first.
                rows.take(own, axis=0, out=buffer[: len(own)], mode="clip")
            else:
                rows.take(own, axis=0)
            seen += len(own)
        return time.perf_counter() - started, seen

    return walk


# 2. Timing, and whether every row came once.
def wrong_rows(comm, distributed, options):
    """Return how many rows of an epoch, of all ranks together, are missing."""
    seen = np.zeros(options.rows, np.int64)
    for part in distributed:
        np.add.at(seen, part[:, 0].astype(np.int64), 1)
    return int((comm.all_reduce(seen) != 1).sum())


def rates_of(comm, mpi, walks, options):
    """Return the rows per second of each walk: medians of epochs in turn, by the slowest rank."""
    times = np.zeros((options.epochs + 1, len(walks)))
    for epoch in times:
        for column, walk in enumerate(walks):
            sleep_barrier(mpi)
            epoch[column], seen = walk()
            sleep_barrier(mpi)
            total = int(comm.all_reduce(np.int64(seen)))
            # DistributedSampler gives all ranks equally many, so a row may come twice.
            if not options.rows <= total < options.rows + comm.size:
                sys.exit(f"walk {column} saw {total} rows of {options.rows}")
    return options.rows / np.median(comm.all_reduce(times[1:], "MAX"), axis=0)


def run_case(comm, mpi, peer, rows, name, options):
    function = busy(options.map_us) if name == "map" else None
    distributed, ours = our_walk(comm, rows, function, options)
    walks = {"distrt": ours}
    if peer:
        walks[peer.name] = peer.walker(rows, function)
    if function is None:
        walks["fresh"] = limit_walk(comm, rows, False, options)
        walks["reused"] = limit_walk(comm, rows, True, options)
    else:
        walks["ideal"] = ideal_walk(comm, rows, function)
    wrong = wrong_rows(comm, distributed, options)
    rates = dict(zip(walks, rates_of(comm, mpi, [*walks.values()], options), strict=True))
    return {
        "case": name,
        "rows_per_s": float(rates["distrt"]),
        "peer": peer and peer.name,
        "peer_rows_per_s": float(rates[peer.name]) if peer else None,
        "limit_fresh_rows_per_s": float(rates["fresh"]) if "fresh" in rates else None,
        "limit_reused_rows_per_s": float(rates["reused"]) if "reused" in rates else None,
        "ideal_rows_per_s": float(rates["ideal"]) if "ideal" in rates else None,
        "wrong": wrong,
    }


# 3. Streams: memory at the start and at the end.
class Batches:
    """An endless-looking stream: batches made one by one, kept by nobody."""

    def __init__(self, options):
        self.options = options

    def __iter__(self):
        for start in range(0, self.options.rows, self.options.batch):
            rows = min(self.options.batch, self.options.rows - start)
            yield np.full((rows, self.options.width), start, np.float32)


def resident():
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_stream(comm, options):
    distributed = DistributedDataset(as_dataset(Batches(options)).prefetch(2), comm)
    sizes, seen, started = [], 0, time.perf_counter()
    for step, part in enumerate(distributed):
        seen += len(part)
        if step % 16 == 0:
            sizes.append(resident())
    seconds = float(comm.all_reduce(np.float64(time.perf_counter() - started), "MAX"))
    # The first batches fill the allocator and the prefetch.
    settled = sizes[min(4, len(sizes) - 1) :]
    growth = float(comm.all_reduce(np.float64(max(settled) - settled[0]), "MAX"))
    total = int(comm.all_reduce(np.int64(seen)))
    return {
        "case": "stream",
        "rows_per_s": options.rows / seconds,
        "dataset_bytes": options.rows * options.width * 4,
        "resident_start_bytes": settled[0],
        "resident_end_bytes": sizes[-1],
        "growth_bytes": growth,
        "wrong": options.rows - total,
    }


# 4. The report.
def title(report):
    load = ", ".join(f"{value:.2f}" for value in report["load"])
    return (
        f"# {report['ranks']} ranks, {report['mpi']}; {report['rows']} x {report['width']} float32,"
        f" global batch {report['batch']}; load before {load}\n"
        "# thousands of rows per second of all ranks together, medians of "
        f"{report['epochs']} epochs in turn"
    )


def table(report):
    name = report["peer"] or "peer"
    lines = [
        f"#   case |   distrt | {name:>10} {'vs ' + name:>13} |    fresh   reused | % limit |"
        "    ideal % ideal | #wrong"
    ]
    lines += [text_of(row) for row in report["rows_of_table"]]
    return "\n".join(lines)


def text_of(row):
    ours, peer, ideal = row["rows_per_s"], row["peer_rows_per_s"], row["ideal_rows_per_s"]
    fresh, reused = row["limit_fresh_rows_per_s"], row["limit_reused_rows_per_s"]
    kilo = lambda value, width: f"{value / 1e3:>{width}.1f}"  # noqa: E731
    none = lambda width: f"{'-':>{width}}"  # noqa: E731
    return (
        f"{row['case']:>8} | {kilo(ours, 8)} | "
        + (f"{kilo(peer, 10)} {ours / peer:>12.2f}x | " if peer else f"{none(10)} {none(13)} | ")
        + (
            f"{kilo(fresh, 8)} {kilo(reused, 8)} | {100 * ours / fresh:>5.0f} % | "
            if fresh
            else f"{none(8)} {none(8)} | {none(7)} | "
        )
        + (f"{kilo(ideal, 8)} {100 * ours / ideal:>5.1f} %" if ideal else f"{none(8)} {none(7)}")
        + f" | {row['wrong']:>6}"
    )


def stream_text(row):
    mega = lambda value: f"{value / 2**20:.1f} MiB"  # noqa: E731
    return (
        f"# stream of {mega(row['dataset_bytes'])}: {row['rows_per_s'] / 1e3:.1f} thousand rows/s; "
        f"resident {mega(row['resident_start_bytes'])} at the start, "
        f"{mega(row['resident_end_bytes'])} at the end, grown by {mega(row['growth_bytes'])} at "
        f"most on any rank; {row['wrong']} rows missing"
    )


def main():
    options = parse_options()
    load = os.getloadavg()
    world = distrt.world()
    from mpi4py import MPI

    comm, mpi = world.communicator, MPI.COMM_WORLD
    chief = comm.rank == 0
    try:
        peer = None if options.stream else peer_of(options.peer, mpi, options)
    except MissingError as error:
        if chief:
            print(f"# {error}; measuring without a peer", flush=True)
        peer = None
    report = {
        "ranks": comm.size,
        "mpi": world.library,
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "load": load,
        "peer": peer and peer.name,
        "map_us": options.map_us,
        **{name: getattr(options, name) for name in ("rows", "width", "batch", "epochs")},
    }
    if chief:
        print(title(report), flush=True)
    if options.stream:
        found = [run_stream(comm, options)]
    else:
        rows = make_rows(options)
        found = [run_case(comm, mpi, peer, rows, name, options) for name in options.cases]
    report["rows_of_table"] = found
    if chief:
        print(stream_text(found[0]) if options.stream else table(report), flush=True)
    if chief and options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    sleep_barrier(mpi)
    sys.exit(int(any(row["wrong"] for row in found)))


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--width", type=int, default=784)
    parser.add_argument("--batch", type=int, default=256, help="the global batch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--map-us", type=float, default=50.0)
    parser.add_argument("--peer", choices=PEERS, default="none")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["shuffle", "map"])
    parser.add_argument("--stream", action="store_true", help="measure the memory of a stream")
    parser.add_argument("--json", help="write the report to this file")
    options = parser.parse_args()
    if not set(options.cases) <= {"shuffle", "map"}:
        parser.error(f"--cases: expected some of shuffle, map, got {','.join(options.cases)}")
    if min(options.rows, options.width, options.batch, options.epochs) < 1:
        parser.error("--rows, --width, --batch and --epochs are 1 or more")
    return options


if __name__ == "__main__":
    main()
