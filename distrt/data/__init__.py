"""The data room: input pipelines and the sharder (layer 5).

May import: errors, reduce_op, arrays, cluster, kernels, transport, collectives,
health, communicator, lookahead. Files, bottom up: elements, pipeline; the nodes (sources, files,
lines, tfrecord, generator; movers, batching, mapping, flattening, combining, cache, with
prefetch, parallel and cache_file beneath them); options, dataset, foreign; sharder, pieces,
autoshard, turns; input_context, agreement, optional, digest, iterator, distributed.
"""

from __future__ import annotations

from distrt.data.dataset import Dataset, TextLineDataset, TFRecordDataset
from distrt.data.distributed import DistributedDataset, DistributedDatasetsFromFunction
from distrt.data.elements import ArraySpec
from distrt.data.foreign import as_dataset
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
from distrt.data.parallel import WorkerError
from distrt.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distrt.data.tfrecord import TFRecordWriter

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
    "TFRecordDataset",
    "TFRecordWriter",
    "TextLineDataset",
    "ValueContext",
    "WorkerError",
    "as_dataset",
    "experimental",
]
