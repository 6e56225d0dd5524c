#!/usr/bin/env python
"""Measure all_reduce between hosts that this machine plays, over links of a known rate.

    sudo python scripts/bench_hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit

Every host is a network, host name, IPC and mount namespace with a link to a common bridge;
``tc`` limits the link to ``--rate`` both ways. In one run, alternating: ours, by every
algorithm that can be taken, and the same MPI's MPI_Allreduce. Beside them the bound of the wire,

    2 (m - 1) / m * bytes / goodput

where goodput is what one TCP stream carried in the same run, and m is the number of ranks, or
of hosts where the ranks of a host share memory: a host's link then need carry each byte once.
Linux, root, iproute2 and util-linux; MPICH or Open MPI, whose mpirun is beside this Python or on
the PATH. The namespaces are removed at the end, also after an error or Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STREAM_BYTES = 64 << 20
# Two runs at once have links, namespaces and addresses of their own.
OWN = os.getpid() % 100_000
BRIDGE, SUBNET = f"distrt-b{OWN}", f"10.78.{OWN % 250}"
# What mpirun starts a host's part with, in place of ssh: OPTIONS HOST COMMAND.
ENTER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in -[bcDEeFIiJLlmOopQRSWw]) shift 2;; -*) shift;; *) break;; esac
done
host=$1; shift
case $host in {subnet}.*) host=distrt-h${{host##*.}};; esac
exec nsenter --net --uts --ipc --mount -t "$(cat {folder}/$host.pid)" -- \
  /bin/sh -c "cd '$PWD' && $*"
"""


def size_of(text: str) -> int:
    """Read 64, 16K, 64M."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1].upper(), 1)
    return int(text if scale == 1 else text[:-1]) * scale


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, from 2")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks on each of them")
    parser.add_argument("--rate", default="1gbit", help="rate of each link, as tc takes it")
    parser.add_argument("--sizes", default="64,16K,64K,1M,16M,64M", help="bytes of each array")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each size and call")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# ------------------------------------------------------------------ the hosts


def sh(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True)


@contextlib.contextmanager
def hosts(count: int, rate: str, folder: Path) -> Iterator[list[str]]:
    """Make the hosts, joined by a bridge; give their names."""
    names = [f"distrt-h{number}" for number in range(1, count + 1)]
    entries = [f"{SUBNET}.{number} {name}\n" for number, name in enumerate(names, 1)]
    table = f"127.0.0.1 localhost\n{SUBNET}.254 {socket.gethostname()}\n{''.join(entries)}"
    (folder / "hosts").write_text(table)
    holders: list[subprocess.Popen[bytes]] = []
    try:
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        sh("ip", "addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(names, 1):
            link(number, name, rate)
            holders.append(hold(name, folder))
            (folder / f"{name}.pid").write_text(str(holders[-1].pid))
        time.sleep(0.5)
        yield names
    finally:
        for holder in holders:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)
            holder.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", space(name)], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def space(name: str) -> str:
    """Return the name of a host's network namespace."""
    return f"{name}-{OWN}"


