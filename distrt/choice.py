"""The choice: which algorithm a call takes (layer 4). May import: errors.

A table is read from the top, and the first row that matches and whose algorithm is
available wins: the rows that ``python -m distrt tune`` measured for this layout, then
``DEFAULT``. DISTRT_ALGORITHM overrides it. All ranks must choose alike, so rank 0
reads table and environment, and its ``Choice`` (which can be pickled) is broadcast:
world.py does that.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from distrt.errors import InvalidArgumentError

__all__ = [
    "ALGORITHMS",
    "DEFAULT",
    "Choice",
    "Layout",
    "Row",
    "cpu_model",
    "load",
    "parse_forced",
    "save",
    "tuning_path",
]

# The algorithms that can do a verb. Only all_reduce gains by a hierarchy: with the ranks in
# node order a flat ring takes the other verbs' bytes over each wire as rarely as can be.
_RING = ("direct", "ring")
_PAIRWISE = ("direct", "exchange")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("direct", "hierarchical", "ring", "halving_doubling"),
    "reduce": _RING,
    "reduce_scatter": _RING,
    "broadcast": _RING,
    "all_gather": _RING,
    "gather": _PAIRWISE,
    "scatter": _PAIRWISE,
    "all_to_all": _PAIRWISE,
}

# Where each of them can run.
_NEEDS = {
    "direct": "NumPy arrays, on ranks of one host that share memory",
    "hierarchical": "NumPy arrays, on ranks of several hosts that share memory on each",
    "ring": "messages between the ranks",
    "halving_doubling": "messages between the ranks",
    "exchange": "messages between the ranks",
}
_NODES = ("one", "many")


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      verb: the verb.
      ranks: the smallest number of ranks that it is for.
      nodes: "one" or "many".
      up_to_bytes: the largest size that it is for, or None: any.
      algorithm: what to take.
    """

    verb: str
    ranks: int
    nodes: str
    up_to_bytes: int | None
    algorithm: str

    def matches(self, nbytes: int, ranks: int, nodes: int) -> bool:
        """Tell whether the row is for such a call; the verb is the caller's concern."""
        size = self.up_to_bytes is None or nbytes <= self.up_to_bytes
        return size and ranks >= self.ranks and self.nodes == _NODES[nodes > 1]


# One rank has nothing to choose, and takes the first that it finds available.
# direct: on 2 and 4 ranks of one host it beats what MPI's messages can do at every size
#   from 64 B to 64 MiB (docs/benchmarks/2026-12-01-direct.md), and so ours as well.
# halving_doubling: 2 log2(n) messages one after the other, where a ring has 2 (n - 1): it wins
#   while the messages' latency counts. Measured between 2 hosts of 2 ranks at 1 Gbit/s: 64 KiB
#   1.2 ms where hierarchical takes 1.4, 1 MiB 9.1 ms and 8.7 (docs/benchmarks/2026-12-01-hosts.md).
#   The more hosts, the longer their rings: from 64 ranks on by scripts/simulate_scaling.py, with
#   8 ranks and 8 rails of 10 Gbit/s on a host. 4 MiB on 256 ranks: 4.1 ms where it has 5.5.
DEFAULT: tuple[Row, ...] = (
    *(Row(verb, 2, "one", None, "direct") for verb in ALGORITHMS),
    Row("all_reduce", 2, "one", 16 << 10, "halving_doubling"),
    Row("all_reduce", 1024, "many", 16 << 20, "halving_doubling"),
    Row("all_reduce", 256, "many", 4 << 20, "halving_doubling"),
    Row("all_reduce", 64, "many", 256 << 10, "halving_doubling"),
    Row("all_reduce", 2, "many", 64 << 10, "halving_doubling"),
    Row("all_reduce", 2, "many", None, "hierarchical"),
    *(
        Row(verb, 2, nodes, None, name)
        for verb, names in ALGORITHMS.items()
        for nodes in _NODES
        for name in ("ring", "exchange")
        if name in names
    ),
)


