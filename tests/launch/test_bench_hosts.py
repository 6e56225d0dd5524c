"""The benchmark between hosts: real namespaces, real links, nothing left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import clean_environ, mpirun_path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_hosts.py"


def may_make_hosts():
    tools = all(shutil.which(name) for name in ("ip", "tc", "nsenter", "unshare"))
    if os.geteuid() != 0 or not tools:
        return False
    # A container's root may be refused; making a namespace is the only way to know.
    name = f"distrt-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode
    shaped = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf"]
    shaped += ["rate", "1gbit", "burst", "256kb", "latency", "50ms"]
    inside = ["ip", "netns", "exec", name]
    works = made == 0 and subprocess.run([*inside, *shaped], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return works


def left_behind(own):
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names_of = re.compile(rf"\bdist(v|rt-[bh]){own}\D")
    return [line for line in (links + names).splitlines() if names_of.search(line + " ")]


@pytest.mark.launches
@pytest.mark.timeout(120)
def test_two_hosts_of_two_ranks(tmp_path):
    mpirun_path()
    if not may_make_hosts():
        pytest.skip("needs root, iproute2, util-linux and leave to make network namespaces")
    report = tmp_path / "hosts.json"
    options = ["--ranks-per-host", "2", "--sizes", "64,16K,256K", "--seconds", "0.1"]
    command = [sys.executable, str(SCRIPT), *options, "--json", str(report)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=clean_environ(),
    ) as process:
        try:
            out, err = process.communicate(timeout=100)
        finally:
            process.terminate()
    assert process.returncode == 0, (out, err)
    facts = json.loads(report.read_text())
    assert (facts["hosts"], facts["ranks"]) == (2, 4) and facts["goodput_bytes_per_s"] > 0
    rows = {(row["size_bytes"], row["algorithm"]): row for row in facts["rows"]}
    names = ("hierarchical", "ring", "halving_doubling")
    assert set(rows) == {(size, name) for size in (64, 16384, 262144) for name in names}
    for row in rows.values():
        assert row["wrong"] == 0 and row["time_us"] > 0 and row["peer_time_us"] > 0
    taken = {size: name for (size, name), row in rows.items() if row["default"]}
    assert taken == {64: "halving_doubling", 16384: "halving_doubling", 262144: "hierarchical"}
    assert out.count("\n") == 2 + len(rows)
    # The kernel takes a namespace's links down a moment after the namespace.
    deadline = time.monotonic() + 10
    while left_behind(process.pid % 100_000) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(process.pid % 100_000) == []
