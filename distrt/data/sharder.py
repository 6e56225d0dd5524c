"""The sharder: a pipeline rewritten to give one rank its part (data room, layer 5).

May import: errors, arrays, elements, pipeline, batching, movers. Pure
and local: no communication. The rule is MirroredStrategy's (and that of
MultiWorkerMirroredStrategy under AutoShardPolicy.DATA): a global batch of
actual length L is cut into chunks of ceil(L / size), rank r has the r-th.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from distrt.arrays import flatten, map_structure
from distrt.data.batching import Batching
from distrt.data.elements import ArraySpec, leaf_names
from distrt.data.movers import Prefetch
from distrt.data.pipeline import Epoch, Node, nodes_of, rewrite, upstreams, with_upstreams
from distrt.errors import InvalidArgumentError

__all__ = ["Share", "check_batched", "lifted", "shard"]


class Share(NamedTuple):
    """Rank ``rank``'s part of each global batch among ``size`` ranks."""

    rank: int
    size: int

    def of(self, length: int) -> slice:
        """Return the rows of this rank in a batch of ``length`` rows; later ranks may have none."""
        chunk = -(-length // self.size)
        return slice(min(self.rank * chunk, length), min((self.rank + 1) * chunk, length))

    def of_spec(self, spec: Any) -> Any:
        """Return the spec of the part: static where the batch divides evenly, as recorded."""

        def cut(leaf: ArraySpec) -> ArraySpec:
            first, *rest = leaf.shape
            even = first is not None and first % self.size == 0
            return ArraySpec((first // self.size if first and even else None, *rest), leaf.dtype)

        return map_structure(cut, spec)

    def of_element(self, element: Any) -> Any:
        """Return the part of ``element``: each component is cut by its own first dimension.

        Raises:
          InvalidArgumentError: a component is a scalar.
        """

        def cut(leaf: Any) -> Any:
            if leaf.ndim == 0:
                raise InvalidArgumentError(
                    f"a component of the batch is a scalar ({leaf!r}) and cannot be split over "
                    f"{self.size} ranks"
                )
            return leaf[self.of(leaf.shape[0])]

        return map_structure(cut, element)


class _Part(Node):
    """This rank's part of every element of ``upstream``."""

    settled = True
    upstream: Node
    share: Share

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        return self.upstream.handles(epoch)

    def example(self, variant: int) -> Any:
        return self.share.of_element(self.upstream.example(variant))

    @property
    def element_spec(self) -> Any:
        return self.share.of_spec(self.upstream.element_spec)

    def cardinality(self) -> int:
        return self.upstream.cardinality()

    def describe(self) -> str:
        return f"{self.upstream.describe()}.part({self.share.rank} of {self.share.size})"


@final
@dataclass(frozen=True, eq=False)
class OwnRows(_Part):
    """The part of a batch, of which only this rank's rows are ever made."""

    upstream: Batching
    share: Share

    def fetch(self, handle: list[Any]) -> Any:
        return self.upstream.fetch(handle[self.share.of(len(handle))])


@final
@dataclass(frozen=True, eq=False)
class Cut(_Part):
    """The part of an element that is made whole: a map after the batch must see all of it."""

    upstream: Node
    share: Share

    def fetch(self, handle: Any) -> Any:
        return self.share.of_element(self.upstream.fetch(handle))


def shard(node: Node, share: Share) -> Node:
    """Return ``node`` with every element replaced by the part of ``share``.

    One replica keeps the elements as they are, whatever their shape.
    """
    if share.size == 1:
        return node
    own = _pushed_down(node, share)
    if own is None:
        return Cut(node, share)
    lifted = _prefetches(own) < _prefetches(node) and not isinstance(own, Prefetch)
    return Prefetch(own, buffer_size=2) if lifted else own


def _pushed_down(node: Node, share: Share) -> Node | None:
    if isinstance(node, Batching):
        if not node.own_rows:
            return None
        # A prefetch below the batch would make the rows of all ranks: it is lifted to the end.
        lean = rewrite(node, lambda old: old.upstream if isinstance(old, Prefetch) else old)
        assert isinstance(lean, Batching)
        return OwnRows(lean, share)
    # Whole elements may be moved about above the cut, but not looked into.
    if not node.splits:
        return None
    changed: dict[str, tuple[Node, ...]] = {}
    for name, nodes in upstreams(node).items():
        parts = [_pushed_down(upstream, share) for upstream in nodes]
        own = tuple(part for part in parts if part is not None)
        if len(own) < len(parts):
            return None
        changed[name] = own
    return with_upstreams(node, changed)


def _prefetches(node: Node) -> int:
    return sum(isinstance(old, Prefetch) for old in nodes_of(node))


def lifted(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return ``change`` of ``node`` without its prefetches, and one at the end if there were any.

    Prefetches further up would make what this rank does not need.
    """
    lean = rewrite(node, lambda old: old.upstream if isinstance(old, Prefetch) else old)
    changed = change(lean)
    return Prefetch(changed, buffer_size=2) if _prefetches(node) else changed


def check_batched(node: Node, size: int) -> None:
    """Refuse a pipeline whose elements are no batches and so cannot be split over ``size`` ranks.

    TensorFlow raises a bare IndexError for scalars and cuts unbatched vectors
    along their own axis; both are refused here, on purpose.

    Raises:
      InvalidArgumentError: there is no batch, or a component is a scalar.
    """
    if size == 1:
        return
    advice = "end the dataset with .batch(global_batch_size)"
    if not any(old.batched for old in nodes_of(node)):
        raise InvalidArgumentError(
            f"the dataset is not batched, so its elements cannot be split over {size} ranks: "
            f"{advice}; got {node.describe()}"
        )
    spec = node.element_spec
    named = zip(leaf_names(spec), flatten(spec).leaves, strict=True)
    scalars = [name for name, leaf in named if not leaf.shape]
    if scalars:
        raise InvalidArgumentError(
            f"{', '.join(scalars)} of the dataset's elements is a scalar and cannot be split over "
            f"{size} ranks: {advice}, or let map() give one value per row; got {node.describe()}"
        )
