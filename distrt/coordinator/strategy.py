"""``Strategy``: how one program becomes many replicas (layer 6).

May import: data, train, world, communicator, cluster, arrays, reduce_op, errors.
One rank is one replica, so a "per-replica value" is simply this rank's array and
nothing needs a container. Names and meanings are those of tf.distribute.Strategy.
"""

from __future__ import annotations

import abc
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

import numpy as np

from distrt.arrays import (
    array_namespace,
    as_array,
    cupy_module,
    dtype_of,
    is_cupy,
    map_structure,
    mean_dtype,
)
from distrt.cluster.device import Device
from distrt.communicator import Communicator
from distrt.coordinator.replica_context import Frame, ReplicaContext, current_frame, entered
from distrt.data import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    InputContext,
    InputOptions,
    ValueContext,
)
from distrt.errors import ContextError, InvalidArgumentError
from distrt.reduce_op import ReduceOp
from distrt.world import alone

__all__ = [
    "DefaultStrategy",
    "Strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class Strategy(abc.ABC):
    """Base of all strategies. Source: tf.distribute.Strategy.

    Attributes:
      communicator: the collective verbs over the replicas of this strategy.
      device: what this rank computes on.
      unnamed_variables: numbers the variables that got no name.
    """

    # Whether each replica is a worker of its own to the datasets, which then shard themselves.
    _replicas_are_workers: ClassVar[bool] = False

    @abc.abstractmethod
    def __init__(self, communicator: Communicator, device: Device) -> None:
        self.communicator, self.device = communicator, device
        # Unnamed variables are numbered here: those of a scope are created by all ranks,
        # and one that a rank creates for itself elsewhere must not shift their names.
        self.unnamed_variables = itertools.count()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} replica {self.communicator.rank} of "
            f"{self.num_replicas_in_sync} on {self.device.name}>"
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are combined."""
        return self.communicator.size

    @final
    def scope(self) -> AbstractContextManager[Strategy]:
        """Make this the current strategy: ``with strategy.scope(): ...``.

        Variables created inside start from rank 0's value on all ranks. A scope
        object is good for one entry. Source: tf.distribute.Strategy.scope.

        Raises:
          ContextError: on entry, where another strategy is active or the scope was used before.
        """
        return _Scope(self)

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` as this rank's replica and return its result.

        All ranks must call it where ``fn`` makes collective calls, as
        ``apply_gradients`` does. Exceptions come out as they are.

        Raises:
          ContextError: called inside ``run``, or while another strategy is active.
          InvalidArgumentError: ``args`` is not a tuple or list.

        Source: tf.distribute.Strategy.run.
        """
        if not isinstance(args, tuple | list):
            raise InvalidArgumentError(
                f"run: args must be a tuple or a list, got {type(args).__name__}; "
                "for one argument write args=(x,)"
            )
        frame = current_frame()
        if frame is not None and frame.replica_context is not None:
            raise ContextError("run was called inside run: a replica cannot start replicas")
        with entered(Frame(self, ReplicaContext(self))):
            return fn(*args, **(kwargs or {}))

    @final
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | tuple[int, ...] | None = None,
    ) -> Any:
        """Combine the replicas' values into one, which every rank gets. All ranks must call.

        Args:
          reduce_op: SUM, MEAN, PROD, MIN or MAX; a ReduceOp or its name.
          value: this replica's value: an array or number, or without an axis a nested structure.
          axis: None: values of equal shape are combined element by element.
            Otherwise each value is first reduced along these axes, along which the
            replicas' sizes may differ; MEAN is then weighted by the number of elements.

        Returns:
          The combined value. A MEAN of integers is a float (true division).

        Raises:
          ContextError: called inside ``run``; use the replica context's ``all_reduce`` there.
          CollectiveMismatchError: on every rank, where the ranks' calls differ.

        Source: tf.distribute.Strategy.reduce.
        """
        self._require_cross_replica("reduce", "get_replica_context().all_reduce(...)")
        if axis is None:
            return self.communicator.all_reduce(value, reduce_op)
        with self.communicator.refusing("reduce"):
            op, array = ReduceOp.parse(reduce_op), as_array(value)
            axes, row = _axes(axis, array.ndim), dtype_of(array, op)
            folded = None if op is ReduceOp.MEAN else _fold_axes(op, array, axes)
        if folded is not None:
            return self.communicator.all_reduce(folded, op)
        xp = array_namespace(array)
        wide = np.promote_types(mean_dtype(row), np.float32) if row.lanes == 1 else row.numpy
        count = np.float64(np.prod([array.shape[a] for a in axes]))
        total = xp.sum(array.astype(wide), axis=axes, dtype=wide)
        total, count = self.communicator.all_reduce((total, count), ReduceOp.SUM)
        with np.errstate(invalid="ignore", divide="ignore"):
            return xp.asarray(total / float(count)).astype(mean_dtype(row))

    @final
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' values along ``axis``. All ranks must call.

        Sizes may differ along ``axis``. Source: tf.distribute.Strategy.gather.
        """
        self._require_cross_replica("gather", "get_replica_context().all_gather(...)")
        return self.communicator.all_gather(value, axis)

    @final
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas: always a tuple of one.

        Source: tf.distribute.Strategy.experimental_local_results.
        """
        return (value,)

    @final
    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split each global batch of ``dataset`` over the replicas. All ranks must call.

        Args:
          dataset: a distrt.data.Dataset that ends in ``.batch(global_batch_size)``. Under
            MultiWorkerMirroredStrategy its ``auto_shard_policy`` counts.
          options: how the parts are handed over.

        Returns:
          An iterable of this replica's parts, on its device. A global batch of
          length L is cut into consecutive parts of ceil(L / n); the last ones may
          be shorter or empty, and every rank takes the same number of steps.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.
        """
        return DistributedDataset(
            dataset, self.communicator, self.place, options, workers=self._replicas_are_workers
        )

    @final
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDatasetsFromFunction:
        """Distribute the datasets that ``dataset_fn`` makes. All ranks must call.

        Args:
          dataset_fn: gets an ``InputContext`` and returns a Dataset batched by the per-replica
            batch size. MultiWorkerMirroredStrategy: of each worker, which takes care to make
            another one for each ``input_pipeline_id``. Else one for all replicas, which
            take its batches in turns.
          options: how the batches are handed over.

        Returns:
          An iterable of this replica's batches, on its device.

        Source: tf.distribute.Strategy.distribute_datasets_from_function.
        """
        return DistributedDatasetsFromFunction(
            dataset_fn, self.communicator, self.place, options, workers=self._replicas_are_workers
        )

    @final
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Return this replica's value: ``value_fn`` of its ``ValueContext``. Local.

        Numbers become arrays as everywhere. Source:
        tf.distribute.Strategy.experimental_distribute_values_from_function.
        """
        self._require_cross_replica("experimental_distribute_values_from_function", "the value")
        context = ValueContext(self.communicator.rank, self.num_replicas_in_sync)
        return map_structure(as_array, value_fn(context))

    @final
    def place(self, value: Any) -> Any:
        """Move the arrays of ``value`` to this rank's device; arrays already there are kept.

        Text and objects stay on the host.
        """
        to_gpu = self.device.kind == "gpu"

        def move(leaf: Any) -> Any:
            if is_cupy(leaf) == to_gpu or leaf.dtype.kind in "OSU":
                return leaf
            return cupy_module().asarray(leaf) if to_gpu else leaf.get()

        return map_structure(move, value)

    def _require_cross_replica(self, name: str, instead: str) -> None:
        frame = current_frame()
        if frame is not None and frame.replica_context is not None:
            raise ContextError(f"{name} was called inside run; use {instead} there")


