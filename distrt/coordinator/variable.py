"""``Variable``: an array that is the same on every replica (layer 6).

May import: coordinator.strategy, coordinator.replica_context, communicator, arrays, errors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from distrt.arrays import as_array, copy_to, map_structure, to_numpy
from distrt.communicator import Communicator
from distrt.coordinator.replica_context import current_frame
from distrt.coordinator.strategy import get_strategy
from distrt.errors import ContextError, InvalidArgumentError

__all__ = ["Variable", "VariableAggregation"]


class VariableAggregation(enum.Enum):
    """How the replicas' values become one when a variable is assigned inside ``run``.

    NONE: they do not; each replica writes what it passes, so pass equal values.
    SUM, MEAN: the sum or mean of the replicas' values. ONLY_FIRST_REPLICA: replica 0's.
    Source: tf.VariableAggregation.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


def _default_name(number: int) -> str:
    return f"Variable_{number}" if number else "Variable"


def _inside_run() -> bool:
    frame = current_frame()
    return frame is not None and frame.replica_context is not None


@final
class Variable(NDArrayOperatorsMixin):
    """State of a model: an array on this rank's device.

    Created in a strategy's scope it is collective: all ranks must create it, and
    it starts from rank 0's value on all of them, bit for bit. Outside every scope
    it belongs to this process alone. It can be used in arithmetic like its array.

    Args:
      initial_value: array, number, list, or a function without arguments that gives
        one. Equal shapes and dtypes on all ranks; Python floats become float32.
      trainable: a mark for the program; an optimizer updates what it is given.
      name: for messages and checkpoints; by default "Variable", "Variable_1", ...
      dtype: converts the initial value.
      aggregation: a VariableAggregation, for assignments inside ``run``.

    Raises:
      CollectiveMismatchError: on every rank, where shapes or dtypes differ.

    Source: tf.Variable in a tf.distribute scope.
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        *,
        name: str | None = None,
        dtype: Any = None,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self._strategy = get_strategy()
        self.trainable = trainable
        self.aggregation = aggregation
        self.name = name or _default_name(next(self._strategy.unnamed_variables))
        with self._strategy.communicator.refusing(f"Variable {self.name}"):
            if not isinstance(aggregation, VariableAggregation):
                raise InvalidArgumentError(
                    f"aggregation={aggregation!r}: expected a distrt.VariableAggregation"
                )
            array = as_array(initial_value() if callable(initial_value) else initial_value)
            array = array.astype(array.dtype if dtype is None else np.dtype(dtype))
            if aggregation is VariableAggregation.MEAN and array.dtype.kind in "iub":
                raise InvalidArgumentError(
                    f"{self.name} is {array.dtype.name}, and the mean of its replicas' values is "
                    "not: choose a float dtype, or another aggregation than MEAN"
                )
        if self._strategy.num_replicas_in_sync > 1:
            array = self._strategy.communicator.broadcast(array)
        placed = self._strategy.place(array)
        self._array = placed if placed.flags.c_contiguous else placed.copy(order="C")

    def __repr__(self) -> str:
        return (
            f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype.name}\n{self._array!r}>"
        )

    @property
    def value(self) -> Any:
        """The array itself, not a copy: C-contiguous, on this rank's device."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype of the elements."""
        dtype: np.dtype = np.dtype(self._array.dtype)
        return dtype

    @property
    def strategy(self) -> Any:
        """The strategy in whose scope it was created."""
        return self._strategy

    def numpy(self) -> np.ndarray:
        """Return the value as a NumPy array of its own."""
        return np.array(to_numpy(self._array))

    def read_value(self) -> Any:
        """Return a copy of the value, on this rank's device."""
        return self._array.copy()

    def assign(self, value: Any) -> Variable:
        """Write ``value`` and return the variable.

        Outside ``run`` every rank must pass the same value. Inside ``run`` the
        replicas' values are first combined as ``aggregation`` says, which is
        collective unless it is NONE.

        Raises:
          InvalidArgumentError: the shape is not the variable's.
        """
        return self._update(value, lambda new: new)

    def assign_add(self, delta: Any) -> Variable:
        """Add ``delta`` and return the variable; see ``assign``."""
        return self._update(delta, lambda new: self._array + new)

    def assign_sub(self, delta: Any) -> Variable:
        """Subtract ``delta`` and return the variable; see ``assign``."""
        return self._update(delta, lambda new: self._array - new)

    def _update(self, value: Any, new_value: Callable[[Any], Any]) -> Variable:
        aggregates = _inside_run() and self.aggregation is not VariableAggregation.NONE
        communicator = self._strategy.communicator
        with communicator.refusing(f"assign {self.name}") if aggregates else nullcontext():
            array = as_array(value)
            if tuple(array.shape) != self.shape:
                raise InvalidArgumentError(
                    f"{self.name}: expected a value of shape {self.shape}, got {tuple(array.shape)}"
                )
            array = self._strategy.place(array.astype(self.dtype, copy=False))
        copy_to(self._array, new_value(self._aggregated(array) if aggregates else array))
        return self

    def _aggregated(self, array: Any) -> Any:
        communicator = self._strategy.communicator
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return communicator.broadcast(array)
        return communicator.all_reduce(array, self.aggregation.name)

    def gradient_communicator(self) -> Communicator:
        """Return the communicator over which this variable's gradients must be summed.

        Raises:
          ContextError: its strategy has several replicas and this is not inside ``run``,
            or another strategy is running.
        """
        frame = current_frame()
        if self._strategy.num_replicas_in_sync > 1 and not _inside_run():
            raise ContextError(
                f"gradients of {self.name} must be applied inside strategy.run, where they are "
                f"summed over the {self._strategy.num_replicas_in_sync} replicas"
            )
        if frame is not None and frame.strategy.communicator is not self._strategy.communicator:
            raise ContextError(
                f"{self.name} belongs to {self._strategy!r}, and its gradient was applied under "
                f"{frame.strategy!r}, over whose replicas it would not be summed: create the "
                "variable inside `with strategy.scope():`"
            )
        return self._strategy.communicator

    # ------------------------------------------------------ used like an array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = to_numpy(self._array)
        if dtype is not None and np.dtype(dtype) != array.dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(o, Variable) for o in kwargs.get("out", ())):
            raise InvalidArgumentError("write a variable with assign, assign_add or assign_sub")
        plain = [x.value if isinstance(x, Variable) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_structure(
            lambda x: x.value if isinstance(x, Variable) else x, (args, kwargs)
        )
        return func(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._array[key]

    def __len__(self) -> int:
        return len(self._array)

    def __float__(self) -> float:
        return float(self._array)

    def __int__(self) -> int:
        return int(self._array)

    def __bool__(self) -> bool:
        return bool(self._array)

    # A variable is a place, not a value: it is equal by value and so not hashable by it.
    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Variable:
        raise ContextError(f"{self.name} cannot be copied: create a new Variable in the scope")

    def __deepcopy__(self, memo: Any) -> Variable:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise ContextError(f"{self.name} cannot be pickled: save its numpy() or use a Checkpoint")
