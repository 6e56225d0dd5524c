"""The data room: input pipelines and the sharder (layer 5).

May import: errors, reduce_op, arrays, cluster, kernels, transport, collectives,
health, communicator. Files, bottom up: elements, pipeline, prefetch, files, sources,
transformations, options, dataset; sharder, pieces, autoshard, turns; input_context,
agreement, optional, digest, iterator, distributed.
"""

from __future__ import annotations

from distrt.data.dataset import Dataset
from distrt.data.distributed import DistributedDataset, DistributedDatasetsFromFunction
from distrt.data.elements import ArraySpec
from distrt.data.input_context import InputContext, ValueContext
from distrt.data.iterator import DistributedIterator, OutOfRangeError
from distrt.data.optional import Optional
from distrt.data.options import (
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
    Options,
    experimental,
)
from distrt.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "Options",
    "OutOfRangeError",
    "ValueContext",
    "experimental",
]
