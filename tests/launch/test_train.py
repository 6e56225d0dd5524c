"""scripts/train.py from outside, as a user starts it: mpirun -n 1, 2, 3, 4."""

import json
import os
from pathlib import Path

import pytest

from tests.launching import mpirun

pytestmark = [pytest.mark.launches, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "train.py")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that trains on n ranks (0: no mpirun) and returns report and output."""
    folder = tmp_path_factory.mktemp("train")
    known = {}

    def run(n, *options, fresh=False):
        key = (n, options)
        if fresh or key not in known:
            path = folder / "report.json"
            arguments = [SCRIPT, "--checkpoint", "", "--json", str(path), *options]
            done = mpirun(n, arguments, timeout=120, env={"COLUMNS": "120"})
            assert done.rc == 0, done
            known[key] = json.loads(path.read_text()), done.out
            os.unlink(path)
        return known[key]

    return run


def losses(report):
    return [epoch["loss"] for epoch in report["epochs"]]


def agree(actual, expected, tolerance):
    assert len(actual) == len(expected)
    worst = max(abs(a / b - 1) for a, b in zip(actual, expected, strict=True))
    assert worst <= tolerance, worst


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_default_training(train, n):
    report, out = train(n)
    assert report["ranks"] == n and report["devices"] == ["/cpu:0"] * n
    assert report["test_accuracy"] >= 0.96
    assert len(report["epochs"]) == 20 and all(e["samples_per_s"] > 0 for e in report["epochs"])
    assert report["epochs"][-1]["accuracy"] > 0.97
    assert f"test accuracy {report['test_accuracy']:.4f}" in out
    assert f"{n} rank(s) on /cpu:0" in out and report["mpi"] in out
    assert f"all_reduce by {'ring' if n == 1 else 'direct'}" in out
    assert out.count("epoch 20/20") >= 1, "rank 0 shows the progress, and only it"
    agree(losses(report), losses(train(1)[0]), 1e-5)


def test_without_mpirun_it_is_one_replica(train):
    report, _ = train(0, "--epochs", "3")
    assert report["ranks"] == 1
    assert losses(report) == losses(train(1, "--epochs", "3")[0])


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "momentum", "nesterov"])
def test_in_float64_the_number_of_ranks_makes_no_difference(train, optimizer):
    options = ("--dtype", "float64", "--optimizer", optimizer, "--epochs", "8")
    one = losses(train(1, *options)[0])
    assert one[-1] < one[0] / 3
    for n in (2, 3, 4) if optimizer == "adam" else (3,):
        agree(losses(train(n, *options)[0]), one, 1e-9)


def test_two_runs_agree_to_the_last_bit(train):
    options = ("--epochs", "4", "--seed", "7")
    first, second = (losses(train(3, *options, fresh=True)[0]) for _ in range(2))
    assert first == second
    assert first != losses(train(3, "--epochs", "4")[0])


def test_resumed_training_is_the_uninterrupted_one(train, tmp_path):
    path = str(tmp_path / "c.safetensors")
    whole = train(2, "--epochs", "5")[0]
    train(2, "--epochs", "2", "--checkpoint", path)
    rest = train(2, "--epochs", "5", "--resume", path)[0]
    assert losses(rest) == losses(whole)[2:]
    assert rest["test_accuracy"] == whole["test_accuracy"]
    # The checkpoint knows nothing of the number of ranks.
    other = train(3, "--epochs", "5", "--resume", path)[0]
    agree(losses(other), losses(rest), 1e-5)
