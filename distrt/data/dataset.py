"""``Dataset``: the input pipelines of tf.data, for NumPy and CuPy arrays (data room, layer 5).

May import: errors, arrays and the other files of this room except distributed.
This file checks arguments and chains nodes; the work is in sources.py and
transformations.py.
"""

from __future__ import annotations

import copy
import itertools
import operator
import secrets
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any, final

import numpy as np

from distrt.arrays import map_structure, to_numpy
from distrt.data.elements import components
from distrt.data.options import Options, WithOptions, options_of
from distrt.data.pipeline import INFINITE_CARDINALITY, Node
from distrt.data.sources import NpzFile, Range, Tensors, slices_of
from distrt.data.transformations import Batch, Map, Prefetch, Repeat, Shuffle, Skip, Take
from distrt.errors import DTypeError, InvalidArgumentError

__all__ = ["Dataset"]

_AUTOTUNE = -1


@final
class Dataset:
    """A lazy sequence of elements that can be iterated many times. Source: ``tf.data.Dataset``.

    An element is a structure (tuples, dicts, named tuples) of arrays. Every
    method returns a new dataset and changes nothing. All calls are local to the
    rank; ``strategy.experimental_distribute_dataset`` makes the ranks agree.

    Args:
      node: the pipeline; use ``from_tensor_slices``, ``range`` and the like instead.
      passes: numbers the iterations, of this dataset and all that share its shuffle.
    """

    def __init__(self, node: Node, passes: Iterator[int] | None = None) -> None:
        self._node = node
        self._passes = itertools.count() if passes is None else passes

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Return the rows of ``tensors``: element i holds row i of every array.

        Args:
          tensors: a structure of arrays (NumPy, memory maps, CuPy; kept, not
            copied) or lists, of equal first dimension. Arrays keep their dtype;
            Python ints become int32 and floats float32.

        Raises:
          InvalidArgumentError: a scalar, or unequal first dimensions.
          DTypeError: a leaf that cannot become an array.
        """
        return Dataset(slices_of(tensors))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Return the dataset of one element, the whole structure ``tensors``.

        Raises:
          DTypeError: a leaf that cannot become an array.
        """
        return Dataset(Tensors(components(tensors)))

    @staticmethod
    def from_npz(path: str | PathLike[str]) -> Dataset:
        """Return the rows of the arrays of a .npz file (a dict by name) or of a .npy file.

        The file is opened when it is first needed: to iterate, to distribute, or
        for the spec. A .npy file is mapped into memory and read row by row.

        Raises (when opened):
          NotFoundError: there is no such file on this rank.
          InvalidArgumentError: it is damaged, or its first dimensions differ.
        """
        return Dataset(NpzFile(path))

    @staticmethod
    def range(*args: int, output_type: Any = np.int64) -> Dataset:
        """Return the numbers of ``range(stop)`` or ``range(start, stop[, step])``, int64 scalars.

        Raises:
          InvalidArgumentError: no argument, more than three, or a step of 0.
        """
        if not 1 <= len(args) <= 3 or args[2:] == (0,):
            raise InvalidArgumentError(
                f"expected (stop) or (start, stop[, step]) with a step other than 0, got {args}"
            )
        numbers = range(*(_integer("range", arg) for arg in args))
        return Dataset(Range(numbers, np.dtype(output_type)))

    def map(self, map_func: Callable[..., Any]) -> Dataset:
        """Return ``map_func`` of every element.

        A tuple is unpacked into arguments; a dict is one argument. The function
        may return any structure of arrays and numbers. It is also called on one
        or two examples where ``element_spec`` is asked for, as TensorFlow traces it.

        Raises:
          DTypeError: ``map_func`` cannot be called.
        """
        if not callable(map_func):
            raise DTypeError(f"map: expected a function, got {map_func!r}")
        return self._then(Map(self._node, map_func))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Return batches of ``batch_size`` consecutive elements, along a new first dimension.

        Under a strategy this is the global batch, of all ranks together. The last
        one is shorter where the elements run out, or left out with ``drop_remainder``.

        Raises:
          InvalidArgumentError: ``batch_size`` is below 1.
        """
        size = _integer("batch: batch_size", batch_size, at_least=1)
        return self._then(Batch(self._node, size, bool(drop_remainder)))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Return the elements in random order: each is picked from the next ``buffer_size``.

        The order depends on the seed and the number of the iteration only. A
        buffer at least as large as the dataset gives a uniform permutation.

        Args:
          buffer_size: elements to pick from.
          seed: repeatable where given; None draws one (under a strategy, rank 0's
            is used by all).
          reshuffle_each_iteration: another order in every iteration and repetition.

        Raises:
          InvalidArgumentError: ``buffer_size`` is below 1.
        """
        size = _integer("shuffle: buffer_size", buffer_size, at_least=1)
        drawn = seed is None
        number = secrets.randbits(63) if seed is None else _integer("shuffle: seed", seed)
        node = Shuffle(self._node, size, number, drawn, bool(reshuffle_each_iteration))
        # A count of its own: datasets made alike give equal orders, whatever was read before.
        return Dataset(node)

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the elements ``count`` times over; for ever where it is None or negative."""
        return self._then(
            Repeat(self._node, -1 if count is None else _integer("repeat: count", count))
        )

    def take(self, count: int) -> Dataset:
        """Return the first ``count`` elements; all where it is negative."""
        return self._then(Take(self._node, _integer("take: count", count)))

    def skip(self, count: int) -> Dataset:
        """Return all elements after the first ``count``; none where it is negative."""
        return self._then(Skip(self._node, _integer("skip: count", count)))

    def prefetch(self, buffer_size: int | None = None) -> Dataset:
        """Return the same elements, ``buffer_size`` of them made ahead in a background thread.

        An error in the thread is raised in the loop, with its traceback. The
        thread ends with the iterator.

        Args:
          buffer_size: elements; None or -1 (tf.data.AUTOTUNE) leaves the choice
            to distrt, 0 makes nothing ahead.

        Raises:
          InvalidArgumentError: ``buffer_size`` is below -1.
        """
        size = _AUTOTUNE if buffer_size is None else buffer_size
        size = _integer("prefetch: buffer_size", size, at_least=_AUTOTUNE)
        if size == 0:
            return self._then(self._node)
        return self._then(Prefetch(self._node, 2 if size == _AUTOTUNE else size))

    def with_options(self, options: Options) -> Dataset:
        """Return the same elements with ``options`` set; what is set later counts.

        Raises:
          DTypeError: ``options`` is no ``Options``.
        """
        if not isinstance(options, Options):
            raise DTypeError(f"with_options: expected distrt.data.Options, got {options!r}")
        return self._then(WithOptions(self._node, copy.deepcopy(options)))

    def options(self) -> Options:
        """Return the options that are set."""
        return options_of(self._node)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return what ``transformation_func`` makes of this dataset.

        Raises:
          DTypeError: it returns no ``Dataset``.
        """
        changed = transformation_func(self)
        if not isinstance(changed, Dataset):
            raise DTypeError(
                f"apply: expected transformation_func to return a Dataset, got {changed!r}"
            )
        return changed

    @property
    def element_spec(self) -> Any:
        """The structure of ``ArraySpec`` of an element; None for dimensions that vary."""
        return self._node.element_spec

    def cardinality(self) -> int:
        """Return the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._node.cardinality()

    def __len__(self) -> int:
        return checked_length(self.cardinality())

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return elements_of(self._node, next(self._passes))

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over the elements with every leaf on the host."""
        return (map_structure(lambda leaf: to_numpy(leaf)[()], element) for element in self)

    def __repr__(self) -> str:
        return f"<Dataset {self._node.describe()}>"

    def _then(self, node: Node) -> Dataset:
        return Dataset(node, self._passes)


def elements_of(node: Node, number: int) -> Iterator[Any]:
    """Yield the elements of the pass ``number`` over ``node``."""
    return (node.fetch(handle) for handle in node.handles((number,)))


def checked_length(cardinality: int) -> int:
    """Return ``cardinality`` for ``len``.

    Raises:
      TypeError: it is infinite or unknown.
    """
    if cardinality < 0:
        kind = "infinite" if cardinality == INFINITE_CARDINALITY else "of unknown length"
        raise TypeError(f"the dataset is {kind} and has no len()")
    return cardinality


def _integer(what: str, value: Any, at_least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise DTypeError(f"{what}: expected an integer, got {value!r}") from None
    if at_least is not None and number < at_least:
        raise InvalidArgumentError(f"{what}: expected {at_least} or more, got {number}")
    return number
