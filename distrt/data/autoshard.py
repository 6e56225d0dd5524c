"""AutoShardPolicy: which part of a dataset is a worker's (data room, layer 5).

May import: errors, pipeline, files, options, pieces, sharder. Pure and local, as the
sharder: all ranks come to the same answer. One deliberate difference from TensorFlow:
where there are fewer files than workers it fails on some workers and leaves the others
waiting; here FILE is refused on all of them, and AUTO takes DATA with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from distrt.data.files import FileSource
from distrt.data.options import AutoShardPolicy, options_of
from distrt.data.pieces import Parts, Pieces, batch_size_of
from distrt.data.pipeline import Node, nodes_of, rewrite
from distrt.data.sharder import Share, lifted, shard
from distrt.errors import InvalidArgumentError, NotFoundError

__all__ = ["check_policy", "part_of", "policy_of"]


def policy_of(node: Node, workers: int) -> AutoShardPolicy:
    """Return the policy that a pipeline asks for, with AUTO decided."""
    asked = options_of(node).experimental_distribute.auto_shard_policy
    policy = AutoShardPolicy.AUTO if asked is None else asked
    if policy is not AutoShardPolicy.AUTO:
        return policy
    files = _fewest_files(node)
    return AutoShardPolicy.FILE if files and files >= workers else AutoShardPolicy.DATA


def check_policy(node: Node, workers: int, warn: bool = True) -> None:
    """Refuse a pipeline whose policy cannot be followed by ``workers`` workers.

    Raises:
      NotFoundError: FILE, and the dataset does not come from files.
      InvalidArgumentError: FILE, and there are fewer files than workers.

    Warns:
      UserWarning: AUTO, and there are fewer files than workers.
    """
    if workers == 1:
        return
    asked = options_of(node).experimental_distribute.auto_shard_policy or AutoShardPolicy.AUTO
    files = _fewest_files(node)
    advice = (
        "make more files, or set options.experimental_distribute.auto_shard_policy to "
        "AutoShardPolicy.DATA"
    )
    if asked is AutoShardPolicy.FILE and files is None:
        raise NotFoundError(
            "AutoShardPolicy.FILE: the dataset does not come from files: expected it to begin "
            "with list_files, TextLineDataset, TFRecordDataset or a list of .npz files, got "
            f"{node.describe()}; AutoShardPolicy.DATA divides any dataset"
        )
    if files is None or files >= workers:
        return
    if asked is AutoShardPolicy.FILE:
        raise InvalidArgumentError(
            f"AutoShardPolicy.FILE: expected at least one file for each of the {workers} workers, "
            f"got {files}: {advice}"
        )
    if asked is AutoShardPolicy.AUTO and warn:
        warnings.warn(
            f"the dataset has {files} file(s) for {workers} workers, so it is divided by rows "
            f"(AutoShardPolicy.DATA) and every worker reads all files: {advice}",
            UserWarning,
            stacklevel=2,
        )


def _fewest_files(node: Node) -> int | None:
    counts = [len(old.paths) for old in nodes_of(node) if isinstance(old, FileSource)]
    return min(counts) if counts else None


def part_of(node: Node, share: Share) -> Node:
    """Return the pipeline of worker ``share.rank`` under the policy of ``node``."""
    if share.size == 1:
        return node
    return _PARTS[policy_of(node, share.size)](node, share)


def _all(node: Node, share: Share) -> Node:
    return _walked(node, share, padded=True)


def _own_files(node: Node, share: Share) -> Node:
    def own(old: Node) -> Node:
        if not isinstance(old, FileSource):
            return old
        return old.with_paths(old.paths[share.rank :: share.size])

    return _walked(rewrite(node, own), share, padded=False)


def _walked(node: Node, share: Share, padded: bool) -> Node:
    def walk(lean: Node) -> Node:
        size = batch_size_of(lean)
        return Parts(lean, share.size) if size is None else Pieces(lean, size, share, padded)

    return lifted(node, walk)


_PARTS: dict[AutoShardPolicy, Callable[[Node, Share], Node]] = {
    AutoShardPolicy.OFF: _all,
    AutoShardPolicy.HINT: _all,
    AutoShardPolicy.FILE: _own_files,
    AutoShardPolicy.DATA: shard,
}
