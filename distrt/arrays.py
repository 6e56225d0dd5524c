"""Arrays: namespaces, the dtype table and nested structures (layer 1).

May import: errors, reduce_op. NumPy is always there; CuPy is only recognised
(through ``sys.modules``) until ``cupy_module`` is called, so that a CPU run
never loads CUDA.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import array_api_compat
import ml_dtypes
import numpy as np
import optree

from distrt.errors import DTypeError
from distrt.reduce_op import ReduceOp

__all__ = [
    "DTYPES",
    "DType",
    "Tree",
    "address_of",
    "array_namespace",
    "as_array",
    "copy_to",
    "cupy_module",
    "dtype_of",
    "flatten",
    "is_array",
    "is_cupy",
    "map_structure",
    "mean_dtype",
    "paths_of",
    "share_memory",
    "to_numpy",
]

_HOST_ARRAYS = (np.ndarray, np.generic)
_ORDERED = frozenset({"sum", "prod", "min", "max"})


class DType(NamedTuple):
    """A row of the dtype table.

    Attributes:
      name: the suffix of the kernels ("f32").
      numpy: the NumPy dtype of the elements.
      kernel: name of the row whose kernels do the arithmetic; complex numbers
        are pairs of floats and booleans are bytes of 0 or 1.
      lanes: kernel elements in one element (2 for complex, else 1).
      accumulator: name of the row in which partial results travel; half types
        accumulate in float32 and are rounded once, at the end.
      folds: the folds that make sense for it.
    """

    name: str
    numpy: np.dtype
    kernel: str
    lanes: int
    accumulator: str
    folds: frozenset[str]


def _row(
    name: str,
    dtype: Any,
    kernel: str = "",
    lanes: int = 1,
    accumulator: str = "",
    folds: frozenset[str] = _ORDERED,
) -> DType:
    kernel = kernel or name
    return DType(name, np.dtype(dtype), kernel, lanes, accumulator or kernel, folds)


# csrc/include/distrt/table.h holds the same kernel rows; tests compare the two.
DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        _row("f16", np.float16, accumulator="f32"),
        _row("bf16", ml_dtypes.bfloat16, accumulator="f32"),
        _row("f32", np.float32),
        _row("f64", np.float64),
        _row("i8", np.int8),
        _row("i16", np.int16),
        _row("i32", np.int32),
        _row("i64", np.int64),
        _row("u8", np.uint8),
        _row("u16", np.uint16),
        _row("u32", np.uint32),
        _row("u64", np.uint64),
        _row("bool", np.bool_, kernel="u8", folds=frozenset({"min", "max"})),
        _row("c64", np.complex64, kernel="f32", lanes=2, folds=frozenset({"sum"})),
        _row("c128", np.complex128, kernel="f64", lanes=2, folds=frozenset({"sum"})),
    )
}
_BY_NUMPY = {row.numpy: row for row in DTYPES.values()}


def dtype_of(array: Any, op: ReduceOp | None = None) -> DType:
    """Return the table row of ``array``'s dtype, refusing what ``op`` cannot fold.

    Raises:
      DTypeError: the dtype is not in the table, or ``op`` makes no sense for it.
    """
    dtype = np.dtype(array.dtype)
    row = _BY_NUMPY.get(dtype)
    if row is None and dtype.isnative is False:
        raise DTypeError(
            f"dtype {dtype} is in foreign byte order: convert it first, "
            f"array.astype({dtype.newbyteorder('=').name!r})"
        )
    if row is None:
        raise DTypeError(
            f"dtype {dtype} cannot travel in a collective: expected one of "
            f"{', '.join(r.numpy.name for r in DTYPES.values())}"
        )
    if op is not None and op.fold not in row.folds:
        able = [o.value for o in ReduceOp if o.fold in row.folds]
        raise DTypeError(
            f"{op.value} is not defined for {row.numpy.name}: expected one of {', '.join(able)}"
        )
    return row


def mean_dtype(row: DType) -> np.dtype:
    """Return the dtype of a MEAN over ``row``: integers follow true division.

    float32 for 8 and 16 bit integers, float64 for wider ones, else unchanged.
    """
    if row.numpy.kind not in "iu":
        return row.numpy
    return np.dtype(np.float32 if row.numpy.itemsize <= 2 else np.float64)


def is_cupy(value: Any) -> bool:
    """Tell whether ``value`` is a CuPy array, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def is_array(value: Any) -> bool:
    """Tell whether ``value`` is a NumPy array, a NumPy scalar or a CuPy array."""
    return isinstance(value, _HOST_ARRAYS) or is_cupy(value)


def cupy_module() -> Any:
    """Import and return CuPy.

    Raises:
      ImportError: CuPy is not installed.
    """
    import cupy

    return cupy


