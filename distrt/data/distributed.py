"""Distributed datasets: every rank walks its part (data room, layer 5).

May import: lookahead, errors, arrays and the other files of this room. The ranks agree
when the dataset is distributed (agreement.py). After that, pipelines of which nothing can
go another way on another rank are walked without a message; of all others the ranks
say one step ahead how they stand (lookahead.py).
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from distrt.data.agreement import Ranks, agree
from distrt.data.autoshard import check_policy, part_of, policy_of
from distrt.data.cache import Cache
from distrt.data.dataset import checked_length
from distrt.data.foreign import as_dataset
from distrt.data.input_context import InputContext
from distrt.data.iterator import DistributedIterator
from distrt.data.options import AutoShardPolicy, InputOptions, InputReplicationMode
from distrt.data.pieces import Remainder
from distrt.data.pipeline import Node, nodes_of, rewrite
from distrt.data.sharder import Share, check_batched, shard
from distrt.data.turns import Turns
from distrt.errors import InvalidArgumentError

__all__ = [
    "Distributed",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
]

Place = Callable[[Any], Any]
_FILE = AutoShardPolicy.FILE


class Distributed(abc.ABC):
    """What the distributed datasets have in common.

    Attributes:
      ranks: the ranks that walk it.
      options: how the parts are handed over.
      distributed: tells ``as_dataset`` that this is no dataset any more.
    """

    distributed = True

    @abc.abstractmethod
    def __init__(
        self, whole: Node, ranks: Ranks, place: Place | None, options: InputOptions, uneven: bool
    ) -> None:
        self.ranks, self.options = ranks, options
        self._place = place if options.experimental_fetch_to_device else None
        self._passes = itertools.count()
        self._take(whole)
        asks = uneven or any(not node.settled or node.unproven for node in nodes_of(whole))
        self._channel = ranks.channel() if asks and ranks.size > 1 else None

    def _take(self, whole: Node) -> None:
        """Walk ``whole`` from now on."""
        share = Share(self.ranks.rank, self.ranks.size)
        part = self._part(whole, share)
        self._whole, self._node = whole, rewrite(part, functools.partial(_own_cache, share))

    @abc.abstractmethod
    def _part(self, whole: Node, share: Share) -> Node:
        """Return the pipeline of the rank that ``share`` names."""

    @abc.abstractmethod
    def _rest(self, ranks: int, step: int) -> tuple[Node, int]:
        """Return this rank's part of what ``ranks`` ranks left at ``step``, and where it starts.

        Raises:
          InvalidArgumentError: it cannot be divided anew.
        """

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

    @final
    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self, next(self._passes))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._node.describe()}>"


@final
class DistributedDataset(Distributed):
    """A dataset of which every rank walks its own part of each global batch.

    What ``strategy.experimental_distribute_dataset`` returns. A global batch of
    actual length L is cut into chunks of ceil(L / ranks), later ranks may get
    fewer rows or none (dtype and trailing shape stay); every rank takes the
    same number of steps. With one rank the elements pass through unchanged.

    Collective: all ranks make it together, with the same pipeline, and then
    iterate it equally often. A rank may leave a pass early (``break``); the others then go
    on with what they have. Pipelines of arrays in memory that only batch and move elements are
    iterated without a message. Where a function, a file or a generator may fail or end on one
    rank only, the ranks say one step ahead how they stand: an error of one is raised on
    all, and a rank at its end goes on with empty parts until all have ended.

    Args:
      dataset: a ``Dataset`` that ends in ``.batch(global_batch_size)``; moving,
        mapping and prefetching after the batch are allowed. Or what ``as_dataset`` takes.
      ranks: the communicator, anything that is a ``Ranks``.
      place: applied to each array of the part, in the thread that iterates;
        moves it to this rank's device.
      options: see ``InputOptions``.
      workers: the ranks are workers, whose shards the dataset's AutoShardPolicy decides;
        False: they are the replicas of one worker.

    Raises (on every rank, naming rank -> problem):
      NotFoundError: a file of the dataset is missing on some rank, or the policy is FILE
        and there are none.
      DTypeError: ``dataset`` is no ``Dataset``.
      InvalidArgumentError: it is not batched, a map function fails, the ranks' pipelines or
        files differ, or there are fewer files than workers.
    """

    def __init__(
        self,
        dataset: Any,
        ranks: Ranks,
        place: Place | None = None,
        options: InputOptions | None = None,
        *,
        workers: bool = False,
    ) -> None:
        options = options or InputOptions()
        self._workers = workers

        def make() -> Node:
            if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
                raise InvalidArgumentError(
                    "InputReplicationMode.PER_REPLICA is for datasets made by a function: use "
                    "distribute_datasets_from_function, or PER_WORKER"
                )
            node = _node_of(dataset)
            check_batched(node, ranks.size)
            if workers:
                check_policy(node, ranks.size, warn=ranks.rank == 0)
            return node

        whole = agree(make, ranks)
        uneven = workers and policy_of(whole, ranks.size) is _FILE
        super().__init__(whole, ranks, place, options, uneven)

    def _part(self, whole: Node, share: Share) -> Node:
        return part_of(whole, share) if self._workers else shard(whole, share)

    def _rest(self, ranks: int, step: int) -> tuple[Node, int]:
        policy = policy_of(self._whole, max(ranks, self.ranks.size))
        if not self._workers or policy is AutoShardPolicy.DATA:
            return self._node, step
        if policy is not _FILE:
            raise InvalidArgumentError(
                f"set_state: the state is of {ranks} ranks, these are {self.ranks.size}, and under "
                f"AutoShardPolicy.{policy.name} every rank walks all of the data for itself: "
                "start on as many ranks, or with the next pass"
            )
        own = range(self.ranks.rank, ranks, self.ranks.size)
        former = tuple(self._part(self._whole, Share(rank, ranks)) for rank in own)
        return Remainder(former, step, self._node), 0


@final
class DistributedDatasetsFromFunction(Distributed):
    """The datasets that a function makes, one for each input pipeline.

    What ``strategy.distribute_datasets_from_function`` returns. Of one pipeline for all
    replicas (MirroredStrategy), they take consecutive batches in turns; missing ones are empty,
    but an incomplete last round is dropped where the shapes never vary, as tf.distribute does.
    Of a pipeline for each rank, one at its end goes on with empty batches until all have ended.

    Args:
      function: returns a ``Dataset``, batched by the per-replica batch size.
      ranks, place, options: see ``DistributedDataset``.
      workers: call it for each rank, as for a worker; else once for all, and every rank calls
        it for itself with the same context.

    Raises (on every rank, naming rank -> problem):
      DistrtError: what the function raises, or it returns no dataset, or other ones on the
        ranks of one pipeline, or elements of different specs.
    """

    def __init__(
        self,
        function: Callable[[InputContext], Any],
        ranks: Ranks,
        place: Place | None = None,
        options: InputOptions | None = None,
        *,
        workers: bool = False,
    ) -> None:
        options = options or InputOptions()
        per_replica = InputReplicationMode.PER_REPLICA
        self._own = workers or options.experimental_replication_mode is per_replica
        pipelines, number = (ranks.size, ranks.rank) if self._own else (1, 0)
        context = InputContext(pipelines, number, ranks.size)
        whole = agree(lambda: _node_of(function(context)), ranks, alike=not self._own)
        super().__init__(whole, ranks, place, options, uneven=self._own)

    def _part(self, whole: Node, share: Share) -> Node:
        return whole if self._own or share.size == 1 else Turns(whole, share)

    def _rest(self, ranks: int, step: int) -> tuple[Node, int]:
        if not self._own and step * ranks % self.ranks.size == 0:
            return self._node, step * ranks // self.ranks.size
        raise InvalidArgumentError(
            f"set_state: the state is of {ranks} ranks, these are {self.ranks.size}: datasets from "
            "a function cannot be divided anew; start on as many ranks, or with the next pass"
        )

    def __len__(self) -> int:
        raise TypeError("datasets from a function have no len(), as in tf.distribute")


def _own_cache(share: Share, node: Node) -> Node:
    if not (isinstance(node, Cache) and node.filename):
        return node
    return replace(node, suffix=f"_{share.rank}_of_{share.size}")


def _node_of(dataset: Any) -> Node:
    return as_dataset(dataset)._node
