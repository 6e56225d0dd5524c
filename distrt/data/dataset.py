"""``Dataset``: the input pipelines of tf.data, for NumPy and CuPy arrays (data room, layer 5).

May import: errors, arrays and the other files of this room except distributed.
This file checks arguments and chains nodes; each node's own file does its work.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike, fspath
from typing import Any, final

import numpy as np

from distrt.arrays import flatten, map_structure, to_numpy
from distrt.data.batching import Batch, PaddedBatch, Unbatch, padding_of
from distrt.data.cache import Cache
from distrt.data.combining import Concatenate, Enumerate, Zip
from distrt.data.elements import components, leaf_names, spec_text, widened
from distrt.data.files import FileNames, checked_compression, matches, paths_of
from distrt.data.flattening import FlatMap, Interleave
from distrt.data.generator import Generator, signature_of
from distrt.data.lines import TextLines
from distrt.data.mapping import Filter, Map, Scan, TakeWhile
from distrt.data.movers import Prefetch, Repeat, Shard, Shuffle, Skip, Take
from distrt.data.npz_shards import NpzShards
from distrt.data.options import Options, WithOptions, options_of
from distrt.data.parallel import Workers, checked_count
from distrt.data.pipeline import INFINITE_CARDINALITY, Node, seeds_of
from distrt.data.sources import NpzFile, Range, Tensors, slices_of
from distrt.data.tfrecord import TFRecords
from distrt.errors import DTypeError, InvalidArgumentError

__all__ = ["Dataset", "TFRecordDataset", "TextLineDataset"]

_AUTOTUNE = -1
# Datasets that interleave keeps open unless told: tf.data takes the machine's parallelism.
_CYCLE = 16


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
            copied), SciPy sparse matrices (whose rows become dense when they are read)
            or lists, of equal first dimension. Arrays keep their dtype; Python ints
            become int32 and floats float32.

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
    def from_npz(path: str | PathLike[str] | Sequence[Any]) -> Dataset:
        """Return the rows of the arrays of .npz files (a dict by name) or of .npy files.

        A file is opened when it is first needed: to iterate, to distribute, or
        for the spec. A .npy file is mapped into memory and read row by row.

        Args:
          path: a file, or several: their rows follow each other, and AutoShardPolicy.FILE can
            divide them by file.

        Raises (when opened):
          NotFoundError: there is no such file on this rank.
          InvalidArgumentError: it is damaged, or its first dimensions differ.
        """
        if isinstance(path, str | PathLike):
            return Dataset(NpzFile(path))
        return Dataset(NpzShards(paths_of("from_npz", path)))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """Return what ``generator(*args)`` yields; it is called anew for every pass.

        Every rank runs all of it and takes its part, so it must yield the same on all ranks,
        which is checked.

        Args:
          generator: returns an iterable.
          output_types, output_shapes: structures of dtypes and shapes.
          args: what it is called with.
          output_signature: a structure of ``ArraySpec``, or of anything with a shape and a
            dtype; None for dimensions that vary. Elements that are batches must have a first
            dimension of None. Without it, and without types, a first element is looked at.

        Raises (when iterated):
          InvalidArgumentError: an element has another structure, dtype or shape.
        """
        if not callable(generator):
            raise DTypeError(f"from_generator: expected a function, got {generator!r:.80}")
        function = functools.partial(generator, *(args or ()))
        spec = signature_of(function, output_types, output_shapes, output_signature)
        name = getattr(generator, "__qualname__", type(generator).__qualname__)
        return Dataset(Generator(function, spec, name))

    @staticmethod
    def list_files(
        file_pattern: Any, shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset:
        """Return the paths of the files that match a glob pattern, or any of several, as text.

        Args:
          file_pattern: a pattern, or a list of patterns.
          shuffle: in another order each time (the default), or sorted (False).
          seed: of the shuffle.

        Raises:
          InvalidArgumentError: no file matches.
        """
        files = Dataset(FileNames(matches(file_pattern)))
        if shuffle is False:
            return files
        return files.shuffle(len(files), seed)

    @staticmethod
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Return elements of one element of each dataset, in their structure.

        Ends with the shortest. ``Dataset.zip(a, b)``, ``Dataset.zip((a, {"x": b}))``.

        Raises:
          DTypeError: something else than datasets.
        """
        given = datasets if datasets is not None else args[0] if len(args) == 1 else args
        tree = flatten(given)
        wrong = [leaf for leaf in tree.leaves if not isinstance(leaf, Dataset)]
        if wrong or not tree.leaves:
            raise DTypeError(f"zip: expected a structure of datasets, got {given!r:.80}")
        return Dataset(Zip(tuple(leaf._node for leaf in tree.leaves), tree._replace(leaves=[])))

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

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        processes: bool = False,
    ) -> Dataset:
        """Return ``map_func`` of every element.

        A tuple is unpacked into arguments; a dict is one argument; byte strings arrive as
        ``bytes``. The function may return any structure of arrays and numbers. It must depend
        on its element only: a rank calls it for its own rows; ``scan`` carries a state. It is
        also called on one or two examples where ``element_spec`` is asked for, as TensorFlow
        traces it.

        Args:
          map_func: the function.
          num_parallel_calls: rows of a batch that are mapped at once; -1 (AUTOTUNE): one for each
            core of this rank. None: one after the other.
          deterministic: accepted; the order is always that of the elements.
          processes: map in processes instead of threads, for functions that spend their time
            in Python. They are started anew (never forked), get the function by cloudpickle
            and never start MPI.

        Raises:
          DTypeError: ``map_func`` cannot be called.
        """
        self._callable("map", map_func)
        count = checked_count("map: num_parallel_calls", num_parallel_calls)
        if count is None and processes:
            count = 1
        workers = None if count is None else Workers(count, processes)
        return self._then(Map(self._node, map_func, workers))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the elements for which ``predicate`` is true; it gets what a map function gets.

        Every rank makes all elements below it, to know which there are.

        Raises:
          DTypeError: it cannot be called.
          InvalidArgumentError (when iterated): it returns something else than a bool.
        """
        return self._then(Filter(self._node, self._callable("filter", predicate)))

    def take_while(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the elements before the first for which ``predicate`` is false; see ``filter``."""
        return self._then(TakeWhile(self._node, self._callable("take_while", predicate)))

    def scan(self, initial_state: Any, scan_func: Callable[[Any, Any], Any]) -> Dataset:
        """Return outputs of ``scan_func(state, element) -> (state, output)``, in order.

        The state goes from element to element, so every rank makes all elements below it.

        Raises:
          DTypeError, InvalidArgumentError (when iterated): it returns something else, or a state
            of another structure, shape or dtype.
        """
        function = self._callable("scan", scan_func)
        return self._then(Scan(self._node, components(initial_state), function))

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Return the elements of the datasets that ``map_func`` makes of the elements, in order.

        Raises (when iterated):
          DTypeError: it returns no dataset.
          InvalidArgumentError: the datasets' elements differ in structure, rank or dtype.
        """
        function = self._to_node("flat_map", map_func)
        return self._then(FlatMap(self._node, function, secrets.randbits(63)))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return the elements of the datasets that ``map_func`` makes, several of them in turns.

        Args:
          map_func: makes a dataset of an element.
          cycle_length: how many are open at a time; None or -1 (AUTOTUNE): 16, on every
            machine, so that the order is the same everywhere.
          block_length: elements of one before the next one's turn.
          num_parallel_calls, deterministic: accepted; the order never depends on timing.

        Raises:
          InvalidArgumentError: ``cycle_length`` or ``block_length`` is below 1; see ``flat_map``.
        """
        checked_count("interleave: num_parallel_calls", num_parallel_calls)
        cycle = _CYCLE if cycle_length in (None, _AUTOTUNE) else cycle_length
        cycle = _integer("interleave: cycle_length", cycle, at_least=1)
        block = _integer("interleave: block_length", block_length, at_least=1)
        function = self._to_node("interleave", map_func)
        return self._then(Interleave(self._node, function, secrets.randbits(63), cycle, block))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return all elements of this dataset, then those of ``dataset``.

        Raises:
          DTypeError: it is no dataset, or its elements differ in structure, rank or dtype.
        """
        if not isinstance(dataset, Dataset):
            raise DTypeError(f"concatenate: expected a Dataset, got {dataset!r:.80}")
        mine, other = self.element_spec, dataset.element_spec
        try:
            widened(mine, other)
        except ValueError:
            raise DTypeError(
                "concatenate: expected elements of one structure, rank and dtype: "
                f"{spec_text(mine)}; got {spec_text(other)}"
            ) from None
        return self._then(Concatenate((self._node, dataset._node)))

    def enumerate(self, start: int = 0) -> Dataset:
        """Return ``(position, element)``; positions are int64 and count from ``start``."""
        return self._then(Enumerate(self._node, _integer("enumerate: start", start)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return elements ``index``, ``index + num_shards``, and so on.

        Raises:
          InvalidArgumentError: ``num_shards`` is below 1, or ``index`` is not below it.
        """
        shards = _integer("shard: num_shards", num_shards, at_least=1)
        number = _integer("shard: index", index, at_least=0)
        if number >= shards:
            raise InvalidArgumentError(f"shard: index: expected 0 to {shards - 1}, got {number}")
        return self._then(Shard(self._node, shards, number))

    def cache(self, filename: str | PathLike[str] = "") -> Dataset:
        """Return the same elements, each made at most once.

        The order below the cache is frozen: a shuffle there gives the same order in every
        pass. Under a strategy each rank keeps what it made, its own rows.

        Args:
          filename: keep them in files of this name (one for each rank, whose number is
            appended) for later runs on as many ranks; "" keeps them in memory.

        Raises:
          InvalidArgumentError: ``filename`` over a shuffle without a seed, whose order the next
            run would not know; when iterated: the file is of another dataset.
        """
        name = fspath(filename)
        if name and seeds_of(self._node):
            raise InvalidArgumentError(
                "cache: a file cannot keep the order of a shuffle that nobody gave a seed: give "
                "seed=..., or shuffle after the cache"
            )
        return self._then(Cache(self._node, name))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return batches of ``batch_size`` consecutive elements, along a new first dimension.

        Under a strategy this is the global batch, of all ranks together. The last
        one is shorter where the elements run out, or left out with ``drop_remainder``.
        ``num_parallel_calls`` and ``deterministic`` are accepted and change nothing.

        Raises:
          InvalidArgumentError: ``batch_size`` is below 1.
        """
        size = _integer("batch: batch_size", batch_size, at_least=1)
        checked_count("batch: num_parallel_calls", num_parallel_calls)
        return self._then(Batch(self._node, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Return batches of elements of different shapes, padded at their ends.

        With fixed ``padded_shapes`` a rank makes its own rows only; else the longest of the
        whole batch decides, and every rank makes all.

        Args:
          batch_size, drop_remainder: see ``batch``.
          padded_shapes: structured as an element: the shape that each component is padded to;
            None (or -1) in it, or instead of it: as the longest of the batch.
          padding_values: structured as an element, or one number for all; None: zeros, "" or b"".

        Raises:
          InvalidArgumentError: ``batch_size`` is below 1, shapes or values are structured
            otherwise; when iterated: an element does not fit.
        """
        size = _integer("padded_batch: batch_size", batch_size, at_least=1)
        shapes, values = padding_of(self.element_spec, padded_shapes, padding_values)
        return self._then(PaddedBatch(self._node, size, bool(drop_remainder), shapes, values))

    def unbatch(self) -> Dataset:
        """Return the rows of every element, along its first dimension.

        Raises:
          InvalidArgumentError: a component is a scalar; when iterated: first dimensions differ.
        """
        spec = self.element_spec
        named = zip(leaf_names(spec), flatten(spec).leaves, strict=True)
        scalars = [name for name, leaf in named if not leaf.shape]
        if scalars:
            raise InvalidArgumentError(
                f"unbatch: expected components with a first dimension, the rows; scalars: "
                f"{', '.join(scalars)}"
            )
        return self._then(Unbatch(self._node))

    def rebatch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Return batches of another size: ``unbatch().batch(batch_size, drop_remainder)``."""
        return self.unbatch().batch(batch_size, drop_remainder)

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

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return the last state of ``state = reduce_func(state, element)`` over one pass. Local."""
        state = components(initial_state)
        for element in self:
            state = components(reduce_func(state, element))
        return state

    def _then(self, node: Node) -> Dataset:
        return Dataset(node, self._passes)

    @staticmethod
    def _callable(what: str, function: Any) -> Any:
        if not callable(function):
            raise DTypeError(f"{what}: expected a function, got {function!r}")
        return function

    def _to_node(self, what: str, function: Any) -> Callable[..., Node]:
        self._callable(what, function)

        @functools.wraps(function)
        def node_of(*arguments: Any) -> Node:
            made = function(*arguments)
            if not isinstance(made, Dataset):
                raise DTypeError(f"{what}: expected the function to return a Dataset, got {made!r}")
            return made._node

        return node_of


