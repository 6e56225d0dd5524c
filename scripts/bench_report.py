"""What bench_collectives.py prints: the lines above the tables, a row, and what is wrong with it.

A row is a dictionary of the report that --json writes.
"""

import numpy as np


def title(report, peer, options):
    """Return the lines above the tables."""
    trip, wire = report["flag_round_trip_us"], report["wire_gbps"]
    facts = ["no shared memory" if trip is None else f"flag round trip {trip:.2f} us"]
    if wire:
        facts.append(f"TCP goodput {1e3 * wire:.1f} MB/s")
    kind = "registered" if options.registered else "plain"
    mode = "net cost in a write, call, read cycle" if options.cycle else "call alone, repeated"
    lines = [
        f"# {report['ranks']} ranks on {report['nodes']} host(s), {report['mpi']}; "
        + "; ".join(facts),
        f"# {kind} arrays; net us: {mode}; medians of the slowest rank",
    ]
    dtype = np.dtype(options.dtype)
    stands = peer and peer.dtype_for("all_reduce", dtype)
    if peer and stands is None:
        lines.append(f"# {peer.name} cannot reduce {dtype.name}: nothing to compare with")
    elif peer and stands != dtype:
        same = "bytes" if stands.itemsize == dtype.itemsize else "count, so of more bytes"
        lines.append(
            f"# {peer.name} cannot reduce {dtype.name}: its {stands.name} of the same {same} "
            "stands for it"
        )
    return "\n".join(lines)


def header(name):
    return (
        "#       size       count     type  redop place |    time  algbw  busbw #wrong |    net us"
        f" | {name + ' net':>9} {'vs ' + name:>7} | % limit"
    )


def text_of(row):
    ours, peer, limit = row["cycle_us"], row["peer_cycle_us"], row["limit_us"]
    return (
        f"{row['size_bytes']:>12} {row['count']:>11} {row['dtype']:>8} {row['op']:>6} "
        f"{'in' if row['in_place'] else 'out':>5} | {row['time_us']:>7.1f} "
        f"{row['algbw_gbps']:>6.2f} {row['busbw_gbps']:>6.2f} {row['wrong']:>6} | "
        + (f"{ours:>9.2f} | " if ours else f"{'-':>9} | ")
        + (f"{peer:>9.2f}" if peer else f"{'-':>9}")
        + (f" {peer / ours:>6.2f}x" if peer and ours else f" {'-':>7}")
        + (f" | {100 * limit / row['time_us']:>6.0f} %" if limit else f" | {'-':>8}")
    )


def problem_with(row):
    """Return why a row cannot be right, or an empty text."""
    if row["wrong"]:
        return f"{row['verb']} of {row['size_bytes']} bytes: {row['wrong']} wrong elements"
    limit = row["limit_us"]
    # Below 20 us the two are within the clock's and the scheduler's noise.
    # A shaped link lets a burst of some 100 KiB pass at once. Plain arrays pass through slots
    # in turns: ranks that wait for nobody drift apart, their slots leave the cache they
    # share, and the same traffic takes longer than in step. Theirs is no bound.
    if not row["registered"] and row["limit"] == "memory":
        return ""
    least = 16 << 20 if row["limit"] == "wire" else 1 << 20
    if limit and limit > 20 and limit > 1.05 * row["time_us"] and row["size_bytes"] >= least:
        share = 100 * limit / row["time_us"]
        return (
            f"{row['verb']} of {row['size_bytes']} bytes took {share:.0f} % of its limit's speed: "
            "the limit or the call was disturbed, run it again"
        )
    return ""
