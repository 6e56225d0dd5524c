"""Tuning: sizes are read, algorithms alternate on real ranks, and the table is read again."""

import argparse
import contextlib

import numpy as np
import pytest

from distrt.choice import ALGORITHMS, DEFAULT, Choice, Layout, Row, cpu_model, load, save
from distrt.cli import main
from distrt.cli.tables import bytes_text
from distrt.cli.tune import measure, parse_sizes, parse_verbs, rows_from, tune
from distrt.cluster.launcher import LAUNCHERS
from distrt.communicator import Communicator
from distrt.settings import Settings
from distrt.transport.loopback import LoopbackWorld
from distrt.transport.shared_memory import share

from ..launching import mpirun

LAYOUT = Layout(2, 1, "some processor")
SMALL = Settings(segment_bytes=64, stage_bytes=256, inline_bytes=64, timeout_seconds=30.0)


def launching_variables():
    return [name for row in LAUNCHERS for name in (row.rank, row.size, row.local_rank)]


class Noting:
    """A communicator that notes which algorithms ``tune`` asks it for, and gets."""

    def __init__(self, comm):
        self._comm, self.used = comm, []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    @contextlib.contextmanager
    def using(self, name):
        with self._comm.using(name):
            taken = {self._comm.algorithm_for(verb) for verb in ALGORITHMS}
            self.used.append(name if name in taken else None)
            yield


def on_ranks(size, body):
    nodes = []

    def program(transport):
        nodes.append(share(transport, range(size), SMALL))
        return body(Noting(Communicator(transport, SMALL, nodes[-1])))

    try:
        return LoopbackWorld(size).run(program)
    finally:
        for node in nodes:
            node.close()


