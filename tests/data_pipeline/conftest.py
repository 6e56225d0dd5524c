"""N ranks as N threads, each with a communicator over loopback messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distrt.communicator import Communicator
from distrt.settings import Settings
from distrt.transport.base import Transport
from distrt.transport.loopback import LoopbackWorld

DEADLINE = 20.0


class ThreadRanks:
    """One rank of a group of threads, as the data room sees it; counts its collective calls."""

    def __init__(self, transport: Transport) -> None:
        self.communicator = Communicator(transport, Settings(timeout_seconds=DEADLINE))
        self.rank, self.size = transport.rank, transport.size
        self.calls = 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.calls += 1
        return self.communicator.all_gather_object(obj)

    def channel(self) -> Transport:
        self.calls += 1
        return self.communicator.channel()


def run_on_ranks(size: int, body: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Return ``body(ranks)`` of every rank; the first exception of any is raised."""
    return LoopbackWorld(size).run(lambda transport: body(ThreadRanks(transport)), 2 * DEADLINE)


@pytest.fixture(scope="session")
def on_ranks() -> Callable[[int, Callable[[ThreadRanks], Any]], list[Any]]:
    return run_on_ranks
