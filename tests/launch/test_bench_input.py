"""scripts/bench_input.py: short runs under mpirun, without a peer and with torch where it is."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.launching import mpirun

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_input.py"
SIZES = ["--rows", "530", "--width", "12", "--batch", "50", "--epochs", "2", "--map-us", "20"]


@pytest.mark.launches
@pytest.mark.timeout(120)
@pytest.mark.parametrize("peer", ["none", "torch"])
def test_a_short_run_reports_both_cases(peer, tmp_path):
    if peer != "none" and importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    path = tmp_path / "report.json"
    done = mpirun(2, [str(SCRIPT), *SIZES, "--peer", peer, "--json", str(path)], timeout=100)
    assert done.rc == 0, done
    assert "#   case |" in done.out
    report = json.loads(path.read_text())
    assert report["ranks"] == 2 and report["rows"] == 530 and report["epochs"] == 2
    shuffle, mapped = report["rows_of_table"]
    assert (shuffle["case"], mapped["case"]) == ("shuffle", "map")
    assert shuffle["limit_fresh_rows_per_s"] > 0 and shuffle["limit_reused_rows_per_s"] > 0
    assert mapped["ideal_rows_per_s"] > 0
    for row in (shuffle, mapped):
        assert row["wrong"] == 0 and row["rows_per_s"] > 0
        assert (row["peer_rows_per_s"] is None) == (peer == "none")


@pytest.mark.launches
@pytest.mark.timeout(120)
def test_a_stream_reports_its_memory(tmp_path):
    path = tmp_path / "report.json"
    sizes = ["--rows", "200000", "--width", "100", "--batch", "500"]
    done = mpirun(2, [str(SCRIPT), "--stream", *sizes, "--json", str(path)])
    assert done.rc == 0, done
    (row,) = json.loads(path.read_text())["rows_of_table"]
    assert row["wrong"] == 0 and row["dataset_bytes"] == 80_000_000
    assert row["growth_bytes"] < row["dataset_bytes"] / 10


@pytest.mark.launches
def test_a_peer_that_is_not_there_is_said_and_left_out(tmp_path):
    if importlib.util.find_spec("tensorflow") is not None:
        pytest.skip("tensorflow is installed")
    done = mpirun(2, [str(SCRIPT), *SIZES, "--peer", "tf", "--cases", "shuffle"])
    assert done.rc == 0, done
    assert done.out.count("needs TensorFlow") == 1