def TextLineDataset(  # noqa: N802  a class of tf.data's
    filenames: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
) -> Dataset:
    """Return the lines of text files as byte strings, without line ends.

    A rank reads the files to find the lines, and makes its own only. Source:
    ``tf.data.TextLineDataset``.

    Args:
      filenames: a path, or several.
      compression_type: None, "", "GZIP" or "ZLIB".
      buffer_size: bytes read at a time.
      num_parallel_reads: accepted; files are read one after the other.

    Raises:
      InvalidArgumentError, DTypeError: an argument cannot be taken.
      NotFoundError, DataLossError (when iterated): a file is missing, or damaged.
    """
    kind = checked_compression("TextLineDataset", compression_type)
    size = 1 << 20 if buffer_size is None else buffer_size
    size = _integer("TextLineDataset: buffer_size", size, at_least=1)
    checked_count("TextLineDataset: num_parallel_reads", num_parallel_reads)
    return Dataset(TextLines(paths_of("TextLineDataset", filenames), kind, scan_bytes=size))


def TFRecordDataset(  # noqa: N802  a class of tf.data's
    filenames: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
) -> Dataset:
    """Return the records of TFRecord files as byte strings, checksums checked.

    Source: ``tf.data.TFRecordDataset``.

    Args:
      filenames: a path, or several.
      compression_type: None, "", "GZIP" or "ZLIB".
      buffer_size, num_parallel_reads: accepted; only a rank's own records are read.

    Raises:
      InvalidArgumentError, DTypeError: an argument cannot be taken.
      NotFoundError (when iterated): a file is missing.
      DataLossError (when iterated): a record is damaged or cut short; names file and offset.
    """
    kind = checked_compression("TFRecordDataset", compression_type)
    if buffer_size is not None:
        _integer("TFRecordDataset: buffer_size", buffer_size, at_least=0)
    checked_count("TFRecordDataset: num_parallel_reads", num_parallel_reads)
    return Dataset(TFRecords(paths_of("TFRecordDataset", filenames), kind))


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
