"""scripts/bench_collectives.py: its formulas, a short run, and that it notices wrong results."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tests.launching import mpirun

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "bench_collectives.py"


def load(path):
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
    assert bench.problem_with(row) == ""
    assert "3 wrong elements" in bench.problem_with({**row, "wrong": 3})
    assert "its limit" in bench.problem_with({**row, "limit_us": 140})


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
    assert (found["flag_round_trip_us"] is None) == ("ring" in options)
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