@final
class Choice:
    """A table, and what overrides it.

    Args:
      rows: read from the top.
      forced: verb -> algorithm, or such a text as DISTRT_ALGORITHM's; None or "" forces nothing.

    Attributes:
      rows: the table.
      forced: verb -> algorithm: what overrides it.

    Raises:
      InvalidArgumentError: ``forced`` names a verb or an algorithm that there is not, or
        an algorithm that cannot do its verb.
    """

    def __init__(
        self, rows: Sequence[Row] = DEFAULT, forced: Mapping[str, str] | str | None = None
    ) -> None:
        self.rows = tuple(rows)
        self.forced = parse_forced(forced)
        self._of = {verb: [row for row in self.rows if row.verb == verb] for verb in ALGORITHMS}

    def forcing(self, forced: Mapping[str, str] | str) -> Choice:
        """Return this choice with ``forced`` on top of what it forces already."""
        return Choice(self.rows, {**self.forced, **parse_forced(forced)})

    def choose(
        self, verb: str, nbytes: int, ranks: int, nodes: int, available: Collection[str]
    ) -> str:
        """Return the algorithm for a call. Not collective; equal arguments choose alike.

        Args:
          verb: a key of ``ALGORITHMS``.
          nbytes: the larger one of a rank's input and result, as scripts/bench_collectives.py
            counts; where the ranks' sizes differ, a number that is equal on all of them.
          ranks, nodes: of the communicator.
          available: the algorithms that can make this call.

        Raises:
          InvalidArgumentError: the algorithm that is forced is not available. (One rank
            sends nothing, so nothing is forced on it.)
        """
        assert available, verb
        forced = self.forced.get(verb)
        if forced is not None and ranks > 1:
            if forced in available:
                return forced
            raise InvalidArgumentError(
                f"{verb} cannot take {forced!r}, which was asked for (by DISTRT_ALGORITHM, "
                f"perhaps): it needs {_NEEDS[forced]}. This call is one of {ranks} ranks on "
                f"{nodes} host(s), where {', '.join(available)} can be taken"
            )
        for row in self._of[verb]:
            if row.algorithm in available and row.matches(nbytes, ranks, nodes):
                return row.algorithm
        # A table may be silent on a call, but the call must be made.
        return next((name for name in ALGORITHMS[verb] if name in available), min(available))

    def ranges(
        self, verb: str, ranks: int, nodes: int, available: Collection[str]
    ) -> tuple[tuple[int | None, str], ...]:
        """Return what ``choose`` says for every size: (up to how many bytes, algorithm).

        Ascending; the last one is for all larger sizes, and has None.

        Raises:
          InvalidArgumentError: as ``choose``.
        """
        limits = {row.up_to_bytes for row in self._of[verb]}
        ends = sorted(limit for limit in limits if limit is not None)
        found: list[tuple[int | None, str]] = []
        for end in (*ends, None):
            size = end if end is not None else 1 + (ends[-1] if ends else 0)
            name = self.choose(verb, size, ranks, nodes, available)
            if found and found[-1][1] == name:
                found.pop()
            found.append((end, name))
        return tuple(found)

    def always(self, verb: str, ranks: int, nodes: int) -> str | None:
        """Return the algorithm that ``verb`` takes whatever the size, where all are available.

        None where it depends on the size. Not collective.
        """
        found = self.ranges(verb, ranks, nodes, ALGORITHMS[verb])
        return found[0][1] if len(found) == 1 else None


def parse_forced(forced: Mapping[str, str] | str | None) -> dict[str, str]:
    """Return verb -> algorithm of a mapping, or of a text such as DISTRT_ALGORITHM's.

    Args:
      forced: "ring" (every verb that can take it; the others stay with the table),
        "all_reduce=ring,broadcast=direct", both ("ring,broadcast=direct"; the later one
        wins), or "" or "auto", which force nothing.

    Raises:
      InvalidArgumentError: see ``Choice``.
    """
    if not isinstance(forced, str):
        return {verb: _checked(verb, name, forced) for verb, name in (forced or {}).items()}
    result: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in forced.split(","))):
        verb, equals, name = (part.strip() for part in item.partition("="))
        if equals:
            result[verb] = _checked(verb, name, forced)
        elif item == "auto":
            result.clear()
        elif item in _NEEDS:
            result.update({v: item for v, names in ALGORITHMS.items() if item in names})
        else:
            raise InvalidArgumentError(
                f"algorithm {forced!r}: unknown algorithm {item!r}, expected auto, one of "
                f"{', '.join(_NEEDS)}, or such as all_reduce=ring,broadcast=direct"
            )
    return result


