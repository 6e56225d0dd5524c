"""scripts/benchmark.py: the formulas of nccl-tests, and a short run."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.launching import mpirun

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bandwidths_are_those_of_nccl_tests(benchmark):
    algbw, busbw = benchmark.bandwidths("all_reduce", 1 << 30, 0.1, 4)
    assert (round(algbw, 3), round(busbw, 3)) == (10.737, 16.106)
    assert benchmark.bandwidths("all_gather", 8 * 10**9, 1.0, 4) == (8.0, 6.0)
    assert benchmark.bandwidths("broadcast", 8 * 10**9, 1.0, 4) == (8.0, 8.0)
    assert benchmark.bandwidths("all_reduce", 10**9, 1.0, 1) == (1.0, 0.0)
    assert [benchmark.parse_bytes(t) for t in ("64", "4K", "1M")] == [64, 4096, 1 << 20]


@pytest.mark.launches
@pytest.mark.timeout(120)
@pytest.mark.parametrize("verb", ["all_reduce", "broadcast", "all_gather"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_short_run_prints_a_row_for_each_size_and_nothing_wrong(n, verb):
    options = ["--verb", verb, "--max-bytes", "100K", "--factor", "32", "--seconds", "0.05"]
    done = mpirun(n, [str(SCRIPT), *options])
    assert done.rc == 0, done
    rows = [re.split(r"[ |]+", line.strip()) for line in done.out.splitlines() if line[0] != "#"]
    assert [int(row[0]) for row in rows] == [64, 2048, 65536]
    assert all(row[4] == "0" and float(row[1]) > 0 for row in rows)
    assert f"{n} ranks on 1 host(s)" in done.out and "#wrong" in done.out