def options(**given):
    defaults = {"verbs": ["all_reduce"], "sizes": [64], "seconds": 0.0, "output": None}
    return argparse.Namespace(**{**defaults, "dry_run": False, **given})


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64", [64]),
        ("4K,64,1M,64", [64, 4096, 1 << 20]),
        ("4:64:2", [4, 8, 16, 32, 64]),
        ("4:63", [4, 8, 16, 32]),
        ("1K:1K:8", [1024]),
        ("2G", [2 << 30]),
        ("0", [0]),
    ],
)
def test_sizes_are_read(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "1KB", "-4", "8:4", "0:8", "4:8:1", "4:8:2:2", "1.5K"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected sizes such as"):
        parse_sizes(text)


def test_verbs_are_read():
    assert parse_verbs("all") == list(ALGORITHMS)
    assert parse_verbs("gather, all_reduce,gather") == ["gather", "all_reduce"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown verb 'barrier'"):
        parse_verbs("all_reduce,barrier")


def test_numbers_of_bytes_are_written():
    texts = [bytes_text(n) for n in (0, 64, 1023, 1536, 1 << 20, 16 << 30, 5 << 40)]
    assert texts == ["0 B", "64 B", "1023 B", "1.5 KiB", "1 MiB", "16 GiB", "5 TiB"]


def test_rows_change_where_another_algorithm_is_clearly_faster():
    measured = {
        64: {"ring": 2.0, "direct": 1.0},
        256: {"ring": 0.99, "direct": 1.0},  # within the noise: stays
        1024: {"ring": 1.0, "direct": 2.0},
        4096: {"ring": 1.0, "direct": 1.0},
        16384: {"ring": 2.0, "direct": 1.0},
    }
    expected = [
        Row("all_reduce", 2, "one", 512, "direct"),
        Row("all_reduce", 2, "one", 8192, "ring"),
        Row("all_reduce", 2, "one", None, "direct"),
    ]
    assert rows_from("all_reduce", measured, 2, 1) == expected
    backwards = dict(sorted(measured.items(), reverse=True))
    assert rows_from("all_reduce", backwards, 2, 1) == expected
    (row,) = rows_from("gather", {64: {"direct": 2.0, "exchange": 1.0}}, 6, 3)
    assert row == Row("gather", 6, "many", None, "exchange")
    assert rows_from("gather", {}, 2, 1) == []


@pytest.mark.parametrize("verb", ALGORITHMS)
@pytest.mark.parametrize("nbytes", [0, 4, 1000, 70_000])
def test_every_algorithm_is_measured_in_turn(verb, nbytes):
    def body(comm):
        names = comm.algorithms(verb)
        times = measure(comm, verb, nbytes, names, 0.0)
        return names, times, comm.used

    results = on_ranks(2, body)
    for names, times, used in results:
        assert list(times) == list(names) and all(0 < time < 10 for time in times.values())
        assert set(names) == set(ALGORITHMS[verb]) - {"hierarchical"}
        assert used == list(names) * 7, "two rounds to warm up, then at least five"
        assert times == results[0][1], "all ranks know the same times"


def test_rank_0_writes_the_table_of_this_layout(tmp_path, capsys):
    path, verbs = tmp_path / "new" / "table.json", ["all_reduce", "all_to_all"]
    codes = on_ranks(
        3, lambda comm: tune(comm, LAYOUT, options(verbs=verbs, sizes=[64, 4096], output=path))
    )
    assert codes == [0, 0, 0]
    rows = load(path, LAYOUT)
    assert [row.verb for row in rows if row.up_to_bytes is None] == verbs
    assert all(row.algorithm in ALGORITHMS[row.verb] and row.ranks == 2 for row in rows)
    choice = Choice((*rows, *DEFAULT))
    for row in rows:
        call = row.verb, row.up_to_bytes or 1 << 30, 2, 1, ALGORITHMS[row.verb]
        assert choice.choose(*call) == row.algorithm
    shown = capsys.readouterr().out
    assert shown.count("2 ranks on 1 host(s), some processor") == 1, "only rank 0 prints"
    assert "all_reduce, us" in shown and f"Written to {path}" in shown
    assert "4 KiB" in shown and "fastest" in shown


def test_the_other_verbs_keep_what_was_measured(tmp_path):
    path = tmp_path / "table.json"
    older = [Row(verb, 2, "one", None, "direct") for verb in ("all_reduce", "gather")]
    save(path, LAYOUT, older)
    on_ranks(2, lambda comm: tune(comm, LAYOUT, options(verbs=["gather"], output=path)))
    new, kept = load(path, LAYOUT)
    assert new.verb == "gather" and new.algorithm in ("direct", "exchange")
    assert kept == older[0]


def test_a_dry_run_measures_and_writes_nothing(tmp_path, capsys):
    path = tmp_path / "table.json"

    def body(comm):
        code = tune(comm, LAYOUT, options(output=path, sizes=[64, 128], seconds=7, dry_run=True))
        return code, comm.used

    assert on_ranks(2, body) == [(0, [])] * 2
    assert not path.exists()
    assert f"About 14 s; the table would go to {path}" in capsys.readouterr().out


def test_a_table_that_cannot_be_written_is_every_ranks_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")

    def body(comm):
        with pytest.raises(Exception, match="writing the table failed") as info:
            tune(comm, LAYOUT, options(output=tmp_path / "file" / "table.json"))
        return "rank 0: " in str(info.value) and comm.all_reduce(np.int64(1)) == 2

    assert all(on_ranks(2, body))


@pytest.mark.parametrize("arguments", [["tun"], ["tune", "--verbs", "x"], ["tune", "--sizes="]])
def test_a_bad_command_line_is_explained(arguments, capsys):
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    assert "usage: python -m distrt" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["tune"], ["info"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as info:
        main([*command, "--help"])
    assert info.value.code == 0
    assert "mpirun -n 4 python -m distrt" in capsys.readouterr().out


def test_no_command_is_help(capsys, monkeypatch):
    for launcher in launching_variables():
        monkeypatch.delenv(launcher, raising=False)
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "usage: python -m distrt" in shown and "tune" in shown and "info" in shown
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    assert main([]) == 0 and capsys.readouterr().out == "", "once a host is enough"


@pytest.mark.launches
@pytest.mark.parametrize("arguments", [[], ["--help"], ["tune", "--help"], ["--version"]])
def test_help_needs_no_mpi(arguments):
    # A mpi4py that cannot be imported, in the way of the real one.
    program = (
        "import runpy, sys; sys.modules['mpi4py'] = None; "
        f"sys.argv[1:] = {arguments}; runpy.run_module('distrt', run_name='__main__')"
    )
    done = mpirun(0, ["-c", program])
    assert done.rc == 0 and done.err == ""
    assert done.out.startswith(
        "distrt 0" if "--version" in arguments else "usage: python -m distrt"
    )


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_help_under_mpirun_is_printed_once(ranks):
    done = mpirun(ranks, ["-m", "distrt"])
    assert done.rc == 0 and done.out.count("usage:") == 1


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, 4])
def test_tune_under_mpirun(ranks, tmp_path):
    path = tmp_path / "table.json"
    command = ["-m", "distrt", "tune", "--verbs", "broadcast", "--sizes", "1K:4K:4"]
    done = mpirun(ranks, [*command, "--seconds", "0.01"], env={"DISTRT_TUNING": str(path)})
    assert done.rc == 0, done.err
    assert "broadcast, us" in done.out and f"Written to {path}" in done.out
    assert load(path, Layout(ranks, 1, cpu_model()))[-1].verb == "broadcast"
    # The next job follows it.
    done = mpirun(ranks, ["-m", "distrt", "info"], env={"DISTRT_TUNING": str(path)})
    assert done.rc == 0 and "rows for this layout" in done.out
    assert "0 rows for this layout" not in done.out


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [0, 1])
def test_one_rank_has_nothing_to_tune(ranks, tmp_path):
    path = tmp_path / "table.json"
    done = mpirun(ranks, ["-m", "distrt", "tune"], env={"DISTRT_TUNING": str(path)})
    assert done.rc == 2 and "no table is written" in done.out and not path.exists()
