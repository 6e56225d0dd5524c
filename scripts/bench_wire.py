"""What the wire between hosts allows: the limit of bench_collectives.py on several hosts.

The rate is the TCP goodput of one stream, measured in the same run (``goodput``) or given by
whoever knows better. The bound (``seconds``) is that of any algorithm, whatever it does
inside a host: what a verb must carry over the link of one host, each way at once.
"""

import socket
import time

# The first bytes go at the speed of a shaper's burst, or wait for TCP's slow start.
WARM_BYTES = 4 << 20
# Each side gives up after so long without a byte: a firewall must not hang the benchmark.
SECONDS = 30.0


def carried(verb, nodes, local):
    """Return the bytes over one host's link, in units of the whole buffer.

    Args:
      verb: the verb.
      nodes: number of hosts.
      local: ranks on each of them.
    """
    others = (nodes - 1) / nodes
    return {
        "all_reduce": 2 * others,
        "reduce_scatter": others,
        "all_gather": others,
        # Every rank of a host has a buffer of its own to send.
        "all_to_all": local * others,
        "broadcast": 1.0,
    }[verb]


def seconds(verb, nbytes, nodes, ranks, rate):
    """Return the least time of a call; ``rate`` in bytes per second."""
    return carried(verb, nodes, ranks / nodes) * nbytes / rate


def goodput(world, nbytes=64 << 20):
    """Return what one TCP stream carries from rank 0's host to the next, in bytes per second.

    All ranks must call. None where it cannot be measured: no connection is let through,
    or the host's name does not resolve to an address that others reach.

    Args:
      world: distrt.world(), on at least two hosts.
      nbytes: bytes to send in the measured part.
    """
    comm = world.communicator
    taker = world.topology.node_of.index(1)
    rate = None
    if comm.rank == taker:
        with socket.create_server(("", 0)) as server:
            server.settimeout(SECONDS)
            comm.broadcast_object((socket.gethostname(), server.getsockname()[1]), taker)
            try:
                rate = receive(server, nbytes)
            except OSError:
                pass
    else:
        place = comm.broadcast_object(None, taker)
        if comm.rank == 0:
            try:
                send(place, nbytes)
            except OSError:
                pass
    return comm.broadcast_object(rate, taker)


def receive(server, nbytes):
    stream, _ = server.accept()
    with stream:
        stream.settimeout(SECONDS)
        buffer, got, started = bytearray(1 << 20), 0, 0.0
        before = 0
        while count := stream.recv_into(buffer):
            got += count
            if not started and got >= WARM_BYTES:
                started, before = time.perf_counter(), got
        return (got - before) / (time.perf_counter() - started) if got >= nbytes else None


def send(place, nbytes):
    with socket.create_connection(place, SECONDS) as stream:
        part = bytes(1 << 20)
        for _ in range((WARM_BYTES + nbytes) >> 20):
            stream.sendall(part)