def _checked(verb: str, name: str, given: Any) -> str:
    names = ALGORITHMS.get(verb)
    if names is None:
        raise InvalidArgumentError(
            f"algorithm {given!r}: unknown verb {verb!r}, expected one of {', '.join(ALGORITHMS)}"
        )
    if name not in names:
        kind = "cannot take" if name in _NEEDS else "knows no algorithm"
        raise InvalidArgumentError(
            f"algorithm {given!r}: {verb} {kind} {name!r}, expected one of {', '.join(names)}"
        )
    return name


# ------------------------------------------------------------------ tuned tables

_FORMAT = 1


class Layout(NamedTuple):
    """What a tuned table is for: it says nothing of another number of ranks, or machine."""

    ranks: int
    nodes: int
    cpu: str


def cpu_model() -> str:
    """Return the model of this host's processors, as the kernel names it."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    # ARM has numbers instead of a name.
    arm = [fields[name] for name in ("CPU implementer", "CPU part") if name in fields]
    return fields.get("model name") or " ".join([platform.machine(), *arm])


def tuning_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the tuned tables lie: $DISTRT_TUNING, else in the user's configuration.

    That is $XDG_CONFIG_HOME/distrt/tuning.json, by default ~/.config/distrt/tuning.json.
    """
    chosen = environ.get("DISTRT_TUNING", "").strip()
    if chosen:
        return Path(chosen)
    folder = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(folder) if os.path.isabs(folder) else Path(os.path.expanduser("~/.config"))
    return base / "distrt" / "tuning.json"


def load(path: Path, layout: Layout) -> tuple[Row, ...]:
    """Return the rows that were measured for ``layout``; () where there are none, or no file.

    For rank 0, whose table all ranks take.

    Raises:
      InvalidArgumentError: the file is not one that ``save`` wrote; it names the file.
    """
    return _read(path).get(layout, ())


def save(path: Path, layout: Layout, rows: Sequence[Row]) -> None:
    """Write the rows of ``layout``, beside those of other layouts in the file. For one rank.

    Raises:
      OSError: it cannot be written.
      InvalidArgumentError: there is a file, and it is not one that this function wrote.
    """
    tables = {**_read(path), layout: tuple(rows)}
    written = [
        {**known._asdict(), "rows": [row._asdict() for row in of]} for known, of in tables.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: a job that starts meanwhile reads the old tables or the new ones.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(json.dumps({"format": _FORMAT, "tables": written}, indent=1) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _read(path: Path) -> dict[Layout, tuple[Row, ...]]:
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, str(error)) from error
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"it is of format {content['format']!r}, expected {_FORMAT}")
        return {
            _layout_of(table): tuple(_row_of(row) for row in table["rows"])
            for table in content["tables"]
        }
    except KeyError as error:
        raise _broken(path, f"it lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise _broken(path, str(error)) from error


def _broken(path: Path, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path} is no table of tuned algorithms: {why}. Remove it and run `python -m distrt tune` "
        "again, or set DISTRT_TUNING to another file"
    )


def _layout_of(table: Any) -> Layout:
    layout = Layout(table["ranks"], table["nodes"], table["cpu"])
    if not (_is_count(layout.ranks) and _is_count(layout.nodes) and isinstance(layout.cpu, str)):
        raise ValueError(f"not a layout: {tuple(layout)}")
    return layout


def _row_of(fields: Any) -> Row:
    row = Row(*(fields[name] for name in Row._fields))
    # A verb or an algorithm that this version does not have could not be followed.
    sound = (
        isinstance(row.verb, str)
        and row.algorithm in ALGORITHMS.get(row.verb, ())
        and _is_count(row.ranks)
        and row.nodes in _NODES
        and (row.up_to_bytes is None or _is_count(row.up_to_bytes, least=0))
    )
    if not sound:
        raise ValueError(f"not a row: {row._asdict()}")
    return row


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and value >= least
