"""The shared-memory protocol under ThreadSanitizer, across the wrap of its epochs."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("tsan") / "channel_threads"
    includes = [f"-I{ROOT / 'csrc' / part}" for part in ("include", "host", "shared")]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    source = Path(__file__).with_name("channel_threads.cpp")
    built = subprocess.run(
        ["g++", *flags, *includes, str(source), "-o", str(path)], capture_output=True, text=True
    )
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_data_race(program, ranks):
    command = ["setarch", "-R", str(program), str(ranks)]  # its shadow memory wants no ASLR
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stdout + done.stderr[-4000:]
    assert "WARNING: ThreadSanitizer" not in done.stderr
