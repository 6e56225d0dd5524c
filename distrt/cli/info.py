"""``python -m distrt info``: what distrt finds on this cluster (layer 7).

May import: everything below. For bug reports and first launches: versions, ranks and hosts,
MPI and its thread level, shared memory, devices, and the algorithm of every verb.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from distrt.choice import ALGORITHMS, Layout, cpu_model, load, tuning_path
from distrt.cli.tables import bytes_text, print_table
from distrt.cluster.device import visible_devices
from distrt.communicator import Communicator
from distrt.errors import DistrtError, by_rank
from distrt.version import __version__
from distrt.world import World, world

__all__ = ["add_parser", "lines_of"]

_PACKAGES = ("numpy", "mpi4py", "ml_dtypes", "optree", "cupy-cuda12x", "cupy-cuda13x")


def add_parser(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "info",
        help="show ranks, hosts, MPI, shared memory, devices and algorithms",
        description="Show what distrt finds where it is started, as mpirun -n 4 python -m "
        "distrt info: put its output into a bug report.",
    )
    parser.set_defaults(run=_run)


def _run(options: Any) -> int:
    everyone = world()
    lines = lines_of(everyone)
    if everyone.communicator.rank != 0:
        return 0
    for name, text in lines:
        first, *rest = text.splitlines()
        print("\n".join([f"{name + ':':<15} {first}", *(f"{'':<15} {line}" for line in rest)]))
    table, errors = _choice_table(everyone)
    print_table("Algorithms of NumPy arrays", ("verb", "available", "choice by size"), table)
    print("".join(f"\n{error}" for error in errors), end="\n" if errors else "")
    return 0


def lines_of(everyone: World) -> list[tuple[str, str]]:
    """Return (name, text) of everything but the algorithms. All ranks must call."""
    comm, topology = everyone.communicator, everyone.topology
    gather = comm.all_gather_object
    hosts = {
        rank: f"{topology.hosts[rank]}, {text}" for rank, text in enumerate(gather(_host_text()))
    }
    return [
        ("distrt", _same(gather(f"{__version__}, {os.path.dirname(os.path.dirname(__file__))}"))),
        ("Python", _same(gather(f"{platform.python_version()}, {sys.executable}"))),
        ("packages", _same(gather(_packages()))),
        ("ranks", f"{comm.size} on {topology.nodes} host(s)\n{by_rank(hosts)}"),
        ("MPI", _same(gather(f"{everyone.library}, thread level {_thread_level()}"))),
        ("shared memory", _same(gather(_memory_text(comm)))),
        ("devices", _same(gather(_device_text()))),
        ("settings", _same(gather(_settings_text()))),
    ]


def _same(texts: Sequence[str]) -> str:
    """Write what all ranks say: once where they say the same."""
    return texts[0] if len(set(texts)) == 1 else f"ranks differ\n{by_rank(dict(enumerate(texts)))}"


def _host_text() -> str:
    return f"{cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"


def _packages() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _thread_level() -> str:
    # MPI is loaded only if the world is one of MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return "none"
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    names = {getattr(mpi, f"THREAD_{name}"): name for name in levels}
    return f"MPI_THREAD_{names[mpi.Query_thread()]}"


def _memory_text(comm: Communicator) -> str:
    if comm.node is None:
        why = (
            "one rank" if comm.size == 1 else f"DISTRT_SHARED_MEMORY={comm.settings.shared_memory}"
        )
        return f"none ({why})"
    arena = comm.node.arena
    kind = "memfd" if arena.path.startswith("/proc") else "/dev/shm"
    return (
        f"{len(comm.node.bases)} rank(s) of this host, {kind}, {bytes_text(arena.heap.reserved)} "
        f"reserved of at most {bytes_text(arena.window_bytes)} a rank"
    )


def _device_text() -> str:
    gpus = visible_devices()
    return f"{len(gpus)} GPU(s): {', '.join(gpus)}" if gpus else "the CPU; no GPU to be seen"


def _settings_text() -> str:
    given = {name: text for name, text in sorted(os.environ.items()) if name.startswith("DISTRT_")}
    return ", ".join(f"{name}={text}" for name, text in given.items()) or "all by default"


def _choice_table(everyone: World) -> tuple[list[tuple[str, str, str]], list[str]]:
    comm, path = everyone.communicator, tuning_path()
    tuned = load(path, Layout(comm.size, everyone.topology.nodes, cpu_model()))
    print(f"{'tuned table:':<15} {path}, {len(tuned)} rows for this layout")
    table, errors = [], []
    for verb in ALGORITHMS:
        names = comm.algorithms(verb)
        try:
            chosen = comm.ranges(verb)
            text = ", ".join(
                name if limit is None else f"{name} to {bytes_text(limit)}"
                for limit, name in chosen
            )
        except DistrtError as error:
            text = "error, see below"
            errors.append(str(error))
        table.append((verb, ", ".join(names), text))
    return table, errors
