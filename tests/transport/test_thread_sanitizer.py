"""The shared-memory protocol under ThreadSanitizer, across the wrap of its epochs."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [Path(__file__).with_name("channel_threads.cpp"), ROOT / "csrc" / "host" / "baseline.cpp"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("tsan") / "channel_threads"
    includes = [f"-I{ROOT / 'csrc' / part}" for part in ("include", "host", "shared")]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    command = ["g++", *flags, *includes, *map(str, SOURCES), "-o", str(path)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    return path


# The sanitizer does not see streaming stores: of those only the results are checked, and a
# missing store_fence() would go unnoticed.
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("stream_bytes", [1, 1 << 30], ids=["streaming", "cached"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_call_is_right_and_without_a_data_race(program, ranks, stream_bytes, seed):
    arguments = map(str, (ranks, stream_bytes, seed))
    command = ["setarch", "-R", str(program), *arguments]  # its shadow memory wants no ASLR
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stdout + done.stderr[-4000:]
    assert "WARNING: ThreadSanitizer" not in done.stderr
