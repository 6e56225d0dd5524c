"""Prefetching: items made ahead of time in a background thread (data room, layer 5).

May import: the standard library only. Closing the generator early, or letting
it be collected, ends the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

__all__ = ["prefetched"]


class _Made(NamedTuple):
    item: Any


class _Ended(NamedTuple):
    error: BaseException | None


def prefetched(items: Iterator[Any], buffer_size: int) -> Iterator[Any]:
    """Yield ``items``, at most ``buffer_size`` of them made ahead by a thread.

    An exception of ``items`` is raised here, in its place in the order, with the
    traceback of the thread.
    """
    made: SimpleQueue[_Made | _Ended] = SimpleQueue()
    room = threading.Semaphore(buffer_size)
    stop = threading.Event()
    worker = threading.Thread(
        target=_work, args=(items, made, room, stop), name="distrt-prefetch", daemon=True
    )
    worker.start()
    try:
        while isinstance(report := made.get(), _Made):
            room.release()
            yield report.item
        if report.error is not None:
            raise report.error
    finally:
        stop.set()
        room.release()
        # The collector may close the generator inside the worker itself.
        if threading.current_thread() is not worker:
            worker.join()


def _work(
    items: Iterator[Any],
    made: SimpleQueue[_Made | _Ended],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        while room.acquire() and not stop.is_set():
            made.put(_Made(next(items)))
    except StopIteration:
        pass
    except BaseException as caught:
        error = caught
    finally:
        # Here and not in the collector, so that threads of prefetches further up end too.
        close = getattr(items, "close", None)
        if close is not None:
            close()
        made.put(_Ended(error))
