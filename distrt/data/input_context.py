"""What a dataset function and a value function are told (data room, layer 5).

May import: errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from distrt.errors import InvalidArgumentError

__all__ = ["InputContext", "ValueContext"]


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

    def __str__(self) -> str:
        return (
            f"distrt.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )

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


@final
@dataclass(frozen=True)
class ValueContext:
    """Which replica a value is made for. Source: ``tf.distribute.experimental.ValueContext``.

    Attributes:
      replica_id_in_sync_group: the replica.
      num_replicas_in_sync: of how many.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
