"""Datasets of other libraries, sequences and iterables (data room, layer 5).

May import: errors, arrays, elements, pipeline, batching, dataset. Their objects are recognised
through sys.modules: nothing is imported. What can be read row by row is (a torch Dataset, a
DataLoader over one, a sequence), so a rank reads its own rows. All else is a stream: every rank
reads all of it, and the ranks compare digests, because nothing proves that they read the same.
"""

# The methods that Node declares are documented there, once.

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import ml_dtypes
import numpy as np

from distrt.arrays import is_array, map_structure
from distrt.data.batching import Batching
from distrt.data.dataset import Dataset
from distrt.data.elements import ArraySpec, components, spec_of, widened
from distrt.data.pipeline import Epoch, Node, Stream
from distrt.errors import DTypeError, InvalidArgumentError

__all__ = ["as_dataset"]

# torch's samplers whose order is that of a generator, or none.
_SAMPLERS = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")


def as_dataset(value: Any) -> Dataset:
    """Return anything that strategies take for a dataset as a ``Dataset``. Local.

    Args:
      value: a ``Dataset`` (returned as it is); a torch Dataset, whose elements are its samples;
        a torch DataLoader or a tf.data.Dataset, whose batches are the global batches; a list, or
        another sequence or iterable, of arrays or structures of them.

    Raises:
      DTypeError: it is none of these; an array, or a structure of arrays, is refused because it
        could be one batch or many rows.
      InvalidArgumentError: a DataLoader that shards by itself, or nothing to learn the
        elements' dtypes from.
    """
    if isinstance(value, Dataset):
        return value
    for module, name, make in _KNOWN:
        kind = _class(module, name)
        if kind is not None and isinstance(value, kind):
            return Dataset(make(value))
    if is_array(value) or isinstance(value, tuple | dict | str | bytes):
        raise DTypeError(
            f"expected a dataset, got {type(value).__name__}: it could be one batch or many rows; "
            "write Dataset.from_tensor_slices(x).batch(global_batch_size), or "
            "Dataset.from_tensors(x)"
        )
    if hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        _refuse_numbers(value)
        return Dataset(Items(value, _components, True))
    if isinstance(value, Iterable) and not getattr(value, "distributed", False):
        return Dataset(Iterated(_passes_of(value), _name(value)))
    raise DTypeError(
        f"expected a distrt.data.Dataset, a torch Dataset or DataLoader, a tf.data.Dataset, or a "
        f"sequence or iterable of arrays, got {type(value).__name__}"
    )


