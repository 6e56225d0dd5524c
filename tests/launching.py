"""How the tests start a program on several ranks: the mpirun of this Python's environment.

``mpirun(3, TEXT)`` runs a program and returns what it printed and how it ended;
``start(3, TEXT)`` gives the running job to a test that must do something to it.
A job that outlives its time is killed with all its ranks, and the test fails
with both outputs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, final

import pytest

import distrt

# What a launcher around pytest itself has set, and what would confuse the checks of the ranks.
_FOREIGN = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MV2_", "DISTRT_")
# Open MPI 5 looks for network cards for over a second at every start; the tests need none.
_OPEN_MPI = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
_ROOT = str(Path(distrt.__file__).parent.parent)


class Finished(NamedTuple):
    """How a job ended: mpirun's exit status, both outputs, and how long it took."""

    rc: int
    out: str
    err: str
    seconds: float


@functools.cache
def mpirun_path() -> str:
    """Return the mpirun beside this Python, else the one on the PATH; skips the test without."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun beside this Python or on the PATH")
    return found


@functools.cache
def is_open_mpi() -> bool:
    """Tell whether mpirun is Open MPI's; otherwise it is MPICH's or Intel's hydra."""
    shown = subprocess.run(
        [mpirun_path(), "--version"], capture_output=True, text=True, env=clean_environ()
    )
    return "Open MPI" in shown.stdout + shown.stderr


def clean_environ(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without a launcher's variables, with ``env`` on top."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    # The ranks find the very package that this pytest runs on.
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, kept.get("PYTHONPATH"))))
    return {**kept, **(env or {})}


def _children(pid: int) -> Iterator[int]:
    """Yield all descendants of ``pid``: Open MPI's ranks have process groups of their own."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _children(child)


@final
class Job:
    """A running mpirun; its outputs go to files of ``folder``."""

    def __init__(self, command: list[str], env: Mapping[str, str] | None, folder: Path) -> None:
        self._outputs = folder / "out", folder / "err"
        self._started = time.monotonic()
        with self._outputs[0].open("wb") as out, self._outputs[1].open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environ(env),
                start_new_session=True,
            )

    def output(self) -> tuple[str, str]:
        """Return what the ranks have written so far to stdout and stderr."""
        out, err = (path.read_text(errors="replace") for path in self._outputs)
        return out, err

    def wait_for(self, text: str, times: int = 1, timeout: float = 30) -> None:
        """Wait until ``text`` has appeared that many times on stdout."""
        deadline = time.monotonic() + timeout
        while self.output()[0].count(text) < times:
            if time.monotonic() > deadline or self.process.poll() is not None:
                self._fail(f"{text!r} did not appear {times} times")
            time.sleep(0.02)

    def finish(self, timeout: float = 60) -> Finished:
        """Wait for the end of the job."""
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._fail(f"the job did not end within {timeout} s")
        return Finished(rc, *self.output(), time.monotonic() - self._started)

    def kill(self) -> None:
        """Kill mpirun and all its ranks, if they still live."""
        if self.process.poll() is not None:
            return
        family = list(_children(self.process.pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _fail(self, why: str) -> None:
        self.kill()
        out, err = self.output()
        pytest.fail(f"{why}\n--- stdout\n{out}\n--- stderr\n{err}", pytrace=False)


@contextlib.contextmanager
def start(
    n: int, program: str | list[str], *, env: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """Start ``program`` (its text, or Python's arguments) on n ranks; n = 0: without mpirun."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = program
        if isinstance(program, str):
            (folder / "program.py").write_text(program)
            arguments = [str(folder / "program.py")]
        command = [sys.executable, *arguments]
        if n:
            extra = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi() else []
            command = [mpirun_path(), *extra, "-n", str(n), *command]
        job = Job(command, {**(_OPEN_MPI if is_open_mpi() else {}), **(env or {})}, folder)
        try:
            yield job
        finally:
            job.kill()


def mpirun(
    n: int,
    program: str | list[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> Finished:
    """Run ``program`` (its text, or Python's arguments) on n ranks to its end.

    Args:
      n: number of ranks; 0 starts one process without mpirun.
      program: the text of a program, or a list of arguments to Python.
      env: variables on top of the environment.
      timeout: seconds after which the job is killed and the test fails.
    """
    with start(n, program, env=env) as job:
        return job.finish(timeout)
