"""``all_reduce`` of IndexedSlices, as strategies call it."""

import numpy as np
import pytest

from distrt.collectives.indexed_slices import IndexedSlices
from distrt.communicator import Communicator
from distrt.errors import CollectiveMismatchError
from distrt.settings import Settings
from distrt.transport.loopback import LoopbackWorld


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_takes_slices(size):
    def body(transport):
        comm = Communicator(transport, Settings(timeout_seconds=30.0))
        part = IndexedSlices(np.ones((comm.rank, 2), np.float32), [5] * comm.rank, (9, 2))
        result = comm.all_reduce(part)
        assert result.indices.tolist() == [5] * (size * (size - 1) // 2)
        assert comm.all_reduce(part, "MEAN").dense_shape == (9, 2)
        with pytest.raises(CollectiveMismatchError, match="takes no out"):
            comm.all_reduce(part, out=part.values if comm.rank == 0 else None)
        return float(comm.all_reduce(np.float32(1)))

    assert LoopbackWorld(size).run(body) == [float(size)] * size
