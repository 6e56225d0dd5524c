"""Rows of sparse matrices (data room, layer 5).

May import: the standard library and NumPy. SciPy's matrices are recognised by what they have:
nothing is imported. Rows become dense when they are read, so a rank makes its own rows dense only.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

__all__ = ["SparseRows", "is_sparse"]


def is_sparse(value: Any) -> bool:
    """Tell whether ``value`` is a SciPy sparse matrix or array of two dimensions."""
    return hasattr(value, "tocsr") and hasattr(value, "nnz") and len(value.shape) == 2


@final
class SparseRows:
    """A sparse matrix [rows, columns], read like an array whose rows are dense."""

    ndim = 2

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix.tocsr()
        self.shape: tuple[int, int] = self._matrix.shape
        self.dtype: np.dtype = self._matrix.dtype

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return row ``rows`` [columns], or several [n, columns] of a slice or an array, dense."""
        if isinstance(rows, slice | np.ndarray):
            dense: np.ndarray = self._matrix[rows].toarray()
            return dense
        row: np.ndarray = self._matrix[[int(rows)]].toarray()[0]
        return row
