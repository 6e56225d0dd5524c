"""``from_generator``: elements that a Python generator makes (data room, layer 5).

May import: errors, arrays, elements, pipeline. Each pass calls the function anew. Every rank runs
the whole generator and takes its part, so it must give the same on all of them; the ranks
compare digests (digest.py).
"""

# The methods that Node declares are documented there, once.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from distrt.arrays import Tree, flatten, map_structure
from distrt.data.elements import ArraySpec, boxed, components, spec_of, spec_text
from distrt.data.pipeline import Epoch, Stream
from distrt.errors import DTypeError, InvalidArgumentError

__all__ = ["Generator", "signature_of"]


def signature_of(
    generator: Callable[[], Iterable[Any]], types: Any, shapes: Any, signature: Any
) -> Any:
    """Return the spec that ``from_generator`` was told, or that of the first element.

    Raises:
      InvalidArgumentError: the generator gives nothing to look at, or too much was told.
    """
    if signature is not None:
        if types is not None or shapes is not None:
            raise InvalidArgumentError(
                "from_generator: expected output_signature, or output_types (and output_shapes), "
                "got both"
            )
        return map_structure(lambda leaf: ArraySpec(tuple(leaf.shape), leaf.dtype), signature)
    if types is not None:
        if shapes is None:
            raise InvalidArgumentError(
                "from_generator: output_types alone say nothing of the shapes: give "
                "output_shapes too (with None for dimensions that vary), or output_signature"
            )
        kinds = flatten(types)
        sizes: list[Any] = kinds.spec.flatten_up_to(shapes)
        pairs = zip(kinds.leaves, sizes, strict=True)
        return kinds.rebuild([ArraySpec(tuple(shape), np.dtype(kind)) for kind, shape in pairs])
    for element in generator():
        spec = spec_of(components(element))
        # Batches of another length may follow, but never another structure.
        return map_structure(lambda leaf: ArraySpec((None,) * len(leaf.shape), leaf.dtype), spec)
    raise InvalidArgumentError(
        "from_generator: the generator gives nothing, so its elements are not known: give "
        "output_signature"
    )


@final
@dataclass(frozen=True, eq=False)
class Generator(Stream):
    """What ``function()`` yields; see ``Dataset.from_generator``."""

    unproven = True
    function: Callable[[], Iterable[Any]]
    spec: Any
    name: str

    @property
    def batched(self) -> bool:
        # A first dimension that varies tells batches from rows of a fixed length.
        leaves = flatten(self.spec).leaves
        return all(len(leaf.shape) > 0 and leaf.shape[0] is None for leaf in leaves)

    def handles(self, epoch: Epoch) -> Iterator[Any]:
        made: Any = self.function()
        tree = flatten(self.spec)
        with contextlib.closing(made) if hasattr(made, "close") else contextlib.nullcontext():
            for number, element in enumerate(made):
                yield self._checked(tree, number, element)

    def _checked(self, tree: Tree, number: int, element: Any) -> Any:
        try:
            leaves = tree.spec.flatten_up_to(element)
            arrays = [_converted(v, leaf) for v, leaf in zip(leaves, tree.leaves, strict=True)]
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"from_generator: element {number} of {self.name}: expected "
                f"{spec_text(self.spec)}, got {element!r:.100}: {error}"
            ) from error
        return tree.rebuild(arrays)

    def example(self, variant: int) -> Any:
        return map_structure(lambda leaf: _zeros(leaf, 1 + variant), self.spec)

    @property
    def element_spec(self) -> Any:
        return self.spec

    def cardinality(self) -> int:
        return -2

    def describe(self) -> str:
        return f"from_generator({self.name})"


def _zeros(leaf: ArraySpec, rows: int) -> Any:
    shape = tuple(rows if size is None else size for size in leaf.shape)
    if leaf.dtype.kind == "O":
        return boxed(b"") if not shape else np.full(shape, b"", object)
    return np.zeros(shape, leaf.dtype)[()]


def _converted(value: Any, leaf: ArraySpec) -> Any:
    """Return ``value`` as the leaf says; Python's numbers take its dtype, arrays must have it."""
    if isinstance(value, bytes):
        array: Any = boxed(value)
    elif isinstance(value, np.ndarray | np.generic) or hasattr(value, "dtype"):
        array = components(value)
        if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise DTypeError(f"dtype {array.dtype} does not become {leaf.dtype}")
    else:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            raise DTypeError(f"{type(value).__name__} is no array and no number")
        exact = array.astype(leaf.dtype) if array.dtype != leaf.dtype else array
        if array.dtype.kind in "fc" and leaf.dtype.kind in "iub":
            raise DTypeError(f"{value!r:.40} does not become {leaf.dtype}")
        if leaf.dtype.kind in "iu" and not np.array_equal(exact, array):
            raise DTypeError(f"{value!r:.40} does not fit into {leaf.dtype}")
        array = exact
    if leaf.dtype.kind not in "OU":
        array = np.asarray(array).astype(leaf.dtype, copy=False)
    fits = array.ndim == len(leaf.shape) and all(
        want is None or want == have for want, have in zip(leaf.shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"shape {list(array.shape)}")
    if array.ndim == 0 and array.dtype.kind != "O":
        return array[()]
    # The generator may fill one buffer again and again.
    return array.copy()
