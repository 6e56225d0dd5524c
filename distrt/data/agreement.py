"""What the ranks settle before they walk a dataset (data room, layer 5).

May import: errors and the other files of this room except distributed and from_function.
Every rank offers what it would distribute, as text and numbers; then all go on
with the same pipeline, or all raise the same error.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from distrt.data.elements import spec_text
from distrt.data.files import FileSource
from distrt.data.pipeline import Node, nodes_of, rewrite, seeded, seeds_of
from distrt.errors import (
    DataLossError,
    DistrtError,
    DTypeError,
    InvalidArgumentError,
    NotFoundError,
    by_rank,
)
from distrt.transport.base import Transport

__all__ = ["Ranks", "agree"]


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

    def channel(self) -> Transport:
        """Return the same ranks with messages of their own. Collective."""


class _Offer(NamedTuple):
    """What a rank publishes when it distributes: plain text and numbers, so it always travels.

    Attributes:
      problem: the error of this rank, "" where there is none; ``kind`` is its class.
      pipeline, elements, cardinality: must be equal on all ranks.
      files: the names of the files of each source; equal sets, and put in one order.
      seeds: for the shuffles without one, in order; rank 0's are used by all.
    """

    problem: str = ""
    kind: type[DistrtError] = InvalidArgumentError
    pipeline: str = ""
    elements: str = ""
    cardinality: int = 0
    files: tuple[tuple[str, ...], ...] = ()
    seeds: tuple[int, ...] = ()


# Errors keep their class on the other ranks; any other becomes the last of these.
_KINDS: tuple[type[DistrtError], ...] = (
    NotFoundError,
    DTypeError,
    DataLossError,
    InvalidArgumentError,
)


def agree(make: Callable[[], Node], ranks: Ranks, alike: bool = True) -> Node:
    """Return what ``make`` returns, agreed on by all ranks. Collective.

    Args:
      make: returns this rank's pipeline, checked; what it raises is raised on all ranks.
      ranks: the ranks.
      alike: the ranks must have equal pipelines; False: only elements of equal specs.

    Raises (on every rank, naming rank -> problem):
      DistrtError: of the class of the first failing rank's; InvalidArgumentError where the
        ranks' datasets differ.
    """
    cause: Exception | None = None
    node: Node | None = None
    try:
        node = make()
        offer = _offer(node)
    except Exception as error:
        cause = error
        kind = next((k for k in _KINDS if isinstance(error, k)), _KINDS[-1])
        name = "" if isinstance(error, DistrtError) else f"{type(error).__name__}: "
        offer = _Offer(problem=f"{name}{error}", kind=kind)
    offers: list[_Offer] = ranks.all_gather_object(offer)
    failed = {rank: other for rank, other in enumerate(offers) if other.problem}
    if failed:
        kind = next(iter(failed.values())).kind
        lines = by_rank({rank: other.problem for rank, other in failed.items()})
        raise kind(f"the dataset cannot be distributed\n{lines}") from cause
    assert node is not None
    _check_equal(offers, ("pipeline", "elements", "cardinality") if alike else ("elements",))
    if not alike:
        return node
    return seeded(_in_one_order(node, offers, ranks.rank), offers[0].seeds)


def _offer(node: Node) -> _Offer:
    # The order matters: the spec may open files, and then the description says how long they are.
    elements, cardinality = spec_text(node.element_spec), node.cardinality()
    return _Offer(
        pipeline=node.describe(),
        elements=elements,
        cardinality=cardinality,
        files=tuple(source.names for source in _sources(node)),
        seeds=tuple(secrets.randbits(63) for _ in seeds_of(node)),
    )


def _sources(node: Node) -> list[FileSource]:
    return [old for old in nodes_of(node) if isinstance(old, FileSource)]


def _check_equal(offers: list[_Offer], fields: tuple[str, ...]) -> None:
    for field in fields:
        found = {rank: str(getattr(offer, field)) for rank, offer in enumerate(offers)}
        if len(set(found.values())) > 1:
            raise InvalidArgumentError(
                f"the ranks distribute different datasets ({field}): every rank must build the "
                f"same pipeline\n{by_rank(found)}"
            )


def _in_one_order(node: Node, offers: list[_Offer], rank: int) -> Node:
    """Return the pipeline with files in rank 0's order, or sorted where the ranks' orders differ.

    Raises:
      InvalidArgumentError: the ranks have other files.
    """
    if all(offer.files == offers[0].files for offer in offers):
        return node
    for lists in zip(*(offer.files for offer in offers), strict=True):
        if any(sorted(names) != sorted(lists[0]) for names in lists):
            raise InvalidArgumentError(
                "the ranks read other files: every rank must list the same ones (the folders may "
                f"differ)\n{by_rank(_others(lists))}"
            )
    if rank == 0:
        warnings.warn(
            "the ranks list their files in different orders (glob's and listdir's is that of the "
            "file system), so they are sorted by name",
            UserWarning,
            stacklevel=3,
        )

    def sort(old: Node) -> Node:
        if not isinstance(old, FileSource):
            return old
        return old.with_paths([path for _, path in sorted(zip(old.names, old.paths, strict=True))])

    return rewrite(node, sort)


def _others(lists: tuple[tuple[str, ...], ...]) -> dict[int, str]:
    everywhere = set(lists[0]).intersection(*lists[1:])
    texts = {}
    for rank, names in enumerate(lists):
        own = sorted(set(names) - everywhere)
        texts[rank] = f"{len(names)} files; not on all ranks: {', '.join(own[:5]) or 'none'}" + (
            f" and {len(own) - 5} more" if len(own) > 5 else ""
        )
    return texts
