"""What rank 0 reads at start is what all ranks have, its errors included."""

import pytest

from distrt.choice import Layout, Row, cpu_model, save
from distrt.errors import InvalidArgumentError
from distrt.settings import Settings
from distrt.transport.loopback import LoopbackWorld
from distrt.world import _as_rank_0

from ..launching import mpirun

pytestmark = pytest.mark.timeout(120)

# Prints what a rank follows in one write, so that the ranks' lines stay apart.
PROGRAM = """
import sys
import distrt
try:
    comm = distrt.world().communicator
except distrt.errors.InvalidArgumentError as error:
    sys.stdout.write(f"refused: {error}\\n")
    sys.exit(0)
ranges = [comm.ranges(verb) for verb in ("reduce", "broadcast", "all_gather")]
sys.stdout.write(f"{ranges} {comm.settings.timeout_seconds}\\n")
"""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_rank_0_reads(size):
    def body(transport):
        return _as_rank_0(transport, lambda: Settings(timeout_seconds=5.0 + transport.rank))

    assert LoopbackWorld(size).run(body) == [Settings(timeout_seconds=5.0)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_rank_0_cannot_read_is_every_ranks_error(size):
    def body(transport):
        def read():
            raise InvalidArgumentError(f"rank {transport.rank} cannot")

        with pytest.raises(InvalidArgumentError, match=r"^rank 0 cannot$"):
            _as_rank_0(transport, read)
        return transport.broadcast_object("goes on")

    assert LoopbackWorld(size).run(body) == ["goes on"] * size


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_the_tuned_table_and_the_environment_reach_all_ranks(ranks, tmp_path):
    path, size = tmp_path / "table.json", max(1, ranks)
    row = Row("reduce", size, "one", 4096, "ring")
    save(path, Layout(size, 1, cpu_model()), [row])
    save(path, Layout(size + 1, 1, cpu_model()), [row, row])
    forced = {"DISTRT_ALGORITHM": "broadcast=ring", "DISTRT_TIMEOUT": "77"}
    done = mpirun(ranks, PROGRAM, env={"DISTRT_TUNING": str(path), **forced})
    assert done.rc == 0, done.err
    direct = "direct" if size > 1 else "ring"
    tuned = ((4096, "ring"), (None, direct)) if size > 1 else ((None, "ring"),)
    ranges = [tuned, ((None, "ring"),), ((None, direct),)]
    assert done.out.splitlines() == [f"{ranges} 77.0"] * size


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DISTRT_TUNING", "broken", "broken is no table of tuned algorithms: Expecting"),
        ("DISTRT_ALGORITHM", "rings", "unknown algorithm 'rings'"),
        ("DISTRT_TIMEOUT", "x", "DISTRT_TIMEOUT='x': expected a positive"),
    ],
)
def test_what_cannot_be_read_is_refused_by_all_ranks(ranks, name, value, said, tmp_path):
    if name == "DISTRT_TUNING":
        (tmp_path / value).write_text("{")
        value = str(tmp_path / value)
    done = mpirun(ranks, PROGRAM, env={name: value})
    assert done.rc == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == max(1, ranks) and len(set(lines)) == 1
    assert lines[0].startswith("refused: ") and said in lines[0]


@pytest.mark.launches
def test_a_broken_table_ends_the_job_with_its_reason(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    program = "import distrt; distrt.world().communicator.barrier()"
    done = mpirun(3, program, env={"DISTRT_TUNING": str(path)}, timeout=30)
    assert done.rc != 0
    assert f"InvalidArgumentError: {path} is no table of tuned algorithms" in done.err
    assert "python -m distrt tune" in done.err
