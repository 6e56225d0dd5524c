"""Distributed datasets: the ranks agree, then each walks its part (data room, layer 5).

May import: errors, arrays and the other files of this room. The ranks talk
once, when the dataset is distributed; after that equal seeds and equal
pipelines give every rank the same number of steps without a message.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, final

from distrt.arrays import map_structure
from distrt.data.dataset import Dataset, checked_length, elements_of
from distrt.data.elements import spec_text
from distrt.data.pipeline import Node, nodes_of, rewrite
from distrt.data.sharder import Share, check_batched, shard
from distrt.data.transformations import Shuffle
from distrt.errors import DistrtError, DTypeError, InvalidArgumentError, NotFoundError

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "OutOfRangeError",
    "Ranks",
]


class OutOfRangeError(DistrtError, IndexError):
    """``get_next`` was called at the end of the data. Source: ``tf.errors.OutOfRangeError``."""


class Ranks(Protocol):
    """What the data room needs of a communicator."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's ``obj``, in rank order. Collective."""


@final
class DistributedDataset:
    """A dataset of which every rank walks its own part of each global batch.

    What ``strategy.experimental_distribute_dataset`` returns. A global batch of
    actual length L is cut into chunks of ceil(L / ranks), later ranks may get
    fewer rows or none (dtype and trailing shape stay); every rank takes the
    same number of steps. With one rank the elements pass through unchanged.

    Collective: all ranks make it together, with the same pipeline, and then
    iterate it equally often. Iterating sends no message.

    Args:
      dataset: a ``Dataset`` that ends in ``.batch(global_batch_size)``; moving,
        mapping and prefetching after the batch are allowed.
      ranks: the communicator, anything that is a ``Ranks``.
      place: applied to each array of the part, in the thread that iterates;
        moves it to this rank's device.

    Raises (on every rank, naming rank -> problem):
      NotFoundError: a file of the dataset is missing on some rank.
      DTypeError: ``dataset`` is no ``Dataset``.
      InvalidArgumentError: it is not batched, a map function fails, or the ranks'
        pipelines differ.
    """

    def __init__(
        self, dataset: Dataset, ranks: Ranks, place: Callable[[Any], Any] | None = None
    ) -> None:
        agreed = _agree(dataset, ranks)
        self._node = shard(agreed, Share(ranks.rank, ranks.size))
        self._place = place
        self._passes = itertools.count()

    @property
    def element_spec(self) -> Any:
        """The spec of this rank's part; its first dimension is None where it varies."""
        return self._node.element_spec

    def cardinality(self) -> int:
        """Return the number of steps, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._node.cardinality()

    def __len__(self) -> int:
        return checked_length(self.cardinality())

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._node, next(self._passes), self._place)

    def __repr__(self) -> str:
        return f"<DistributedDataset {self._node.describe()}>"


@final
class DistributedIterator:
    """Walks this rank's parts once; made by ``iter(distributed_dataset)``.

    Local to the rank. Its prefetch thread, if any, ends when it is collected.
    """

    def __init__(self, node: Node, number: int, place: Callable[[Any], Any] | None) -> None:
        self._node = node
        self._place = place
        self._parts = elements_of(node, number)

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        part = next(self._parts)
        return part if self._place is None else map_structure(self._place, part)

    def get_next(self) -> Any:
        """Return the next part.

        Raises:
          OutOfRangeError: there is none; so does every later call.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("the distributed dataset is at its end") from None

    @property
    def element_spec(self) -> Any:
        """The spec of this rank's part, as ``DistributedDataset.element_spec``."""
        return self._node.element_spec


@final
@dataclass(frozen=True)
class InputContext:
    """Which input pipeline of how many this is. Source: ``tf.distribute.InputContext``.

    Attributes:
      num_input_pipelines: pipelines in the job.
      input_pipeline_id: the number of this one.
      num_replicas_in_sync: replicas over all pipelines.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return ``global_batch_size`` divided by the number of replicas.

        Raises:
          InvalidArgumentError: it does not divide evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                f"global batch size {global_batch_size} must be divisible by the "
                f"{self.num_replicas_in_sync} replicas: the nearest that are, are "
                f"{global_batch_size - rest} and "
                f"{global_batch_size - rest + self.num_replicas_in_sync}"
            )
        return size


class _Offer(NamedTuple):
    """What a rank publishes when it distributes: plain text and numbers, so it always travels.

    Attributes:
      problem: the error of this rank, "" where there is none; ``kind`` is its class.
      pipeline, elements, cardinality: must be equal on all ranks.
      seeds: for the shuffles without one, in order; rank 0's are used by all.
    """

    problem: str = ""
    kind: type[DistrtError] = InvalidArgumentError
    pipeline: str = ""
    elements: str = ""
    cardinality: int = 0
    seeds: tuple[int, ...] = ()


def _agree(dataset: Any, ranks: Ranks) -> Node:
    cause: Exception | None = None
    try:
        offer = _inspect(dataset, ranks.size)
    except Exception as error:
        cause = error
        kinds: list[type[DistrtError]] = [NotFoundError, DTypeError]
        kind = next((k for k in kinds if isinstance(error, k)), InvalidArgumentError)
        name = "" if isinstance(error, DistrtError) else f"{type(error).__name__}: "
        offer = _Offer(problem=f"{name}{error}", kind=kind)
    offers: list[_Offer] = ranks.all_gather_object(offer)
    failed = {rank: other for rank, other in enumerate(offers) if other.problem}
    if failed:
        lines = [f"rank {rank}: {other.problem}" for rank, other in failed.items()]
        kind = next(iter(failed.values())).kind
        raise kind("the dataset cannot be distributed\n  " + "\n  ".join(lines)) from cause
    _check_equal(offers)
    return _seeded(dataset._node, offers[0].seeds)


def _inspect(dataset: Any, size: int) -> _Offer:
    if not isinstance(dataset, Dataset):
        raise DTypeError(f"expected a distrt.data.Dataset, got {type(dataset).__name__}")
    node = dataset._node
    check_batched(node, size)
    unseeded = [old for old in nodes_of(node) if isinstance(old, Shuffle) and old.drawn]
    return _Offer(
        pipeline=node.describe(),
        elements=spec_text(node.element_spec),
        cardinality=node.cardinality(),
        seeds=tuple(secrets.randbits(63) for _ in unseeded),
    )


def _check_equal(offers: list[_Offer]) -> None:
    for field in ("pipeline", "elements", "cardinality"):
        found = [getattr(offer, field) for offer in offers]
        if any(value != found[0] for value in found):
            lines = [f"rank {rank}: {value}" for rank, value in enumerate(found)]
            raise InvalidArgumentError(
                f"the ranks distribute different datasets ({field}): every rank must build the "
                "same pipeline\n  " + "\n  ".join(lines)
            )


def _seeded(node: Node, seeds: tuple[int, ...]) -> Node:
    rest: Iterator[int] = iter(seeds)

    def seed(old: Node) -> Node:
        return replace(old, seed=next(rest)) if isinstance(old, Shuffle) and old.drawn else old

    return rewrite(node, seed)
