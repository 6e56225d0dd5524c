"""Checkpoints: one safetensors file, written by rank 0, read by all (layer 5).

May import: communicator, world, arrays, errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import optree
from safetensors.numpy import load, save

from distrt.arrays import copy_to, is_array, to_numpy
from distrt.communicator import Communicator
from distrt.errors import InvalidArgumentError, NotFoundError
from distrt.world import world

__all__ = ["Checkpoint", "Stateful"]


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

    def write(self, path: str | os.PathLike[str], **metadata: str) -> None:
        """Write the file. All ranks must call; rank 0 writes.

        The file is complete or absent, never half-written: it is written beside
        its place, synced and renamed.

        Raises:
          DistrtError: on every rank, where rank 0 could not write.
        """

        def write() -> None:
            arrays = {key: np.array(to_numpy(a), order="C") for key, a in self._arrays().items()}
            target = Path(path)
            part = target.with_name(f".{target.name}.{os.getpid()}.part")
            try:
                with part.open("wb") as file:
                    file.write(save(arrays, metadata={str(k): str(v) for k, v in metadata.items()}))
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
            return load(Path(path).read_bytes())

        what = f"reading checkpoint {os.fspath(path)}"
        stored = self._communicator.together(what, read, ranks=[0])
        stored = self._communicator.broadcast_object(stored)
        self._communicator.together(what, lambda: self._restore(stored))

    def _arrays(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, thing in self._things.items():
            if isinstance(thing, Stateful):
                found |= {f"{name}/{key}": a for key, a in thing.state().items()}
                continue
            paths, leaves, _ = optree.tree_flatten_with_path(thing)
            for path, leaf in zip(paths, leaves, strict=True):
                found["/".join((name, *map(str, path)))] = leaf if is_array(leaf) else leaf.value
        return found

    def _restore(self, stored: dict[str, np.ndarray]) -> None:
        own = self._arrays()
        if own.keys() != stored.keys():
            raise InvalidArgumentError(
                f"the checkpoint holds other things: missing {sorted(own.keys() - stored.keys())}, "
                f"unknown {sorted(stored.keys() - own.keys())}"
            )
        for key, array in own.items():
            theirs = stored[key]
            if array.shape != theirs.shape or np.dtype(array.dtype) != theirs.dtype:
                raise InvalidArgumentError(
                    f"{key}: expected {np.dtype(array.dtype).name}{list(array.shape)}, "
                    f"the checkpoint holds {theirs.dtype.name}{list(theirs.shape)}"
                )
        for name, thing in self._things.items():
            prefix = f"{name}/"
            if isinstance(thing, Stateful):
                thing.load_state(
                    {k[len(prefix) :]: a for k, a in stored.items() if k.startswith(prefix)}
                )
        for key, array in own.items():
            if isinstance(array, np.generic):
                continue
            copy_to(array, stored[key])
