"""How many threads BLAS may use in a rank (layer 2). May import: errors, cluster.topology.

Every rank's BLAS would start one thread per core of the host: with 4 ranks on
8 cores that is 32 threads, slower than 8. Each rank gets its share of the
cores that it may run on, unless the user decided.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import threadpoolctl

from distrt.cluster.topology import Topology

__all__ = ["USER_VARIABLES", "blas_threads", "limit_blas_threads"]

USER_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
"""Where one of these is set, the user has chosen the number of threads."""


def blas_threads(topology: Topology, affinities: Sequence[Collection[int]]) -> int:
    """Return this rank's share of its cores, at least 1.

    Args:
      topology: of this rank.
      affinities: the cores that each rank may run on, in rank order
        (``os.sched_getaffinity(0)``).
    """
    own = frozenset(affinities[topology.rank])
    sharing = sum(frozenset(affinities[rank]) == own for rank in topology.local_ranks)
    return max(1, len(own) // sharing)


def limit_blas_threads(topology: Topology, affinities: Sequence[Collection[int]]) -> int | None:
    """Limit the BLAS libraries loaded so far to this rank's share. Each rank for itself.

    Args:
      topology: of this rank.
      affinities: see ``blas_threads``.

    Returns:
      The number of threads, or None where a variable of ``USER_VARIABLES`` is set.
    """
    if any(os.environ.get(name) for name in USER_VARIABLES):
        return None
    threads = blas_threads(topology, affinities)
    threadpoolctl.threadpool_limits(threads, user_api="blas")
    return threads
