"""What bench_collectives.py measures distrt against: the MPI that carries it, or gloo.

``peer_of("mpi" or "gloo" or "none", world)`` returns a peer, or None. All ranks must make it,
and close it. A peer says which dtype it can do in place of ours (``dtype_for``), since no
MPI knows bfloat16, and makes the same call on arrays of that dtype (``call``).
"""

import socket

import ml_dtypes
import numpy as np

# MPI's and gloo's nearest op: neither of them has a mean on host memory.
NEAREST = {"SUM": "SUM", "MEAN": "SUM", "MIN": "MIN", "MAX": "MAX", "PROD": "PROD"}
FOLDING = ("all_reduce", "reduce_scatter")


class MissingError(Exception):
    """What a peer needs is not installed; the text says what to do."""


class MpiPeer:
    """The collectives of the MPI that distrt itself runs on."""

    def __init__(self, world):
        # distrt has started MPI by now; imported earlier, mpi4py would.
        from mpi4py import MPI

        self.mpi, self.comm, self.name = MPI, MPI.COMM_WORLD, "MPI"

    def close(self):
        """Give back what the peer holds."""

    def dtype_for(self, verb, dtype):
        """Return the dtype that stands for ``dtype``: of as many bytes where there is one."""
        if verb not in FOLDING:
            return dtype  # moved as bytes
        candidates = [dtype]
        if dtype.itemsize == 2 and dtype.kind not in "iu":
            candidates += [np.dtype(np.float16), np.dtype(np.float32)]
        return next((kind for kind in candidates if self.folds(kind)), None)

    def kind_of(self, dtype):
        """Return MPI's type for a NumPy dtype, or None."""
        floats = {"float32": "FLOAT", "float64": "DOUBLE"}
        name = floats.get(dtype.name, f"{dtype.name.upper()}_T")
        kind = getattr(self.mpi, name, self.mpi.DATATYPE_NULL)
        return None if kind == self.mpi.DATATYPE_NULL else kind

    def folds(self, dtype):
        """Tell whether this MPI can add up such elements; some have the type and no sum."""
        kind = self.kind_of(dtype)
        if kind is None:
            return False
        one, two = np.ones(1, dtype), np.ones(1, dtype)
        try:
            self.mpi.SUM.Reduce_local([one, 1, kind], [two, 1, kind])
        except self.mpi.Exception:
            return False
        return float(two[0]) == 2

    def call(self, verb, op, source, target):
        """Return the call on these arrays, of the dtype that ``dtype_for`` names."""
        comm, place, op = self.comm, source is target, getattr(self.mpi, NEAREST[op])
        if verb in FOLDING:
            kind = self.kind_of(source.dtype)
        else:
            kind = self.mpi.BYTE
            source, target = source.view(np.uint8), target.view(np.uint8)
        given, result = [source, kind], [target, kind]

        def broadcast():
            if comm.rank == 0 and not place:
                np.copyto(target, source)
            comm.Bcast(result, 0)

        return {
            "all_reduce": lambda: comm.Allreduce(self.mpi.IN_PLACE if place else given, result, op),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(given, result, op=op),
            "all_gather": lambda: comm.Allgather(given, result),
            "all_to_all": lambda: comm.Alltoall(given, result),
            "broadcast": broadcast,
        }[verb]


class GlooPeer:
    """torch.distributed's gloo backend.

    The ranks meet in a TCPStore at a port that the system chooses on rank 0's host, told
    through distrt itself. Between hosts gloo needs a host name that resolves, or
    GLOO_SOCKET_IFNAME.
    """

    def __init__(self, world):
        comm = world.communicator
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as error:
            torch, failure = None, str(error)
        lacking = [r for r, lacks in enumerate(comm.all_gather_object(torch is None)) if lacks]
        if lacking:
            why = f" ({failure})" if torch is None else ""
            raise MissingError(f"--peer gloo: rank(s) {lacking} lack torch: pip install torch{why}")
        self.torch, self.dist, self.name = torch, distributed, "gloo"
        self.rank = comm.rank
        here = "127.0.0.1" if world.topology.nodes == 1 else socket.gethostname()
        store = None
        if comm.rank == 0:
            store = distributed.TCPStore(here, 0, comm.size, True, wait_for_workers=False)
        place = comm.broadcast_object(store and (here, store.port))
        store = store or distributed.TCPStore(*place, comm.size, False)
        distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def close(self):
        """Give back what the peer holds. All ranks must call."""
        self.dist.barrier()
        self.dist.destroy_process_group()

    def dtype_for(self, verb, dtype):
        """Return the dtype that stands for ``dtype``, or None: gloo folds no short integers."""
        folded = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
        return dtype if verb not in FOLDING or dtype.name in folded else None

    def tensor(self, array, moved):
        """Return a tensor on the memory of ``array``; of bytes where they are only ``moved``."""
        if moved:
            return self.torch.from_numpy(array.view(np.uint8))
        if array.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def call(self, verb, op, source, target):
        """Return the call on these arrays. Out of place, gloo's all_reduce needs a copy."""
        dist, place = self.dist, source is target
        name = {"PROD": "PRODUCT"}.get(NEAREST[op], NEAREST[op])
        op, moved = getattr(dist.ReduceOp, name), verb not in FOLDING
        given = self.tensor(source, moved)
        result = given if place else self.tensor(target, moved)

        def all_reduce():
            if not place:
                result.copy_(given)
            dist.all_reduce(result, op)

        def broadcast():
            if self.rank == 0 and not place:
                result.copy_(given)
            dist.broadcast(result, 0)

        # Newer versions of torch have shorter names for these, and warn of the old ones.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return {
            "all_reduce": all_reduce,
            "reduce_scatter": lambda: scatter(result, given, op),
            "all_gather": lambda: gather(result, given),
            "all_to_all": lambda: dist.all_to_all_single(result, given),
            "broadcast": broadcast,
        }[verb]


PEERS = {"mpi": MpiPeer, "gloo": GlooPeer, "none": lambda world: None}


def peer_of(name, world):
    """Return the peer of that name, or None. All ranks must call.

    Raises:
      MissingError: on every rank, where one of them lacks what the peer needs.
    """
    return PEERS[name](world)
