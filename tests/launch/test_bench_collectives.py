"""scripts/bench_collectives.py: its formulas, a short run, and that it notices wrong results."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distrt.communicator import Communicator
from distrt.transport.loopback import LoopbackWorld
from tests.launching import mpirun

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "bench_collectives.py"


def load(path):
    # A script finds the modules beside it.
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return load(SCRIPT)


def test_bus_factors_are_those_of_nccl_tests(bench):
    assert {verb: factor(4) for verb, factor in bench.BUS.items()} == {
        "all_reduce": 1.5,
        "reduce_scatter": 0.75,
        "all_gather": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1.0,
    }


def test_sizes_are_read_as_nccl_tests_writes_them(bench):
    assert bench.parse_sizes("4:64:2") == [4, 8, 16, 32, 64]
    assert bench.parse_sizes("1K:4M:4") == [
        1 << 10,
        1 << 12,
        1 << 14,
        1 << 16,
        1 << 18,
        1 << 20,
        1 << 22,
    ]
    assert bench.parse_sizes("64,4K") == [64, 4096]


def test_expected_values_in_closed_form(bench):
    for verb in bench.BUS:
        parts = [bench.pattern(bench.shapes(verb, 12, 3)[0], np.float64) + r for r in range(3)]
        total, cut = sum(parts), parts[0].size // 3
        for rank in range(3):
            at = slice(rank * cut, (rank + 1) * cut)
            truth = {
                "all_reduce": total,
                "reduce_scatter": total[at],
                "all_gather": np.concatenate(parts),
                "all_to_all": np.concatenate([part[at] for part in parts]),
                "broadcast": parts[0],
            }[verb]
            lengths = bench.shapes(verb, 12, 3)
            found = bench.expected(verb, "SUM", lengths, rank, 3, np.dtype(np.float64))
            assert (found == truth).all() and found.shape == truth.shape


def test_expected_values_of_every_op(bench):
    parts = np.array([bench.pattern(11, np.float64) + r for r in range(3)])
    truth = {"SUM": "sum", "MEAN": "mean", "MIN": "min", "MAX": "max", "PROD": "prod"}
    assert bench.OPS.keys() == truth.keys()
    for op, name in truth.items():
        found = bench.expected("all_reduce", op, (11, 11), 0, 3, np.dtype(np.float64))
        assert (found == getattr(parts, name)(axis=0)).all()


def test_only_a_cycle_writes_and_reads(bench):
    said = []
    cycle = bench.Cycle(np.zeros(9), np.zeros(9), 2)
    cycle.read = lambda: said.append("read")
    bench.timed(lambda: said.append("start"), lambda: said.append("call"), None)
    assert said == ["start", "call"] and (cycle.source == 0).all()
    bench.timed(lambda: said.append("start"), lambda: said.append("call"), cycle)
    assert said[2:] == ["start", "call", "read"]
    assert (cycle.source == bench.pattern(9, np.float64) + 2).all()


def test_a_wrong_element_or_a_call_faster_than_memory_is_a_problem(bench):
    row = {"verb": "all_reduce", "size_bytes": 1 << 20, "wrong": 0, "time_us": 100, "limit_us": 90}
    row |= {"limit": "memory", "registered": True}
    assert bench.problem_with(row) == ""
    assert "3 wrong elements" in bench.problem_with({**row, "wrong": 3})
    assert "its limit" in bench.problem_with({**row, "limit_us": 140})
    assert bench.problem_with({**row, "limit_us": 140, "registered": False}) == ""
    # What a shaper lets through at once is much of 1 MiB, and little of 16 MiB.
    wire = {**row, "limit": "wire", "limit_us": 140}
    assert bench.problem_with(wire) == ""
    assert "its limit" in bench.problem_with({**wire, "size_bytes": 16 << 20})


@pytest.mark.launches
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "options", [[], ["--plain", "--repeat", "--op", "MAX"], ["--algorithm", "ring"]]
)
def test_a_short_run_reports_every_row(bench, options, tmp_path):
    report = tmp_path / "report.json"
    sizes = ["--sizes", "64,20K", "--seconds", "0.02", "--verbs", "all", "--json", str(report)]
    done = mpirun(3, [str(SCRIPT), *sizes, *options])
    assert done.rc == 0, done
    found = json.loads(report.read_text())
    assert found["ranks"] == 3 and found["nodes"] == 1
    assert found["flag_round_trip_us"] > 0
    rows = found["rows"]
    assert {row["verb"] for row in rows} == set(bench.BUS) and len(rows) == 14
    assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["peer_time_us"] > 0 for row in rows)
    assert all(row["registered"] == ("--plain" not in options) for row in rows)
    assert {row["algorithm"] for row in rows if row["verb"] == "all_reduce"} == {
        "ring" if "ring" in options else "direct"
    }


def test_reports_of_several_mpis_are_merged():
    merge = load(SCRIPTS / "bench_mpis.py").table

    def report(mpi, trip, ours, theirs):
        row = {"verb": "all_reduce", "size_bytes": 64, "dtype": "float32", "op": "SUM"}
        row |= {"registered": True, "in_place": True, "cycle_us": ours, "peer_cycle_us": theirs}
        row |= {"peer": "mpi", "peer_dtype": "float32"}
        return {"ranks": 2, "mpi": mpi, "flag_round_trip_us": trip, "rows": [row]}

    near = [
        report("A 1", 0.2, 1.0, 4.0),
        report("B 2", 0.2, 1.2, 3.0),
        report("A 1", 0.2, 3.0, 6.0),
    ]
    lines = merge([*near, report("A 1", 0.9, 2.0, 2.0)]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if "| 64" in line]
    # Of A's two rounds the median; the fastest MPI is B, whose own run had distrt at 1.2.
    assert cells[0][-3:-1] == ["2.50x", "B 2"] and cells[1][-3:-1] == ["1.00x", "A 1"]
    assert "under 0.3" in lines[0]


def test_what_a_host_s_wire_must_carry(bench):
    wire = bench.bench_wire
    # Two hosts of two ranks, 1 GB/s: every host's link carries each byte once, each way.
    said = {verb: wire.seconds(verb, 1000, 2, 4, 1e9) for verb in bench.BUS}
    assert said == {
        "all_reduce": 1e-6,
        "reduce_scatter": 0.5e-6,
        "all_gather": 0.5e-6,
        "all_to_all": 1e-6,
        "broadcast": 1e-6,
    }
    # One rank on each host: 2 (n - 1) / n.
    assert wire.seconds("all_reduce", 1000, 4, 4, 1e9) == 1.5e-6


def test_the_goodput_is_that_of_a_stream_from_host_to_host(bench):
    # Ranks 0 and 2 on one pretended host, 1 on another.
    topology, said = SimpleNamespace(node_of=(0, 1, 0)), {}

    def program(transport):
        world = SimpleNamespace(communicator=Communicator(transport), topology=topology)
        said[transport.rank] = bench.bench_wire.goodput(world, 4 << 20)

    LoopbackWorld(3).run(program)
    assert said[0] > 1e6 and said[1] == said[0] == said[2]


def test_a_wire_that_lets_nothing_through_has_no_goodput(bench, monkeypatch):
    # The name is one that RFC 2606 keeps from resolving.
    monkeypatch.setattr(bench.bench_wire.socket, "gethostname", lambda: "host.invalid")
    monkeypatch.setattr(bench.bench_wire, "SECONDS", 0.5)
    topology, said = SimpleNamespace(node_of=(0, 1)), {}

    def program(transport):
        world = SimpleNamespace(communicator=Communicator(transport), topology=topology)
        said[transport.rank] = bench.bench_wire.goodput(world, 1 << 20)

    LoopbackWorld(2).run(program)
    assert said == {0: None, 1: None}


@pytest.mark.launches
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint64"])
def test_the_mpi_s_nearest_type_stands_for_one_that_it_lacks(bench, dtype, tmp_path):
    report = tmp_path / "report.json"
    short = ["--sizes", "64", "--seconds", "0.02", "--json", str(report)]
    done = mpirun(2, [str(SCRIPT), *short, "--dtype", dtype, "--verbs", "all_reduce,all_gather"])
    assert done.rc == 0, done
    rows = json.loads(report.read_text())["rows"]
    names = {row["verb"]: row["peer_dtype"] for row in rows}
    assert names["all_gather"] == dtype  # it moves bytes
    halves = ("float16", "float32")
    assert names["all_reduce"] in (halves if dtype.endswith("float16") else (dtype,))
    stands = f"cannot reduce {dtype}: its {names['all_reduce']}" in done.out
    assert stands == (names["all_reduce"] != dtype)


@pytest.mark.launches
@pytest.mark.timeout(180)
def test_gloo_is_a_peer_where_torch_is_installed(bench, tmp_path):
    report = tmp_path / "report.json"
    short = ["--sizes", "64,20K", "--seconds", "0.02", "--verbs", "all", "--json", str(report)]
    done = mpirun(3, [str(SCRIPT), *short, "--peer", "gloo"], timeout=150)
    if importlib.util.find_spec("torch") is None:
        assert done.rc == 1 and "rank(s) [0, 1, 2] lack torch: pip install torch" in done.err
        return
    assert done.rc == 0, done
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 14 and "vs gloo" in done.out
    assert all(row["peer"] == "gloo" and row["peer_time_us"] > 0 for row in rows)


@pytest.mark.launches
@pytest.mark.timeout(120)
def test_a_plot_is_drawn_where_matplotlib_is_installed(bench, tmp_path):
    file = tmp_path / "times.png"
    short = ["--sizes", "64,4K", "--seconds", "0.02", "--plot", str(file)]
    done = mpirun(2, [str(SCRIPT), *short])
    if importlib.util.find_spec("matplotlib") is None:
        assert done.rc != 0 and "pip install matplotlib" in done.err and not file.exists()
        return
    assert done.rc == 0, done
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


def test_a_plot_draws_what_the_rows_hold(bench):
    row = {"cycle_us": 8.0, "time_us": 10.0, "peer_cycle_us": 16.0, "peer_time_us": 20.0}
    row |= {"limit_us": 5.0, "busbw_gbps": 2.0}
    values = bench.bench_plot.values
    assert values(row, "time") == {"distrt": 8.0, "peer": 16.0, "limit": 5.0}
    assert values(row, "busbw") == {"distrt": 2.0, "peer": 1.0, "limit": 4.0}
    assert values({**row, "peer_time_us": None}, "busbw")["peer"] is None
    sizes = [(verb, place, size) for verb in "ba" for place in (False, True) for size in (2, 1)]
    rows = [dict(zip(("verb", "in_place", "size_bytes"), each, strict=True)) for each in sizes]
    drawn = bench.bench_plot.panels(rows)
    assert list(drawn) == [("b", False), ("b", True), ("a", False), ("a", True)]
    assert all([row["size_bytes"] for row in group] == [1, 2] for group in drawn.values())


def test_the_merged_table_names_the_type_that_stands_for_ours():
    merge = load(SCRIPTS / "bench_mpis.py").table
    row = {"verb": "all_reduce", "size_bytes": 64, "dtype": "bfloat16", "op": "SUM"}
    row |= {"registered": True, "in_place": True, "cycle_us": 1.0, "peer_cycle_us": 4.0}
    report = {"ranks": 2, "mpi": "A 1", "flag_round_trip_us": 0.2}
    table = merge([report | {"rows": [row | {"peer": "mpi", "peer_dtype": "float16"}]}])
    assert "| 4.00 (float16) | 4.00x | A 1 |" in table
    table = merge([report | {"rows": [row | {"peer": "gloo", "peer_dtype": "bfloat16"}]}])
    assert "| 4.00 | 4.00x | gloo, A 1 |" in table
