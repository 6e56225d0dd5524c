"""``python -m distrt tune``: measures the algorithms and writes this cluster's table (layer 7).

May import: everything below. Every algorithm of a verb is timed in turn within each round
(on a shared machine only what alternates can be compared): the ranks write fresh
input, meet, call, and read the whole result, and the slowest rank counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distrt.choice import ALGORITHMS, Layout, Row, cpu_model, load, save, tuning_path
from distrt.cli.tables import bytes_text, print_table
from distrt.communicator import Communicator
from distrt.world import world

__all__ = ["add_parser", "measure", "parse_sizes", "parse_verbs", "rows_from", "tune"]

# A larger size changes the algorithm only where another one is faster by this much:
# otherwise noise would make rows.
_MARGIN = 1.05
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DESCRIPTION = """\
Measure every algorithm of each verb and size on this cluster, print the times, and
write the table from which distrt then chooses wherever a program runs on as many
ranks and hosts with the same processors. Start it on idle machines, as the program:

  mpirun -n 4 python -m distrt tune
  mpirun -n 4 python -m distrt tune --verbs all_reduce,all_gather --sizes 1K:4M:4

DISTRT_TUNING names another file than ~/.config/distrt/tuning.json."""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="measure the algorithms and write this cluster's table",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--verbs",
        type=parse_verbs,
        default=list(ALGORITHMS),
        metavar="A,B",
        help=f"some of {', '.join(ALGORITHMS)} (all)",
    )
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default=parse_sizes("256:16M:4"),
        metavar="SIZES",
        help="bytes of a rank's input or result, the larger one: 1K,64K,1M, or from:to:factor "
        "(256:16M:4)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="about this long for each verb and size (%(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the table to FILE instead"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be measured, measure nothing"
    )
    parser.set_defaults(run=_run)


def parse_verbs(text: str) -> list[str]:
    """Read ``all`` or ``all_reduce,broadcast``."""
    verbs = list(ALGORITHMS) if text == "all" else [verb.strip() for verb in text.split(",")]
    unknown = [verb for verb in verbs if verb not in ALGORITHMS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown verb {unknown[0]!r}: expected some of {', '.join(ALGORITHMS)}"
        )
    return list(dict.fromkeys(verbs))


def parse_sizes(text: str) -> list[int]:
    """Read ``64``, ``64,4K,1M`` or ``256:16M:4`` (from, to, factor); ascending, in bytes."""
    try:
        if ":" not in text:
            sizes = [_parse_bytes(part) for part in text.split(",")]
        else:
            first, last, *factor = text.split(":")
            size, end, step = _parse_bytes(first), _parse_bytes(last), int(*factor or ["2"])
            sizes = [size] if size and step > 1 else []
            while sizes and sizes[-1] * step <= end:
                sizes.append(sizes[-1] * step)
            if not sizes or end < size:
                raise ValueError
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected sizes such as 1K,64K,1M, or from:to:factor such as 256:16M:4"
        ) from error
    return sorted(set(sizes))


def _parse_bytes(text: str) -> int:
    number = text.strip().rstrip("KMG")
    return int(number) * _UNITS[text.strip()[len(number) :]] if number.isdecimal() else int("")


def _run(options: argparse.Namespace) -> int:
    everyone = world()
    comm = everyone.communicator
    layout = Layout(comm.size, everyone.topology.nodes, cpu_model())
    return tune(comm, layout, options)


def tune(comm: Communicator, layout: Layout, options: argparse.Namespace) -> int:
    """Measure, print and write. All ranks must call.

    Args:
      comm: one rank has nothing to choose.
      layout: of ``comm``; rank 0's is written.
      options: verbs, sizes, seconds, output and dry_run, as ``add_parser`` says.

    Returns:
      0; 2 where there was nothing to measure.
    """
    path, chief = options.output or tuning_path(), comm.rank == 0
    plans = {verb: comm.algorithms(verb) for verb in options.verbs}
    if chief:
        print(f"{layout.ranks} ranks on {layout.nodes} host(s), {layout.cpu}")
        for verb, names in plans.items():
            alone = "" if len(names) > 1 and comm.size > 1 else ": nothing to choose"
            print(f"  {verb}: {', '.join(names)}{alone}")
        print(f"  sizes: {', '.join(map(bytes_text, options.sizes))}", flush=True)
    plans = {verb: names for verb, names in plans.items() if len(names) > 1 and comm.size > 1}
    if not plans:
        if chief:
            print("There is nothing to choose here, so no table is written", flush=True)
        return 2
    if options.dry_run:
        if chief:
            seconds = len(plans) * len(options.sizes) * options.seconds
            print(f"About {seconds:.0f} s; the table would go to {path}", flush=True)
        return 0
    rows: list[Row] = []
    for verb, names in plans.items():
        measured = {
            size: measure(comm, verb, size, names, options.seconds) for size in options.sizes
        }
        rows += rows_from(verb, measured, layout.ranks, comm.nodes)
        if chief:
            _print_times(verb, names, measured)

    def write() -> None:
        # What was measured earlier for the other verbs stays.
        kept = [row for row in load(path, layout) if row.verb not in plans]
        save(path, layout, [*rows, *kept])

    comm.together("writing the table", write, ranks=[0])
    if chief:
        texts = [("any" if r.up_to_bytes is None else bytes_text(r.up_to_bytes)) for r in rows]
        table = [(r.verb, text, r.algorithm) for r, text in zip(rows, texts, strict=True)]
        print_table(f"Written to {path}", ("verb", "up to", "algorithm"), table)
    return 0


def measure(
    comm: Communicator, verb: str, size_bytes: int, names: Sequence[str], seconds: float
) -> dict[str, float]:
    """Return the time of each algorithm: the median over the rounds of the slowest rank.

    All ranks must call; all get the same numbers.

    Args:
      comm: where ``comm.algorithms(verb)`` has all of ``names``.
      verb: what to measure.
      size_bytes: the larger one of a rank's input and result, rounded to whole rows.
      names: the algorithms.
      seconds: about how long it may take.
    """
    source, call = _prepared(comm, verb, size_bytes)

    def once(name: str) -> float:
        with comm.using(name):  # takes longer than a short call: not timed
            source[...] = comm.rank
            comm.barrier()
            started = time.perf_counter()
            result = call()
            if result is not None:
                np.bitwise_or.reduce(result.reshape(-1).view(np.uint32))
            return time.perf_counter() - started

    # The first call makes slots and touches pages; the second says how many rounds fit.
    once_all = [sum(once(name) for name in names) for _ in range(2)][-1]
    slowest = float(comm.all_reduce(np.float64(once_all), "MAX"))
    rounds = int(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, seconds / max(slowest, 1e-6))))
    times = np.array([[once(name) for name in names] for _ in range(rounds)])
    slowest_rank = comm.all_reduce(times, "MAX")
    return {
        name: statistics.median(column.tolist())
        for name, column in zip(names, slowest_rank.T, strict=True)
    }


def _prepared(comm: Communicator, verb: str, nbytes: int) -> tuple[Any, Callable[[], Any]]:
    """Return this rank's input, in registered memory where there is some, and the call."""
    rows = max(1, nbytes // (4 * comm.size))
    host = np.empty(0, np.float32)
    part, whole = (comm.empty(host, n, np.float32) for n in (rows, rows * comm.size))
    other = comm.empty(host, rows * comm.size, np.float32)
    calls: dict[str, tuple[Any, Callable[[], Any]]] = {
        "all_reduce": (whole, lambda: comm.all_reduce(whole, out=whole)),
        "reduce": (whole, lambda: comm.reduce(whole)),
        "reduce_scatter": (whole, lambda: comm.reduce_scatter(whole, out=part)),
        "broadcast": (whole, lambda: comm.broadcast(whole, out=whole)),
        "all_gather": (part, lambda: comm.all_gather(part, out=whole)),
        "gather": (part, lambda: comm.gather(part)),
        "scatter": (whole, lambda: comm.scatter(whole)),
        "all_to_all": (whole, lambda: comm.all_to_all(whole, out=other)),
    }
    return calls[verb]


def rows_from(
    verb: str, measured: Mapping[int, Mapping[str, float]], ranks: int, nodes: int
) -> list[Row]:
    """Return the rows of a verb: the fastest algorithm for each size.

    Args:
      verb: the verb.
      measured: bytes -> algorithm -> time; every size has the same algorithms.
      ranks, nodes: of the communicator.
    """
    where = "many" if nodes > 1 else "one"
    rows: list[Row] = []
    smaller = 0
    for size, times in sorted(measured.items()):
        fastest = min(times, key=lambda name: times[name])
        taken = rows[-1].algorithm if rows else None
        if taken is None or times[fastest] * _MARGIN < times[taken]:
            if rows:
                # Where between the two sizes it changes nobody measured: the geometric mean.
                rows[-1] = rows[-1]._replace(up_to_bytes=round((smaller * size) ** 0.5))
            rows.append(Row(verb, ranks, where, None, fastest))
        smaller = size
    return rows


def _print_times(
    verb: str, names: Sequence[str], measured: Mapping[int, Mapping[str, float]]
) -> None:
    table = []
    for size, times in measured.items():
        fastest = min(times, key=lambda name: times[name])
        micros = [f"{times[name] * 1e6:.1f}" for name in names]
        table.append((bytes_text(size), *micros, fastest))
    print_table(f"{verb}, us", ("size", *names, "fastest"), table)
