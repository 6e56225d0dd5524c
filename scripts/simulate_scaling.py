#!/usr/bin/env python
"""Time an all_reduce on up to thousands of ranks, by a model.

    python scripts/simulate_scaling.py --sizes 64K,64M
    python scripts/simulate_scaling.py --fit report.json --per-node 8 --rails 8 --plot scaling.png

It executes the package's own schedules (distrt/collectives/schedule.py), message by message:
a rank acts when what it waits for has arrived. A message of b bytes takes alpha + b beta, a
fold of b bytes b gamma, and a rank's link carries one message at a time. Three links:

    --inter    a message between nodes; a node has --rails of them, which its ranks share
    --intra    a message between two ranks of a node
    --shared   shared memory: alpha is a barrier, beta a byte that is read or written

each given as ALPHA,BETA,GAMMA in us, GB/s and GB/s. The defaults are rounded measurements (ring
and direct on one host, 10 Gbit/s Ethernet between); --fit takes the JSON that
scripts/bench_collectives.py writes, fits the links that it has rows for, and prints
each row beside the model. What the model leaves out: windows (a receiver always has
room), switches (any two nodes reach each other at full rate), noise.
"""

import argparse
import json
import sys
from typing import NamedTuple

import numpy as np

from distrt.collectives import schedule
from distrt.collectives.schedule import Action
from distrt.settings import Settings

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ELEMENT = 4  # float32
FOLDS = (Action.FOLD, Action.FINISH)


# 1. The machine.
class Link(NamedTuple):
    """Seconds per message, per byte that moves, and per byte that is folded."""

    alpha: float
    beta: float
    gamma: float

    @classmethod
    def parse(cls, text):
        """Read "us,GB/s,GB/s"."""
        alpha, beta, gamma = (float(number) for number in text.split(","))
        if not (alpha >= 0 and beta > 0 and gamma > 0):
            raise ValueError(text)
        return cls(alpha * 1e-6, 1e-9 / beta, 1e-9 / gamma)

    @property
    def text(self):
        """The link in the units of the options."""
        rates = (f"{1e-9 / rate:.3g}" if rate else "inf" for rate in self[1:])
        return f"{self.alpha * 1e6:.3g} us, {next(rates)} GB/s, fold {next(rates)} GB/s"


class Machine(NamedTuple):
    """``per_node`` ranks share a node, in rank order, and its ``rails`` links."""

    inter: Link
    intra: Link
    shared: Link
    per_node: int = 8
    rails: int = 1
    segment_bytes: int = Settings().segment_bytes
    halving_bytes: int = 1 << 17

    def nodes(self, size):
        """Return the node of each of ``size`` ranks."""
        return np.arange(size) // self.per_node


