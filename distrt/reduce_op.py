"""``ReduceOp``: how the values of the replicas become one (layer 0: imports errors only).

An op is a value, not a branch: it names the kernel that folds two buffers and
says whether the last fold divides by the number of ranks. The members and
their string forms are those of ``tf.distribute.ReduceOp`` (SUM, MEAN) and, for
the rest, those of MPI and ``torch.distributed``.
"""

from __future__ import annotations

import enum

from distrt.errors import InvalidArgumentError

__all__ = ["ReduceOp"]


class ReduceOp(enum.Enum):
    """A reduction over replicas: SUM, MEAN, PROD, MIN or MAX.

    MIN and MAX give NaN on every rank where any rank holds NaN. MEAN is SUM
    with a true division by the number of ranks in the last fold (no product with
    a rounded reciprocal), so where the sum is exact the mean is correctly rounded.

    Attributes:
      fold: name of the kernel that combines two buffers ("sum", "prod", "min", "max").
      divides: True where the result is divided by the number of ranks.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    PROD = "PROD"
    MIN = "MIN"
    MAX = "MAX"

    fold: str
    divides: bool

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the member for ``op``, a member or its name in any case.

        Raises:
          InvalidArgumentError: ``op`` names no reduction.
        """
        if isinstance(op, cls):
            return op
        # tf.distribute's own enum, and any other, is recognised by its value.
        name = getattr(op, "value", op)
        member = cls.__members__.get(name.upper()) if isinstance(name, str) else None
        if member is None:
            raise InvalidArgumentError(
                f"unknown reduction {op!r}: expected one of {', '.join(cls.__members__)} "
                "(a distrt.ReduceOp or its name)"
            )
        return member


for _op in ReduceOp:
    _op.fold = "sum" if _op is ReduceOp.MEAN else _op.value.lower()
    _op.divides = _op is ReduceOp.MEAN
