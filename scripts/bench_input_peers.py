"""The pipelines that bench_input.py compares with: torch's and TensorFlow's.

A peer is asked once per case for a function that walks one epoch on this rank and
returns the seconds and how many rows it saw. What is not installed is a MissingError.
"""

import json
import os
import socket
import time

PEERS = ("torch", "tf", "tf-workers", "none")


class MissingError(Exception):
    """The peer cannot run here; the text says why."""


def sleep_barrier(comm):
    """Wait for all ranks without taking the processor from those that still work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


class Torch:
    """DataLoader with a DistributedSampler in each rank, in the rank's own process."""

    name = "torch"

    def __init__(self, comm, options):
        try:
            import torch
        except ImportError as error:
            raise MissingError("--peer torch needs torch: pip install torch") from error
        self.torch, self.comm, self.options = torch, comm, options
        # What torchrun does where several ranks share a host.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.size))

    def walker(self, rows, function):
        """Return the walk over one epoch; ``function`` of each row where it is not None."""
        data = self.torch.utils.data
        source = data.TensorDataset(self.torch.from_numpy(rows))
        if function is not None:
            source = _mapped(data.Dataset, rows, function)
        sampler = data.DistributedSampler(
            source, self.comm.size, self.comm.rank, seed=1, drop_last=False
        )
        batch = self.options.batch // self.comm.size
        loader = data.DataLoader(source, batch_size=batch, sampler=sampler, num_workers=0)
        epochs = iter(range(10**9))

        def walk():
            sampler.set_epoch(next(epochs))
            started, seen = time.perf_counter(), 0
            for batch in loader:
                seen += len(batch[0] if function is None else batch)
            return time.perf_counter() - started, seen

        return walk


def _mapped(base, rows, function):
    class Mapped(base):
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            return function(rows[index])

    return Mapped()


class TensorFlow:
    """tf.data under MirroredStrategy: rank 0 feeds a replica for each rank, the others sleep."""

    name = "tf"

    def __init__(self, comm, options):
        self.tf, self.comm, self.options = _tensorflow(), comm, options
        if comm.rank == 0:
            self.strategy = self._strategy()

    def _strategy(self):
        tf, ranks = self.tf, self.comm.size
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(ranks)]
        tf.config.set_logical_device_configuration(cpu, logical)
        return tf.distribute.MirroredStrategy([f"/cpu:{rank}" for rank in range(ranks)])

    def walker(self, rows, function):
        """Return the walk over one epoch; ``function`` of each row where it is not None."""
        if not hasattr(self, "strategy"):
            return lambda: (0.0, 0)
        distributed = self._distributed(rows, function)

        def walk():
            started, seen = time.perf_counter(), 0
            for batch in distributed:
                local = self.strategy.experimental_local_results(batch)
                seen += sum(part.shape[0] for part in local)
            return time.perf_counter() - started, seen

        return walk

    def _distributed(self, rows, function):
        tf = self.tf
        dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=1)
        if function is not None:
            width = rows.shape[1:]

            def mapped(row):
                result = tf.numpy_function(function, [row], tf.float32, stateful=False)
                return tf.ensure_shape(result, width)

            dataset = dataset.map(mapped, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.batch(self.options.batch)
        return self.strategy.experimental_distribute_dataset(dataset)


class TensorFlowWorkers(TensorFlow):
    """tf.data under MultiWorkerMirroredStrategy: a worker in each rank, over 127.0.0.1."""

    name = "tf-workers"

    def _strategy(self):
        return self.tf.distribute.MultiWorkerMirroredStrategy()

    def __init__(self, comm, options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports = comm.allgather(probe.getsockname()[1])
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        task = {"type": "worker", "index": comm.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        self.tf, self.comm, self.options = _tensorflow(), comm, options
        self.strategy = self._strategy()


def _tensorflow():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    try:
        import tensorflow
    except ImportError as error:
        raise MissingError("--peer tf needs TensorFlow: pip install tensorflow") from error
    return tensorflow


def peer_of(name, comm, options):
    """Return the peer of that name, or None for ``none``.

    Raises:
      MissingError: it is not installed.
    """
    kinds = {kind.name: kind for kind in (Torch, TensorFlow, TensorFlowWorkers)}
    return None if name == "none" else kinds[name](comm, options)
