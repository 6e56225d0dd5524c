"""Where the program is: in no scope, in a scope, or in a replica (layer 6).

May import: coordinator.communication, communicator, reduce_op, errors. The stack of
contexts is kept per thread, as in tf.distribute; strategy.py pushes onto it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

from distrt.coordinator import communication
from distrt.coordinator.communication import CommunicationOptions
from distrt.errors import ContextError
from distrt.reduce_op import ReduceOp

if TYPE_CHECKING:
    from distrt.coordinator.strategy import Strategy

__all__ = ["Frame", "ReplicaContext", "current_frame", "entered"]


class Frame(NamedTuple):
    """One entry of the stack: a scope, or (with a replica context) a run."""

    strategy: Strategy
    replica_context: ReplicaContext | None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()


def current_frame() -> Frame | None:
    """Return the innermost frame of this thread, or None outside every scope."""
    return _stack.frames[-1] if _stack.frames else None


@contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Keep ``frame`` on the stack for a while.

    Raises:
      ContextError: another strategy is active in this thread.
    """
    active = current_frame()
    if active is not None and active.strategy is not frame.strategy:
        raise ContextError(
            f"cannot enter {type(frame.strategy).__name__}: a {type(active.strategy).__name__} "
            "is active in this thread. Leave its scope first, or use one strategy throughout"
        )
    _stack.frames.append(frame)
    try:
        yield
    finally:
        _stack.frames.pop()


@final
class ReplicaContext:
    """What a function sees of its strategy while ``strategy.run`` calls it.

    Get it from ``distrt.get_replica_context()``. Source: tf.distribute.ReplicaContext.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this replica, from 0; with one replica per rank it is the rank."""
        return self._strategy.communicator.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are combined."""
        return self._strategy.num_replicas_in_sync

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine the replicas' values; every replica gets the result. All ranks must call.

        Args:
          reduce_op: SUM, MEAN, PROD, MIN or MAX; a ReduceOp or its name.
          value: array, number or nested structure, equal in structure, shapes and dtypes;
            IndexedSlices too.
          options: CommunicationOptions of this call, equal on all ranks.

        Raises:
          CollectiveMismatchError: on every rank, where the ranks' calls differ.

        Source: tf.distribute.ReplicaContext.all_reduce.
        """
        communicator = self._strategy.communicator
        if options is None:
            return communicator.all_reduce(value, reduce_op)
        return communication.all_reduce(communicator, reduce_op, value, options)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' values along ``axis``. All ranks must call.

        Source: tf.distribute.ReplicaContext.all_gather.
        """
        return self._strategy.communicator.all_gather(value, axis)
