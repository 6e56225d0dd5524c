"""Optimizers with Keras's numerics (layer 5).

May import: train.bucket, communicator, collectives.compression, kernels, arrays, errors.
The updates are kernels (csrc/include/distrt/update.h). An optimizer knows no strategy: a
variable tells it over which communicator its gradients must be summed.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, final

import numpy as np

from distrt.arrays import as_array, copy_to, dtype_of
from distrt.collectives.compression import Compressor
from distrt.communicator import Communicator
from distrt.errors import DTypeError, InvalidArgumentError
from distrt.kernels import kernels_for
from distrt.train.bucket import DEFAULT_BUCKET_BYTES, Buckets

__all__ = ["SGD", "Adam", "Optimizer", "Trainable"]


_REAL = frozenset({"f16", "bf16", "f32", "f64"})


class Trainable(Protocol):
    """What an optimizer needs of a variable."""

    name: str

    @property
    def value(self) -> Any:
        """The array that is updated in place, C-contiguous."""

    def gradient_communicator(self) -> Communicator:
        """The communicator over which gradients are summed."""


class Optimizer(abc.ABC):
    """Base of the optimizers. Source: tf.keras.optimizers.Optimizer (Keras 3).

    Hyperparameters keep Python's precision, where Keras rounds them to float32.

    Args:
      learning_rate: the learning rate.
      bucket_bytes: gradients are fused into buffers of at most so many bytes; None: what
        the strategy's communication options say, else 25 MiB.
      compression: "bfloat16" or "float16": float32 gradients are sent so, for slow
        networks. What is rounded away in one step is added in the next; a checkpoint does
        not hold it, so a resumed run differs from an uninterrupted one by a rounding.

    Attributes:
      learning_rate: may be changed between steps.
      iterations: steps taken.
    """

    slot_names: tuple[str, ...]

    def __init__(
        self,
        learning_rate: float,
        *,
        bucket_bytes: int | None = None,
        compression: str | None = None,
    ) -> None:
        self.learning_rate, self.iterations = float(learning_rate), 0
        self._bucket_bytes = bucket_bytes
        self._compressor = None if compression is None else Compressor(compression)
        self._slots: dict[str, dict[str, Any]] = {}
        self._owners: dict[str, Trainable] = {}
        self._buckets: dict[tuple[str, ...], Buckets] = {}

    @final
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Trainable]]) -> None:
        """Update the variables. Inside ``strategy.run`` all ranks must call.

        The gradients are first *summed* over the replicas, fused into buckets, as
        tf.distribute does: scale the loss by the global batch size, not the local
        one. A variable whose gradient is None is left alone, and must have none on
        any rank.

        Args:
          grads_and_vars: pairs, usually ``zip(grads, variables)``; each gradient has
            the shape of its variable.

        Raises:
          InvalidArgumentError: a gradient has another shape than its variable, two
            variables share a name, the variables are of several strategies, or there
            is no gradient at all.
          DTypeError: a variable or a gradient is not of a float dtype.
          CollectiveMismatchError: on every rank, where ranks pass gradients of
            different variables, shapes or dtypes.
          ContextError: variables of several replicas, outside ``run``.
        """
        given = list(grads_and_vars)
        communicators = {v.gradient_communicator() for _, v in given}
        if len(communicators) != 1:
            raise InvalidArgumentError(
                "apply_gradients: expected (gradient, variable) pairs of one strategy's variables, "
                f"got {len(given)} pair(s) and variables of {len(communicators)} strategies"
            )
        (communicator,) = communicators
        with communicator.refusing("apply_gradients"):
            buckets, variables = self._filled(given, communicator)
        buckets.all_reduce(communicator)
        self.iterations += 1
        for variable, gradient in zip(variables, buckets.views, strict=True):
            self._update(variable.value.reshape(-1), gradient, self._slots[variable.name])

    def _filled(
        self, given: Sequence[tuple[Any, Trainable]], communicator: Communicator
    ) -> tuple[Buckets, Sequence[Trainable]]:
        """Check the gradients and copy them into the buckets of their variables."""
        pairs = [(g, v) for g, v in given if g is not None]
        if not pairs:
            raise InvalidArgumentError("apply_gradients: no gradient for any variable")
        variables = [v for _, v in pairs]
        self.build(variables)
        gradients = [self._checked(g, v) for g, v in pairs]
        names = tuple(v.name for v in variables)
        buckets = self._buckets.get(names)
        if buckets is None:
            arrays = [v.value for v in variables]
            packed = communicator.settings.bytes_per_pack or DEFAULT_BUCKET_BYTES
            size = packed if self._bucket_bytes is None else self._bucket_bytes
            buckets = self._buckets[names] = Buckets(
                arrays, names, size, communicator, self._compressor
            )
        buckets.fill(gradients)
        return buckets, variables

    @staticmethod
    def _checked(gradient: Any, variable: Trainable) -> Any:
        array = as_array(gradient)
        if array.shape != variable.value.shape:
            raise InvalidArgumentError(
                f"gradient of {variable.name}: expected shape {variable.value.shape}, "
                f"got {array.shape}"
            )
        if dtype_of(array).name not in _REAL:
            raise DTypeError(
                f"gradient of {variable.name}: expected a float dtype, got {array.dtype.name}"
            )
        return array

    @final
    def build(self, variables: Sequence[Trainable]) -> None:
        """Make the slots (momenta) of ``variables``, zero; those that have some keep them."""
        for variable in variables:
            if dtype_of(variable.value).name not in _REAL:
                raise DTypeError(
                    f"{variable.name} is {variable.value.dtype.name}: optimizers update float "
                    "variables only"
                )
            owner = self._owners.setdefault(variable.name, variable)
            if owner is not variable:
                raise InvalidArgumentError(
                    f"two variables are called {variable.name!r}: give each its own name"
                )
            if variable.name not in self._slots:
                flat = variable.value.reshape(-1)
                self._slots[variable.name] = {slot: _zeros_like(flat) for slot in self.slot_names}

    @final
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: name -> array."""
        slots = {
            f"{name}/{slot}": array
            for name, by_slot in self._slots.items()
            for slot, array in by_slot.items()
        }
        return {"iterations": np.int64(self.iterations), **slots}

    @final
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned; the variables must have been built."""
        own = self.state()
        if own.keys() != state.keys():
            raise InvalidArgumentError(
                f"optimizer state: expected {sorted(own)}, got {sorted(state)}; "
                "build() the optimizer with the same variables first"
            )
        self.iterations = int(state["iterations"])
        for key, array in own.items():
            if key != "iterations":
                copy_to(array, state[key])

    @abc.abstractmethod
    def _update(self, param: Any, gradient: Any, slots: dict[str, Any]) -> None:
        """Update flat ``param`` in place with the summed flat ``gradient``."""


def _zeros_like(flat: Any) -> Any:
    zeros = kernels_for(flat).empty(flat.size, flat.dtype)
    zeros[...] = 0
    return zeros


@final
class SGD(Optimizer):
    """Gradient descent, with momentum and Nesterov's look-ahead. Source: keras.optimizers.SGD.

    Args:
      learning_rate: step size.
      momentum: 0 for none.
      nesterov: apply the momentum of the next step.
      bucket_bytes, compression: see ``Optimizer``.
    """

    def __init__(
        self,
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        bucket_bytes: int | None = None,
        compression: str | None = None,
    ) -> None:
        if not 0.0 <= momentum <= 1.0:
            raise InvalidArgumentError(f"momentum={momentum!r}: expected a number from 0 to 1")
        super().__init__(learning_rate, bucket_bytes=bucket_bytes, compression=compression)
        self.momentum, self.nesterov = float(momentum), bool(nesterov)
        self.slot_names = ("momentum",) if momentum else ()

    def _update(self, param: Any, gradient: Any, slots: dict[str, Any]) -> None:
        kernels_for(param).sgd(
            param,
            gradient,
            slots.get("momentum"),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
        )


@final
class Adam(Optimizer):
    """Adam. Source: Kingma and Ba, 2014; keras.optimizers.Adam.

    Args:
      learning_rate: step size.
      beta_1, beta_2: decay of the first and second moment.
      epsilon: added to the root of the second moment (Keras's "epsilon hat").
      bucket_bytes, compression: see ``Optimizer``.
    """

    slot_names = ("momentum", "velocity")

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        bucket_bytes: int | None = None,
        compression: str | None = None,
    ) -> None:
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0.0 <= beta < 1.0:
                raise InvalidArgumentError(f"{name}={beta!r}: expected a number from 0 to below 1")
        super().__init__(learning_rate, bucket_bytes=bucket_bytes, compression=compression)
        self.beta_1, self.beta_2, self.epsilon = float(beta_1), float(beta_2), float(epsilon)

    def _update(self, param: Any, gradient: Any, slots: dict[str, Any]) -> None:
        # Keras raises float32-rounded betas to the power of the step, and nothing
        # else in the update is rounded so; following it keeps the trajectories equal.
        power_1, power_2 = (
            float(np.float32(beta)) ** self.iterations for beta in (self.beta_1, self.beta_2)
        )
        correction = math.sqrt(1.0 - power_2) / (1.0 - power_1)
        kernels_for(param).adam(
            param,
            gradient,
            slots["momentum"],
            slots["velocity"],
            alpha=self.learning_rate * correction,
            beta1=self.beta_1,
            beta2=self.beta_2,
            epsilon=self.epsilon,
        )