# 2. The executors: what the schedules say, for all ranks at once.
def run_ring(hops, chunks, crosses, machine, share=1.0):
    """Return when the last rank is done.

    Args:
      hops: the program of rank 0. All ranks of a ring do the same to other chunks: rank r's
        program is rank 0's with r added to every chunk, so one is enough (the tests
        compare; 4,096 programs of 8,190 hops would take longer than the simulation).
      chunks: their spans, in elements.
      crosses: [ranks] of bool: whether a rank's right neighbour is on another node.
      machine: the links.
      share: how many messages share a rail.
    """
    size, ranks = len(chunks), np.arange(len(chunks))
    bytes_of = np.array([span.length for span in chunks]) * ELEMENT
    alpha = np.where(crosses, machine.inter.alpha, machine.intra.alpha)
    beta = np.where(crosses, machine.inter.beta * share, machine.intra.beta)
    gamma = np.where(np.roll(crosses, 1), machine.inter.gamma, machine.intra.gamma)
    limit = machine.segment_bytes
    pieces = max(1, -(-int(bytes_of.max()) // limit))
    acted, link = np.zeros(size), np.zeros(size)
    arrived = [acted] * pieces
    # A leg (a segment at a hop) is acted upon after the one before it, when it has arrived
    # from the left; then its bytes queue for the link to the right. A segment of no bytes is no
    # message: it takes no time, and takes none of the others'.
    for hop in hops:
        left = bytes_of[(ranks + hop.chunk) % size]
        for k in range(pieces):
            length = np.clip(left - k * limit, 0, limit)
            there = length > 0
            when = np.maximum(acted, arrived[k]) if hop.receives else acted
            if hop.action in FOLDS:
                when = when + length * gamma
            acted = np.where(there, when, acted)
            if hop.sends:
                link = np.where(there, np.maximum(acted, link) + length * beta, link)
                arrived[k] = np.roll(link + alpha, 1)
    return float(max(acted.max(), link.max()))


def run_rounds(programs, machine):
    """Return when the last rank has ended its rounds.

    In each sweep the ranks meet whose current rounds name each other; both send when
    they have come to it. All messages of a sweep that leave a node share its rails, as
    if they began together. A piece is one message here: that the class folds its
    first segments while the last ones travel is left out.
    """
    size = len(programs)
    steps = max(len(program) for program in programs)
    peer = np.full((steps + 1, size), -1)
    sent, folded, waits = (np.zeros((steps + 1, size)) for _ in range(3))
    for rank, program in enumerate(programs):
        for step, meeting in enumerate(program):
            peer[step, rank] = meeting.peer
            sent[step, rank] = meeting.sent.length * ELEMENT
            waits[step, rank] = meeting.received.length > 0
            if meeting.action in FOLDS:
                folded[step, rank] = meeting.received.length * ELEMENT
    ranks, node = np.arange(size), machine.nodes(size)
    at, clock = np.zeros(size, int), np.zeros(size)
    while True:
        other = peer[at, ranks]
        meets = (other >= 0) & (peer[at[other], other] == ranks)
        if not meets.any():
            assert (other < 0).all(), "the ranks wait for each other in a circle"
            return float(clock.max())
        mine = sent[at, ranks]
        crosses = node[other] != node
        leaving = np.bincount(node[meets & crosses & (mine > 0)], minlength=node[-1] + 1)
        share = np.maximum(1, leaving / machine.rails)[node]
        alpha = np.where(crosses, machine.inter.alpha, machine.intra.alpha)
        beta = np.where(crosses, machine.inter.beta * share, machine.intra.beta)
        gone = clock + mine * beta
        arrives = np.where(mine > 0, gone + alpha, clock)[other]
        done = np.maximum(gone, np.where(waits[at, ranks] > 0, arrives, gone))
        done += folded[at, ranks] * np.where(crosses, machine.inter.gamma, machine.intra.gamma)
        clock = np.where(meets, done, clock)
        at = np.where(meets, at + 1, at)


# 3. The algorithms: seconds, or None where they do not apply.
def ring_verb(verb, count, size, machine):
    """Return the time of ``all_reduce``, ``reduce_scatter`` or ``all_gather`` by the ring."""
    node = machine.nodes(size)
    crosses = node != np.roll(node, -1)
    hops = getattr(schedule, verb)(size, 0)
    # Each node has one rank whose right neighbour is elsewhere: its rail is its own.
    return run_ring(hops, schedule.chunks(count, size), crosses, machine)


def ring(count, size, machine):
    return ring_verb("all_reduce", count, size, machine)


def halving_doubling(count, size, machine):
    short = count * ELEMENT <= machine.halving_bytes
    make = schedule.recursive_doubling if short else schedule.halving_doubling
    return run_rounds([make(size, rank, count) for rank in range(size)], machine)


def shared_verb(verb, count, size, machine):
    """Return the time of a verb in shared memory.

    Two barriers; between them each rank reads and folds its chunk of all ranks' buffers and
    writes it into all of them (reduce_scatter: once), or reads all of them (all_gather).
    The chunk of rank 0 is the longest: the others wait for it.
    """
    longest = schedule.chunks(count, size)[0].length * ELEMENT
    link, whole = machine.shared, longest * size
    moved = {"all_reduce": 2 * whole, "reduce_scatter": whole + longest, "all_gather": 2 * whole}
    folded = 0 if verb == "all_gather" else longest * (size - 1)
    return 2 * link.alpha + moved[verb] * link.beta + folded * link.gamma


def direct(count, size, machine):
    return shared_verb("all_reduce", count, size, machine) if size <= machine.per_node else None


def hierarchical(count, size, machine):
    """Reduce_scatter in the node, a ring per local rank between the nodes, all_gather."""
    local = machine.per_node
    if size % local or size <= local:
        return None
    # The rings differ by one element at most; that of local rank 0 is the longest. All of
    # them share the rails of the node.
    longest, nodes = schedule.chunks(count, local)[0].length, size // local
    between = run_ring(
        schedule.all_reduce(nodes, 0),
        schedule.chunks(longest, nodes),
        np.ones(nodes, bool),
        machine,
        share=max(1.0, local / machine.rails),
    )
    inside = [shared_verb(v, count, local, machine) for v in ("reduce_scatter", "all_gather")]
    return sum(inside) + between


ALGORITHMS = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "direct": direct,
}


# 4. The fit.
def measured(report):
    """Yield (link, row, model) for each row that one link alone explains.

    ``model(machine)`` is the time of the row; a report of several nodes counts with one
    rank on each, and one of a single node with all ranks there.
    """
    ranks, nodes = report["ranks"], report["nodes"]
    if ranks < 2 or nodes not in (1, ranks):
        return
    for row in report["rows"]:
        verb, count = row["verb"], row["size_bytes"] // ELEMENT
        if verb not in ("all_reduce", "reduce_scatter", "all_gather") or row["dtype"] != "float32":
            continue
        algorithm = row["algorithm"]
        if algorithm == "direct" and row["registered"]:
            yield "shared", row, lambda m, v=verb, c=count: shared_verb(v, c, ranks, m)
        elif algorithm == "ring":
            yield _wire(nodes), row, lambda m, v=verb, c=count: ring_verb(v, c, ranks, m)
        elif algorithm == "halving_doubling" and verb == "all_reduce":
            yield _wire(nodes), row, lambda m, c=count: halving_doubling(c, ranks, m)


def _wire(nodes):
    return "intra" if nodes == 1 else "inter"


def fit(report, machine):
    """Return the machine with the links that best explain the report, and the rows it used.

    A time is nearly linear in (alpha, beta, gamma): the model with one of them alone gives
    its factor. Least squares of the relative errors; what comes out negative, or cannot be
    told apart (beta and gamma, where every row folds), keeps the value it had.
    """
    rows = list(measured(report))
    machine = machine._replace(per_node=1 if report["nodes"] > 1 else max(report["ranks"], 1))
    nothing = Link(0.0, 0.0, 0.0)
    for name in ("shared", "intra", "inter"):
        used = [(row["time_us"] * 1e-6, model) for link, row, model in rows if link == name]
        if not used:
            continue
        alone = [
            machine._replace(**{name: nothing._replace(**{field: 1.0})}) for field in Link._fields
        ]
        times = np.array([seconds for seconds, _ in used])
        factors = np.array([[model(one) for one in alone] for _, model in used])
        old = np.array(getattr(machine, name))
        free = [i for i in range(3) if factors[:, i].any()]
        while free:
            rest = times - np.delete(factors, free, 1) @ np.delete(old, free)
            scaled = factors[:, free] / times[:, None]
            unit = np.linalg.norm(scaled, axis=0)
            found, _, rank, _ = np.linalg.lstsq(scaled / unit, rest / times, rcond=1e-6)
            if rank == len(free) and (found > 0).all():
                old[free] = found / unit
                break
            free.pop() if rank < len(free) else free.pop(int(np.argmin(found)))
        machine = machine._replace(**{name: Link(*old.tolist())})
    return machine, rows


def show_fit(machine, rows):
    print("#       link            verb      bytes  measured us     model us  model/measured")
    for link, row, model in rows:
        seconds = model(machine) * 1e6
        print(
            f"{link:>12} {row['verb']:>15} {row['size_bytes']:>10} {row['time_us']:>12.1f} "
            f"{seconds:>12.1f} {seconds / row['time_us']:>10.2f}x"
        )


# 5. The table and the plot.
def parse_size(text):
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = int(text[: len(text) - len(unit)]) * UNITS[unit]
    if number < 0:
        raise ValueError(text)
    return number


def simulate(sizes, ranks, algorithms, machine):
    """Return {(bytes, ranks): {algorithm: seconds or None}}."""
    return {
        (size, n): {name: ALGORITHMS[name](size // ELEMENT, n, machine) for name in algorithms}
        for size in sizes
        for n in ranks
    }


def show(times, algorithms, machine):
    print(f"# all_reduce of float32, {machine.per_node} ranks a node, {machine.rails} rail(s) each")
    for name in ("inter", "intra", "shared"):
        print(f"# {name:>6}: {getattr(machine, name).text}")
    print("#    bytes  ranks nodes " + "".join(f"{name + ' us':>20}" for name in algorithms))
    for (size, ranks), row in times.items():
        nodes = -(-ranks // machine.per_node)
        cells = ("-" if row[name] is None else f"{row[name] * 1e6:.1f}" for name in algorithms)
        print(f"{size:>10} {ranks:>6} {nodes:>5} " + "".join(f"{cell:>20}" for cell in cells))


def plot(times, algorithms, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({size for size, _ in times})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 4.5), squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        for name in algorithms:
            points = [(n, row[name]) for (s, n), row in times.items() if s == size and row[name]]
            if points:
                ranks, seconds = zip(*points, strict=True)
                axis.plot(ranks, [1e6 * s for s in seconds], marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="us", title=f"{size:,} bytes")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def listed(kind):
        return lambda text: [kind(part) for part in text.split(",")]

    powers = [2**k for k in range(1, 13)]
    option = parser.add_argument
    option("--sizes", type=listed(parse_size), default=[1 << 16, 64 << 20], help="64K,64M")
    option("--ranks", type=listed(int), default=powers, help="2,4,8; by default to 4096")
    option("--algorithms", type=listed(str), default=list(ALGORITHMS), help=", ".join(ALGORITHMS))
    option("--per-node", type=int, default=8)
    option("--rails", type=int, default=1)
    option("--inter", type=Link.parse, default="50,1.18,6", metavar="ALPHA,BETA,GAMMA")
    option("--intra", type=Link.parse, default="30,4,6", metavar="ALPHA,BETA,GAMMA")
    option("--shared", type=Link.parse, default="0.4,10,20", metavar="ALPHA,BETA,GAMMA")
    option("--segment-bytes", type=parse_size, default=Settings().segment_bytes)
    option("--halving-bytes", type=parse_size, default=1 << 17)
    option("--fit", metavar="FILE", help="JSON of scripts/bench_collectives.py")
    option("--plot", metavar="FILE.png", help="time against ranks; needs matplotlib")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.algorithms) - ALGORITHMS.keys())
    if unknown or min(options.ranks) < 2 or min(options.per_node, options.rails) < 1:
        parser.error("expected known algorithms, at least 2 ranks, 1 rank a node and 1 rail")
    machine = Machine(
        options.inter,
        options.intra,
        options.shared,
        options.per_node,
        options.rails,
        max(ELEMENT, options.segment_bytes),
        options.halving_bytes,
    )
    if options.fit:
        with open(options.fit) as file:
            fitted, rows = fit(json.load(file), machine)
        if not rows:
            parser.error(f"{options.fit}: no float32 row that a single link explains")
        show_fit(fitted, rows)
        machine = fitted._replace(per_node=options.per_node)
    times = simulate(options.sizes, options.ranks, options.algorithms, machine)
    show(times, options.algorithms, machine)
    if options.plot:
        plot(times, options.algorithms, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