@final
class _Scope:
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entry: AbstractContextManager[None] | None = None

    def __enter__(self) -> Strategy:
        if self._entry is not None:
            raise ContextError("this scope object was entered before: call strategy.scope() again")
        entry = entered(Frame(self._strategy, None))
        entry.__enter__()
        self._entry = entry
        return self._strategy

    def __exit__(self, *error: Any) -> None:
        assert self._entry is not None
        self._entry.__exit__(*error)


@final
class DefaultStrategy(Strategy):
    """The strategy outside every scope: this process alone, one replica."""

    def __init__(self) -> None:
        super().__init__(alone(), Device.cpu())


@functools.cache
def _default() -> tuple[DefaultStrategy, ReplicaContext]:
    strategy = DefaultStrategy()
    return strategy, ReplicaContext(strategy)


def get_strategy() -> Strategy:
    """Return the strategy of the current scope, or the default one. Source: tf.distribute."""
    frame = current_frame()
    return _default()[0] if frame is None else frame.strategy


def has_strategy() -> bool:
    """Tell whether a strategy other than the default one is active. Source: tf.distribute."""
    frame = current_frame()
    return frame is not None and not isinstance(frame.strategy, DefaultStrategy)


def get_replica_context() -> ReplicaContext | None:
    """Return this replica's context inside ``run``, None in a scope outside ``run``.

    Outside every scope it is the default strategy's. Source: tf.distribute.
    """
    frame = current_frame()
    return _default()[1] if frame is None else frame.replica_context


def in_cross_replica_context() -> bool:
    """Tell whether this is inside a scope and outside ``run``. Source: tf.distribute."""
    return get_replica_context() is None


def _axes(axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    axes = tuple(map(operator.index, axis if isinstance(axis, tuple) else (axis,)))
    if ndim == 0 or any(not -ndim <= a < ndim for a in axes):
        raise InvalidArgumentError(
            f"reduce along axis {axis}: expected an array with that axis, got {ndim} dimension(s)"
        )
    return tuple(a % ndim for a in axes)


_AXIS_FOLDS = {ReduceOp.SUM: "sum", ReduceOp.PROD: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}


def _fold_axes(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Reduce one replica's array along ``axes``; an empty part gives the op's identity."""
    row = dtype_of(array, op)
    fold = getattr(array_namespace(array), _AXIS_FOLDS[op])
    if op in (ReduceOp.SUM, ReduceOp.PROD):
        return fold(array, axis=axes, dtype=array.dtype)
    return fold(array, axis=axes, initial=_identity(op, row.numpy))


def _identity(op: ReduceOp, dtype: np.dtype) -> Any:
    lowest = op is ReduceOp.MAX
    if dtype.kind == "b":
        return not lowest
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min if lowest else limits.max
    return dtype.type(-np.inf if lowest else np.inf)
