"""Checkpoints: one safetensors file, written by rank 0, read by all (layer 5).

May import: communicator, world, arrays, errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

from distrt.arrays import copy_to, flatten, is_array, to_numpy
from distrt.communicator import Communicator
from distrt.errors import DTypeError, InvalidArgumentError, NotFoundError
from distrt.world import world

__all__ = ["Checkpoint", "Stateful"]

# safetensors writes all of these, but its NumPy reader knows no bfloat16.
_STORED: dict[str, np.dtype] = {
    **{
        f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}")
        for kind in "IU"
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
}


def _load(data: bytes) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(stored["data"], _STORED[stored["dtype"]]).reshape(stored["shape"])
        for name, stored in deserialize(data)
    }


@runtime_checkable
class Stateful(Protocol):
    """An object, such as an optimizer, with a state of named arrays."""

    def state(self) -> dict[str, Any]:
        """Return name -> array."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""


@final
class Checkpoint:
    """Named things that are saved and restored together.

    Args:
      communicator: whose ranks take part; by default all.
      things: variables, arrays, nested structures of those, or stateful objects
        such as optimizers, by name.

    Source: tf.train.Checkpoint (``write`` and ``read``).
    """

    def __init__(self, *, communicator: Communicator | None = None, **things: Any) -> None:
        self._communicator = communicator or world().communicator
        self._things = things

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file. All ranks must call; rank 0 writes.

        The file is complete or absent, never half-written: it is written beside
        its place, synced and renamed.

        Raises:
          DistrtError: on every rank, where rank 0 could not write. complex128 is not
            a dtype of the file format.
        """

        def write() -> None:
            arrays = {key: np.array(to_numpy(a), order="C") for key, a in self._arrays().items()}
            target = Path(path)
            part = target.with_name(f".{target.name}.{os.getpid()}.part")
            try:
                with part.open("wb") as file:
                    file.write(save(arrays))
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)

        self._communicator.together(f"writing checkpoint {os.fspath(path)}", write, ranks=[0])

    def read(self, path: str | os.PathLike[str]) -> None:
        """Restore everything, in place. All ranks must call; rank 0 reads and sends to all.

        Raises:
          NotFoundError: on every rank, where rank 0 does not see the file.
          InvalidArgumentError: on every rank, where names, shapes or dtypes differ.
        """

        def read() -> dict[str, np.ndarray]:
            if not Path(path).is_file():
                raise NotFoundError(f"no checkpoint at {os.fspath(path)}")
            return _load(Path(path).read_bytes())

        what = f"reading checkpoint {os.fspath(path)}"
        stored = self._communicator.together(what, read, ranks=[0])
        stored = self._communicator.broadcast_object(stored)
        # All are asked before any is changed.
        self._communicator.together(what, lambda: self._check(stored))
        self._restore(stored)

    def _arrays(self) -> dict[str, Any]:
        return {
            k: a for name, thing in self._things.items() for k, a in _parts(name, thing).items()
        }

    def _check(self, stored: dict[str, np.ndarray]) -> None:
        own = self._arrays()
        if own.keys() != stored.keys():
            raise InvalidArgumentError(
                f"the checkpoint holds other things: missing {sorted(own.keys() - stored.keys())}, "
                f"unknown {sorted(stored.keys() - own.keys())}. An optimizer must be built before: "
                "optimizer.build(variables)"
            )
        for key, array in own.items():
            theirs = stored[key]
            if array.shape != theirs.shape or np.dtype(array.dtype) != theirs.dtype:
                raise InvalidArgumentError(
                    f"{key}: expected {np.dtype(array.dtype).name}{list(array.shape)}, "
                    f"the checkpoint holds {theirs.dtype.name}{list(theirs.shape)}"
                )

    def _restore(self, stored: dict[str, np.ndarray]) -> None:
        for name, thing in self._things.items():
            parts = _parts(name, thing)
            if isinstance(thing, Stateful):
                thing.load_state({key.removeprefix(f"{name}/"): stored[key] for key in parts})
                continue
            for key, array in parts.items():
                copy_to(array, stored[key])


def _parts(name: str, thing: Any) -> dict[str, Any]:
    """Return the arrays of one thing by the keys under which they are stored."""
    if isinstance(thing, Stateful):
        return {f"{name}/{key}": array for key, array in thing.state().items()}
    tree = flatten(thing)
    keys = ["/".join((name, *map(str, path))) for path in tree.spec.paths()]
    return {key: _place_of(key, leaf) for key, leaf in zip(keys, tree.leaves, strict=True)}


def _place_of(key: str, leaf: Any) -> Any:
    """Return the array that holds ``leaf``, which must be one that can be restored in place."""
    array = getattr(leaf, "value", leaf)
    if not is_array(array) or isinstance(array, np.generic):
        raise DTypeError(
            f"{key}: expected an array or a Variable, got {type(leaf).__name__}; numbers that "
            "should be saved belong into a Variable"
        )
    return array