def array_namespace(*values: Any) -> Any:
    """Return the array-API namespace (NumPy's or CuPy's) of ``values``.

    Variables count as the array they hold; Python numbers are passed over.
    Source: ``array_api_compat.array_namespace``.

    Raises:
      TypeError: the values mix namespaces, or none of them is an array.
    """
    arrays = [v if is_array(v) else getattr(v, "value", v) for v in values]
    return array_api_compat.array_namespace(
        *(np.asarray(a) if isinstance(a, np.generic) else a for a in arrays)
    )


def as_array(value: Any) -> Any:
    """Return ``value`` as a NumPy or CuPy array, the way TensorFlow converts it.

    Arrays keep their dtype and are not copied. Python ints become int32 (int64
    where they do not fit), floats float32, complex complex64, bools bool, and
    lists of those likewise. Variables give the array they hold.

    Raises:
      DTypeError: ``value`` is nothing that can become a numeric array.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise DTypeError("a masked array would lose its mask: pass value.filled(...) instead")
    if is_array(value):
        return np.asarray(value) if isinstance(value, np.generic) else value
    if hasattr(value, "value") and is_array(value.value):
        return value.value
    if value is None or isinstance(value, str | bytes):
        raise DTypeError(f"expected an array or a number, got {value!r}")
    array = np.asarray(value)
    # Only Python's own numbers are narrowed: an object with __array__ chose its dtype.
    if not hasattr(value, "__array__") and not _holds_arrays(value):
        if array.dtype == np.int64:
            fits = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
            array = array.astype(np.int32) if fits else array
        elif array.dtype == np.float64:
            array = array.astype(np.float32)
        elif array.dtype == np.complex128:
            array = array.astype(np.complex64)
    if array.dtype.kind in "OUSmM":
        raise DTypeError(
            f"expected an array or a number, got {type(value).__name__} ({value!r:.80})"
        )
    return array


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(is_array(item) or _holds_arrays(item) for item in value)
    return False


def to_numpy(value: Any) -> np.ndarray:
    """Return ``value`` as a NumPy array; a CuPy array is copied to the host."""
    array = as_array(value)
    host: np.ndarray = array.get() if is_cupy(array) else array
    return host


def copy_to(target: Any, source: Any) -> None:
    """Copy ``source`` into ``target``, in place, between host and GPU if need be."""
    if is_cupy(target):
        target[...] = source if is_cupy(source) else cupy_module().asarray(source)
    else:
        np.copyto(target, to_numpy(source))


def address_of(array: Any) -> int:
    """Return the address of an array's first element, in its own kind of memory."""
    return int(array.data.ptr if is_cupy(array) else array.ctypes.data)


def share_memory(one: Any, other: Any) -> bool:
    """Tell whether two arrays may overlap, by the bounds of their memory."""
    if is_cupy(one) != is_cupy(other):
        return False
    return bool((cupy_module() if is_cupy(one) else np).may_share_memory(one, other))


class Tree(NamedTuple):
    """A flattened structure: the leaves in order, and how to rebuild it."""

    leaves: list[Any]
    spec: optree.PyTreeSpec

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the structure with ``leaves`` in place of the old ones."""
        return optree.tree_unflatten(self.spec, leaves)


def flatten(structure: Any) -> Tree:
    """Flatten nested tuples, lists, dicts and named tuples; None is a leaf, as in tf.nest.

    The order of a dict's keys never matters: leaves come in the order of the sorted keys.
    """
    if is_array(structure):
        return Tree([structure], _LEAF)
    leaves, spec = optree.tree_flatten(_sorted_keys(structure), none_is_leaf=True)
    return Tree(leaves, spec)


_LEAF = optree.treespec_leaf(none_is_leaf=True)


def _sorted_keys(structure: Any) -> Any:
    # optree sorts the keys of a dict, but keeps an OrderedDict in its own order.
    def sort(node: Any) -> Any:
        if type(node) is not OrderedDict:
            return node
        return OrderedDict((key, _sorted_keys(node[key])) for key in sorted(node))

    return optree.tree_map(
        sort, structure, is_leaf=lambda node: type(node) is OrderedDict, none_is_leaf=True
    )


def paths_of(tree: Tree) -> list[str]:
    """Return where each leaf of ``tree`` stands, as Python writes it: ``['w'][0]``."""
    return ["".join(f"[{key!r}]" for key in path) for path in tree.spec.paths()]


def map_structure(function: Callable[..., Any], structure: Any, *rest: Any) -> Any:
    """Apply ``function`` to the leaves of equal structures. Source: ``tf.nest.map_structure``."""
    # Most structures are one array, and this is called for every row of a dataset.
    if not rest and is_array(structure):
        return function(structure)
    return optree.tree_map(function, structure, *rest, none_is_leaf=True)
