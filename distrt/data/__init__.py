"""The data room: input pipelines and the sharder (layer 5).

May import: errors, reduce_op, arrays, cluster, kernels, transport, collectives,
health, communicator. Files, bottom up: elements, pipeline, prefetch, sources,
transformations, dataset, sharder, distributed.
"""

from __future__ import annotations

from distrt.data.dataset import Dataset
from distrt.data.distributed import (
    DistributedDataset,
    DistributedIterator,
    InputContext,
    OutOfRangeError,
)
from distrt.data.elements import ArraySpec
from distrt.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "OutOfRangeError",
]
