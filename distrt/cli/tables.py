"""Tables for people (layer 7): by rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["bytes_text", "print_table"]


def bytes_text(nbytes: int) -> str:
    """Write a number of bytes: ``64 B``, ``1.5 KiB``, ``16 MiB``."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; the first column reads from the left, the others to the right."""
    print(f"\n{title}")  # whole: rich would break it to the table's width
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table()
            for number, name in enumerate(header):
                table.add_column(name, justify="right" if number else "left")
            for row in rows:
                table.add_row(*row)
            Console().print(table, markup=False)
            return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, ["-" * width for width in widths], *rows):
        first, *rest = (
            text.rjust(width) if number else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())
    sys.stdout.flush()
