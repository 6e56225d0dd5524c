"""The commands of ``python -m distrt`` (layer 7). May import: everything below.

A command is a module with ``add_parser(commands)``, which says how it is called, and
sets ``run(options) -> exit code``. All ranks run it; rank 0 prints. Only a command starts
MPI: help and complaints about the command line do without.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from distrt.cli import info, tune
from distrt.cluster import launcher
from distrt.version import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the program's) name; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m distrt",
        description="Look at a cluster, and find its fastest algorithms. Start it as the "
        "program itself: mpirun -n 4 python -m distrt info",
    )
    parser.add_argument("--version", action="version", version=f"distrt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (info, tune):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        if not launcher.local_rank(os.environ):  # once a host is enough
            parser.print_help()
        return 0
    code: int = options.run(options)
    return code
