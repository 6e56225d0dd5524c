"""Options of a dataset, and of how it is distributed (data room, layer 5).

May import: errors, pipeline. Names and defaults are those of ``tf.data.Options`` and
``tf.distribute.InputOptions``.
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from distrt.data.pipeline import Epoch, Mover, Node, nodes_of

__all__ = [
    "AutoShardPolicy",
    "DistributeOptions",
    "InputOptions",
    "InputReplicationMode",
    "Options",
    "WithOptions",
    "experimental",
    "options_of",
]


@final
class AutoShardPolicy(enum.IntEnum):
    """How MultiWorkerMirroredStrategy divides a dataset over the workers.

    OFF: every worker reads all of it, a per-replica batch at a time. AUTO: FILE where the
    dataset comes from at least as many files as there are workers, else DATA. FILE: worker w
    has files w, w + workers, … DATA: worker w has the w-th part of each global batch. HINT: as
    OFF. Source: ``tf.data.experimental.AutoShardPolicy``.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@final
class experimental:  # noqa: N801  a namespace of tf.data's
    """What tf.data keeps under ``tf.data.experimental``."""

    AutoShardPolicy = AutoShardPolicy


@final
@dataclass
class DistributeOptions:
    """How a dataset is distributed. Source: ``tf.data.experimental.DistributeOptions``.

    Attributes:
      auto_shard_policy: see ``AutoShardPolicy``; AUTO unless set.
    """

    auto_shard_policy: AutoShardPolicy | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {f.name for f in dataclasses.fields(self)}:
            raise AttributeError(f"DistributeOptions has no option {name!r}")
        object.__setattr__(self, name, None if value is None else AutoShardPolicy(value))


@final
@dataclass
class Options:
    """Options of a dataset, for ``Dataset.with_options``. Source: ``tf.data.Options``.

    Attributes:
      experimental_distribute: how it is distributed.
      deterministic: accepted; the order of elements never depends on timing here.
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)
    deterministic: bool | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {f.name for f in dataclasses.fields(self)}:
            raise AttributeError(
                f"Options has no option {name!r}: distrt knows "
                "experimental_distribute.auto_shard_policy and deterministic"
            )
        object.__setattr__(self, name, value)

    def merge(self, other: Options) -> Options:
        """Return these options with those that ``other`` sets in their place."""
        policy = other.experimental_distribute.auto_shard_policy
        if policy is None:
            policy = self.experimental_distribute.auto_shard_policy
        deterministic = self.deterministic if other.deterministic is None else other.deterministic
        return Options(DistributeOptions(policy), deterministic)


@final
@dataclass(frozen=True, eq=False)
class WithOptions(Mover):
    """The same elements, with ``options`` set for the pipeline that ends here."""

    upstream: Node
    options: Options

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        return self.upstream.handles(epoch)

    def handles_from(self, epoch: Epoch, start: int) -> Iterator[Any]:
        return self.upstream.handles_from(epoch, start)

    def blocks(self, epoch: Epoch, start: int, size: int) -> Iterator[Sequence[Any]]:
        return self.upstream.blocks(epoch, start, size)

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        policy = self.options.experimental_distribute.auto_shard_policy
        return self.upstream.describe() + ("" if policy is None else f".{policy.name}")


def options_of(node: Node) -> Options:
    """Return the options of a pipeline; what is set later counts."""
    merged = Options()
    for old in nodes_of(node):
        if isinstance(old, WithOptions):
            merged = merged.merge(old.options)
    return merged


@final
class InputReplicationMode(enum.Enum):
    """How often a dataset function is called. Source: ``tf.distribute.InputReplicationMode``."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset hands its parts over. Source: ``tf.distribute.InputOptions``.

    Attributes:
      experimental_fetch_to_device: move the parts to this rank's device; False leaves them on
        the host.
      experimental_replication_mode: PER_WORKER: a dataset function is called for each worker
        (MirroredStrategy is one worker). PER_REPLICA: for each replica.
      experimental_place_dataset_on_device: accepted; a part is made on the host and moved.
      experimental_per_replica_buffer_size: parts made ahead in a background thread where the
        dataset itself prefetches, or must be asked about (see ``DistributedDataset``).
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