def link(number: int, name: str, rate: str) -> None:
    """Make a host's network: a link to the bridge, of ``rate`` both ways."""
    outer, inside = f"distv{OWN}n{number}", ("ip", "-n", space(name))
    sh("ip", "netns", "add", space(name))
    sh("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space(name))
    sh("ip", "link", "set", outer, "master", BRIDGE, "up")
    sh(*inside, "addr", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        sh(*inside, "link", "set", device, "up")
    limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    sh("tc", "qdisc", "add", "dev", outer, *limit)
    sh("ip", "netns", "exec", space(name), "tc", "qdisc", "add", "dev", "eth0", *limit)


def hold(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that keeps a host's other namespaces."""
    # A /dev/shm and an IPC namespace of its own: else ranks of two hosts could share memory.
    script = (
        f"mount --bind {folder}/hosts /etc/hosts && mount -t tmpfs none /dev/shm && "
        f"hostname {name} && exec sleep infinity"
    )
    namespaces = [
        "nsenter",
        f"--net=/run/netns/{space(name)}",
        "unshare",
        "--uts",
        "--ipc",
        "--mount",
    ]
    return subprocess.Popen([*namespaces, "sh", "-c", script], start_new_session=True)


def launch(options: argparse.Namespace, names: list[str], folder: Path) -> int:
    """Run this script as the worker on all ranks; return mpirun's exit status."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        sys.exit("bench_hosts: no mpirun beside this Python or on the PATH")
    enter = folder / "enter"
    enter.write_text(ENTER.format(folder=folder, subnet=SUBNET))
    enter.chmod(0o755)
    shown = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    per_host = options.ranks_per_host
    places = ",".join(f"{name}:{per_host}" for name in names)
    if "Open MPI" in shown:
        flags = ["--allow-run-as-root", "--bind-to", "none", "--prtemca", "plm", "ssh"]
        flags += ["--prtemca", "plm_ssh_agent", str(enter), "--host", places]
        settings = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    else:
        flags = ["-launcher", "ssh", "-launcher-exec", str(enter), "-iface", BRIDGE]
        flags += ["-hosts", places]
        # UCX would go through shared memory, whatever the namespaces.
        settings = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, **settings, "PYTHONPATH": path}
    ranks = str(len(names) * per_host)
    worker = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    return subprocess.run([mpirun, *flags, "-n", ranks, *worker], env=environ).returncode


# ------------------------------------------------------------------ a rank's part


def goodput(everyone: Any) -> float:
    """Return what one TCP stream carries from rank 0's host to another, in bytes per second."""
    comm, node_of = everyone.communicator, everyone.topology.node_of
    peer, result = node_of.index(1), 0.0
    if comm.rank == peer:
        with socket.create_server(("", 0)) as server:
            place = socket.gethostbyname(socket.gethostname()), server.getsockname()[1]
            comm.broadcast_object(place, peer)
            stream, _ = server.accept()
            with stream:
                got, buffer, started = 0, bytearray(1 << 20), 0.0
                while count := stream.recv_into(buffer):
                    # The first megabyte goes at the speed of the shaper's burst.
                    if not started and got >= 1 << 20:
                        started, before = time.perf_counter(), got
                    got += count
                result = (got - before) / (time.perf_counter() - started)
    else:
        place = comm.broadcast_object(None, peer)
        if comm.rank == 0:
            with socket.create_connection(place) as stream:
                for _ in range(STREAM_BYTES >> 20):
                    stream.sendall(bytes(1 << 20))
    total: float = comm.broadcast_object(result, peer)
    return total


def timed(comm: Any, calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the median time of each call, in seconds: the slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    once = {}
    for name, call in calls.items():
        comm.barrier()
        started = time.perf_counter()
        call()
        once[name] = time.perf_counter() - started
    longest = max(comm.all_gather_object(max(once.values())))
    for _ in range(max(3, min(200, int(seconds / longest)))):
        for name, call in calls.items():
            comm.barrier()
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    everyones = comm.all_gather_object(medians)
    return {name: max(of[name] for of in everyones) for name in calls}


def worker(options: argparse.Namespace) -> int:
    """Measure; under mpirun."""
    import numpy as np
    from mpi4py import MPI

    import distrt

    everyone = distrt.world()
    comm, rate = everyone.communicator, goodput(everyone)
    rows, wrong = [], 0
    algorithms = comm.algorithms("all_reduce")
    if comm.rank == 0:
        print(
            f"# {everyone.library}: {everyone.topology.nodes} hosts, {comm.size} ranks, "
            f"{options.rate}, goodput {rate / 1e6:.1f} MB/s\n"
            f"{'bytes':>10} {'algorithm':>17} {'ours ms':>9} {'MPI ms':>9} {'vs MPI':>7} "
            f"{'bound ms':>9} {'% bound':>8} {'#wrong':>6}",
            flush=True,
        )
    for nbytes in map(size_of, options.sizes.split(",")):
        ours, theirs = distrt.zeros(nbytes // 4), np.zeros(nbytes // 4, np.float32)

        def peer(theirs: Any = theirs) -> None:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, theirs)

        for algorithm in algorithms:
            with comm.using(f"all_reduce={algorithm}"):

                def call(ours: Any = ours) -> None:
                    comm.all_reduce(ours, out=ours)

                ours.fill(comm.rank + 1)
                call()
                wrong += int((ours != comm.size * (comm.size + 1) // 2).sum())
                ours.fill(0)
                medians = timed(comm, {"ours": call, "MPI": peer}, options.seconds)
            parts = everyone.topology.nodes if "hierarchical" in algorithms else comm.size
            bound = 2 * (parts - 1) / parts * nbytes / rate
            usual = algorithm == comm.algorithm_for("all_reduce", nbytes)
            rows.append(
                {
                    "size_bytes": nbytes,
                    "algorithm": algorithm,
                    "default": usual,
                    "time_us": medians["ours"] * 1e6,
                    "peer_time_us": medians["MPI"] * 1e6,
                    "bound_us": bound * 1e6,
                    "wrong": wrong,
                }
            )
            if comm.rank == 0:
                show(rows[-1])
    if comm.rank == 0 and options.json:
        facts = {"mpi": everyone.library, "hosts": everyone.topology.nodes, "ranks": comm.size}
        facts |= {"rate": options.rate, "goodput_bytes_per_s": rate, "rows": rows}
        Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")
    return int(max(comm.all_gather_object(wrong)) > 0)


def show(row: dict[str, Any]) -> None:
    """Print a row; a star marks what is taken without a setting."""
    name = row["algorithm"] + ("*" if row["default"] else " ")
    ours, theirs, bound = row["time_us"], row["peer_time_us"], row["bound_us"]
    print(
        f"{row['size_bytes']:>10} {name:>17} {ours / 1e3:>9.3f} {theirs / 1e3:>9.3f} "
        f"{theirs / ours:>6.2f}x {bound / 1e3:>9.3f} {100 * bound / ours:>7.0f}% {row['wrong']:>6}",
        flush=True,
    )


def main() -> int:
    """Make the hosts and start the ranks."""
    options = parse()
    if options.worker:
        return worker(options)
    if options.hosts < 2 or options.ranks_per_host < 1:
        sys.exit("bench_hosts: expected --hosts from 2 and --ranks-per-host from 1")
    lacking = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        sys.exit(f"bench_hosts: needs root and ip, tc, nsenter, unshare (missing: {lacking})")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="distrt-hosts-") as name:
        folder = Path(name)
        with hosts(options.hosts, options.rate, folder) as names:
            return launch(options, names, folder)


if __name__ == "__main__":
    sys.exit(main())
