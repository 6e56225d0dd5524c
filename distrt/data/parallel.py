"""Functions of the user's, run for several elements at once (data room, layer 5).

May import: errors, arrays, worker (as a program only). Threads suit functions that leave Python
(NumPy, reading, decoding); processes suit those that do not. Processes are new Pythons, never
forks: they get the function by cloudpickle and elements through pipes, do not see the
launcher's variables, so they never start MPI, and end with this one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, final

import cloudpickle
import numpy as np

from distrt.arrays import map_structure
from distrt.errors import DistrtError, InvalidArgumentError

__all__ = ["WorkerError", "Workers", "call", "checked_count"]

# What launchers set for the ranks that they start.
_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "MPI", "HYD", "I_MPI_", "SLURM_")
# Chunks for each worker and batch: fewer cost less to send, more leave nobody idle at the end.
_CHUNKS = 2


class WorkerError(DistrtError, RuntimeError):
    """A worker process ended, or a function failed in it; the text has the worker's traceback."""


def call(function: Callable[..., Any], element: Any) -> Any:
    """Return ``function`` of an element, as tf.data calls it: a tuple is unpacked.

    Plain tuples only: tf.data hands a named tuple over as one argument. Byte strings arrive
    as ``bytes``.
    """
    if type(element) is np.ndarray and element.ndim:  # most rows are one array
        return function(element)
    return function(*arguments_of(element))


def arguments_of(element: Any) -> tuple[Any, ...]:
    """Return the arguments that a function gets for ``element``."""
    given = map_structure(_unboxed, element)
    return given if type(given) is tuple else (given,)


def _unboxed(leaf: Any) -> Any:
    boxed = leaf.dtype.kind == "O" and leaf.ndim == 0
    return leaf[()] if boxed else leaf


@final
class Workers:
    """``count`` threads, or processes, started with the first call.

    They end when this is collected, and with the program.
    """

    def __init__(self, count: int, processes: bool) -> None:
        self.count, self.processes = count, processes
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[_Process] = []
        self._function: Callable[..., Any] | None = None

    def map(self, function: Callable[..., Any], elements: Sequence[Any]) -> list[Any]:
        """Return ``function`` of every element, in order.

        Raises:
          Exception: what ``function`` raises; out of a process with WorkerError as its cause,
            whose text has the traceback there.
          WorkerError: a process ended, or the function cannot be sent to it.
        """
        pool = self._started(function)
        if not self.processes:
            return list(pool.map(lambda element: call(function, element), elements))
        size = max(1, -(-len(elements) // (self.count * _CHUNKS)))
        chunks = [elements[i : i + size] for i in range(0, len(elements), size)]
        return [made for chunk in pool.map(self._in_process, chunks) for made in chunk]

    def _started(self, function: Callable[..., Any]) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                # With processes each thread waits for one of them.
                self._pool = ThreadPoolExecutor(self.count, "distrt-map")
                weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
                self._function = function
                if self.processes:
                    self._idle = [_Process(function) for _ in range(self.count)]
            return self._pool

    def _in_process(self, elements: Sequence[Any]) -> list[Any]:
        with self._lock:
            process = self._idle.pop()
        try:
            return process.map(elements)
        finally:
            with self._lock:
                self._idle.append(process)


@final
class _Process:
    """One worker process, and the pipes to and from it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            payload = cloudpickle.dumps(function)
        except Exception as error:
            raise WorkerError(
                f"map(processes=True): {function!r} cannot be sent to another process: {error}. "
                "Leave out what it holds that cannot travel (files, locks, communicators)"
            ) from error
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        # The modules that the function was defined in are found where this program finds them.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        weakref.finalize(self, _end, self._process)
        self._send(payload)

    def map(self, elements: Sequence[Any]) -> list[Any]:
        self._send(pickle.dumps([arguments_of(e) for e in elements], pickle.HIGHEST_PROTOCOL))
        made, failure, text = self._receive()
        if failure is None and not text:
            return list(made)
        cause = WorkerError(f"in a worker process of map(processes=True):\n{text}")
        raise failure if failure is not None else cause from cause

    def _send(self, payload: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(payload).to_bytes(8, "little") + payload)
            self._process.stdin.flush()
        except OSError:
            self._lost()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        head = self._process.stdout.read(8)
        payload = self._process.stdout.read(int.from_bytes(head, "little")) if head else b""
        if len(head) < 8 or len(payload) < int.from_bytes(head, "little"):
            self._lost()
        return pickle.loads(payload)

    def _lost(self) -> NoReturn:
        code = self._process.wait()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        raise WorkerError(
            f"map(processes=True): worker process {self._process.pid} ended {how}: its function "
            "crashed, left with sys.exit or os._exit, or the machine is out of memory"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    # Without input the worker ends by itself; what hangs in the function is killed.
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.close()
    except OSError:
        pass
    process.kill()
    process.wait()
    process.stdout.close()


def checked_count(what: str, count: int | None) -> int | None:
    """Return the number of calls at once; None: no workers. -1 (AUTOTUNE): one for each core.

    Raises:
      InvalidArgumentError: it is neither None, -1 nor 1 or more.
    """
    if count is None or count == 1:
        return None
    if count == -1:
        return len(os.sched_getaffinity(0))
    if count < 1:
        raise InvalidArgumentError(f"{what}: expected 1 or more, or AUTOTUNE (-1), got {count}")
    return count