def _class(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _refuse_numbers(value: Any) -> None:
    if len(value) and isinstance(value[0], int | float | bool):
        raise DTypeError(
            "expected a dataset, got a list of numbers: write "
            "Dataset.from_tensor_slices(x).batch(global_batch_size)"
        )


def _name(value: Any) -> str:
    return type(value).__qualname__


# ------------------------------------------------------------------- elements


def _leaf(value: Any) -> Any:
    """Return a tensor of torch or tf as an array of its own."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            halves = tensor.view(sys.modules["torch"].int16).numpy()
            return halves.view(ml_dtypes.bfloat16).copy()
        return tensor.numpy().copy()
    if hasattr(value, "numpy") and not is_array(value):
        return np.array(value.numpy())
    return value


def _components(value: Any) -> Any:
    return components(_own(map_structure(_leaf, value)))


def _samples(value: Any) -> Any:
    """As torch's collate: a list of a sample's components is a tuple of them."""

    def tuples(item: Any) -> Any:
        if isinstance(item, list) and any(not isinstance(x, int | float | bool) for x in item):
            return tuple(tuples(x) for x in item)
        if isinstance(item, dict):
            return {key: tuples(x) for key, x in item.items()}
        return item

    return _components(tuples(value))


def _own(structure: Any) -> Any:
    # The caller may change what it gets; an array that a sequence holds stays as it is.
    return map_structure(lambda leaf: leaf.copy() if is_array(leaf) else leaf, structure)


def _known_by(examples: Callable[[int], Any]) -> Any:
    """Return a spec from two examples, with a first dimension that may vary."""
    spec = spec_of(examples(0))
    try:
        return widened(spec, spec_of(examples(1)))
    except ValueError:
        return spec


# ------------------------------------------------------------------------ nodes


@final
@dataclass(frozen=True, eq=False)
class Items(Node):
    """The items of what has a length and an index; a handle is an index.

    Attributes:
      batches: the items may be batches.
    """

    items: Any
    convert: Callable[[Any], Any]
    batches: bool

    @property
    def batched(self) -> bool:
        return self.batches

    def handles(self, epoch: Epoch) -> Iterator[int]:
        return iter(range(len(self.items)))

    def fetch(self, handle: int) -> Any:
        return self.convert(self.items[int(handle)])

    def example(self, variant: int) -> Any:
        count = len(self.items)
        if not count:
            raise InvalidArgumentError(
                f"{_name(self.items)} is empty, so the dtypes and shapes of its elements are not "
                "known"
            )
        # Of batches the last one is most likely to differ.
        return self.fetch(count - 1 if variant else 0)

    @cached_property
    def element_spec(self) -> Any:
        return _known_by(self.example)

    def cardinality(self) -> int:
        return len(self.items)

    def describe(self) -> str:
        return f"{_name(self.items)}({len(self.items)} items)"


@final
@dataclass(frozen=True, eq=False)
class LoaderBatches(Batching):
    """The batches of a torch DataLoader, of which a rank reads and collates its own rows.

    Attributes:
      upstream: the samples.
      sampler: gives the order of a pass; its generator is seeded by ``seed`` and the epoch.
      collate: the loader's.
      seed, drawn: as in ``Shuffle``.
    """

    upstream: Items
    batch_size: int
    drop_remainder: bool
    sampler: Any
    collate: Callable[[Any], Any]
    seed: int
    drawn: bool

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[Sequence[int]]:
        if hasattr(self.sampler, "generator"):
            seed = np.random.SeedSequence((self.seed % 2**64, *epoch)).generate_state(1, np.uint64)
            generator = sys.modules["torch"].Generator()
            generator.manual_seed(int(seed[0] >> 1))
            self.sampler.generator = generator
        order = list(self.sampler)
        for at in range(start * self.batch_size, len(order), self.batch_size):
            rows = order[at : at + self.batch_size]
            if self.drop_remainder and len(rows) < self.batch_size:
                return
            yield rows

    def fetch(self, handle: Sequence[int]) -> Any:
        if len(handle) == 0:
            return map_structure(lambda leaf: leaf[:0], self.example(0))
        return _samples(self.collate([self.upstream.items[int(row)] for row in handle]))

    def example(self, variant: int) -> Any:
        rows = min(len(self.upstream.items), self.batch_size)
        if variant and not self.drop_remainder:
            rows = rows - 1 or 2
        return self.fetch([0] * rows)

    @cached_property
    def element_spec(self) -> Any:
        return map_structure(
            lambda leaf: ArraySpec((self._rows, *leaf.shape[1:]), leaf.dtype),
            spec_of(self.example(0)),
        )

    def cardinality(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    def describe(self) -> str:
        return (
            f"DataLoader({self.upstream.describe()}, {self.batch_size}, "
            f"{_name(self.sampler)}, {self.drop_remainder})"
        )


@final
@dataclass(frozen=True, eq=False)
class Iterated(Stream):
    """What a foreign iterable gives, pass by pass.

    Attributes:
      passes: returns an iterator for a new pass.
      name: of what is iterated.
      spec: of its elements, where it is known; else that of the first element.
      count: its cardinality.
      convert: makes an element.
    """

    unproven = True
    batched = True
    passes: Callable[[], Iterator[Any]]
    name: str
    spec: Any = None
    count: int = -2
    convert: Callable[[Any], Any] = _components

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        return map(self.convert, self.passes())

    @cached_property
    def _first(self) -> Any:
        for element in self.passes():
            return self.convert(element)
        raise InvalidArgumentError(
            f"{self.name} gives nothing, so the dtypes and shapes of its elements are not known"
        )

    def example(self, variant: int) -> Any:
        if self.spec is None:
            return self._first
        return map_structure(lambda leaf: _zeros(leaf, 1 + variant), self.spec)

    @cached_property
    def element_spec(self) -> Any:
        if self.spec is not None:
            return self.spec
        # Another batch may be shorter.
        return map_structure(
            lambda leaf: ArraySpec((None, *leaf.shape[1:])[: leaf.ndim], leaf.dtype), self._first
        )

    def cardinality(self) -> int:
        return self.count

    def describe(self) -> str:
        return f"iterable {self.name}"


def _zeros(leaf: ArraySpec, rows: int) -> Any:
    shape = tuple(rows if size is None else size for size in leaf.shape)
    return np.full(shape, b"", object) if leaf.dtype.kind == "O" else np.zeros(shape, leaf.dtype)


def _passes_of(value: Any) -> Callable[[], Iterator[Any]]:
    if iter(value) is not value:
        return lambda: iter(value)
    return _Once(value)


@final
class _Once:
    """An iterator that can be walked once; its first element may be looked at before."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._taken = iterator, False
        self._seen: list[Any] = []

    def __call__(self) -> Iterator[Any]:
        if self._taken:
            raise InvalidArgumentError(
                f"{_name(self._iterator)} can be iterated once and has been: pass something that "
                "can be iterated anew, or Dataset.from_generator(function)"
            )
        yield from list(self._seen)
        for element in self._iterator:
            if self._seen:
                self._taken = True
            else:
                self._seen.append(element)
            yield element
        self._taken = True


def _of_loader(loader: Any) -> Node:
    sampler = loader.sampler
    distributed = _class("torch.utils.data.distributed", "DistributedSampler")
    if distributed is not None and isinstance(sampler, distributed):
        raise InvalidArgumentError(
            "the DataLoader has a DistributedSampler, so each rank would get a part of a part: "
            "leave it out (shuffle=True will do); distrt divides each batch over the ranks"
        )
    known = type(sampler).__name__ in _SAMPLERS
    plain = type(getattr(loader, "batch_sampler", None)).__name__ == "BatchSampler"
    if not (known and plain and hasattr(loader.dataset, "__getitem__")):
        return Iterated(lambda: iter(loader), _name(loader), None, -2, _samples)
    given = getattr(sampler, "generator", None)
    drawn = given is None and type(sampler).__name__ != "SequentialSampler"
    return LoaderBatches(
        Items(loader.dataset, _samples, False),
        loader.batch_size,
        loader.drop_last,
        sampler,
        loader.collate_fn,
        0 if given is None else given.initial_seed(),
        drawn,
    )


def _of_tf(dataset: Any) -> Node:
    def spec(leaf: Any) -> ArraySpec:
        kind = np.dtype(object) if leaf.dtype.name == "string" else leaf.dtype.as_numpy_dtype
        return ArraySpec(tuple(leaf.shape), np.dtype(kind))

    known = map_structure(spec, dataset.element_spec)
    count = int(dataset.cardinality())
    return Iterated(dataset.as_numpy_iterator, "tf.data.Dataset", known, count)


def _of_iterable(dataset: Any) -> Node:
    return Iterated(lambda: iter(dataset), _name(dataset), None, -2, _samples)


def _of_samples(dataset: Any) -> Node:
    return Items(dataset, _samples, False)


# Module, class, and what makes a node of it; an IterableDataset is a torch Dataset too.
_KNOWN: tuple[tuple[str, str, Callable[[Any], Node]], ...] = (
    ("torch.utils.data", "DataLoader", _of_loader),
    ("torch.utils.data", "IterableDataset", _of_iterable),
    ("torch.utils.data", "Dataset", _of_samples),
    ("tensorflow", "data.Dataset", _of_tf),
)
