"""distrt: data-parallel training over MPI with tf.distribute's programming model.

Every public name stands here. Importing starts neither MPI nor CUDA; the first
strategy, or ``world()``, does.
"""

from distrt import data, errors, train
from distrt.arrays import array_namespace, to_numpy
from distrt.collectives.indexed_slices import IndexedSlices
from distrt.communicator import Communicator
from distrt.coordinator.communication import CommunicationImplementation, CommunicationOptions
from distrt.coordinator.mirrored import MirroredStrategy
from distrt.coordinator.multi_worker import MultiWorkerMirroredStrategy
from distrt.coordinator.one_device import OneDeviceStrategy
from distrt.coordinator.replica_context import ReplicaContext
from distrt.coordinator.strategy import (
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from distrt.coordinator.variable import Variable, VariableAggregation
from distrt.data import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
)
from distrt.memory import empty, full, zeros
from distrt.progress import Work
from distrt.reduce_op import ReduceOp
from distrt.version import __version__
from distrt.world import World, world

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "Communicator",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "DistributedIterator",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "Work",
    "World",
    "__version__",
    "array_namespace",
    "data",
    "empty",
    "errors",
    "full",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "to_numpy",
    "train",
    "world",
    "zeros",
]
