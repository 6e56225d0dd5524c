"""The plot of bench_collectives.py: time or busbw against size, for each verb and place.

Needs matplotlib, which is imported where it is drawn with.
"""

COLUMNS = 3
KINDS = {
    "time": "us, net in the cycle",
    "busbw": "busbw in GB/s, of the call's own time",
}
# Colours that the colour-blind can tell apart (Okabe and Ito, 2008).
STYLES = {
    "distrt": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "peer": {"color": "#D55E00", "marker": "s", "linestyle": "-"},
    "limit": {"color": "#555555", "marker": None, "linestyle": "--"},
}


def pyplot():
    """Return matplotlib's pyplot, drawing to files; ends the program where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(
            f"bench_collectives: --plot needs matplotlib: pip install matplotlib ({error})"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def values(row, what):
    """Return what is drawn of a row: {"distrt", "peer", "limit"} -> number or None."""
    times = {
        "distrt": row["cycle_us"] if what == "time" else row["time_us"],
        "peer": row["peer_cycle_us"] if what == "time" else row["peer_time_us"],
        "limit": row["limit_us"],
    }
    if what == "time":
        return times
    carried = row["busbw_gbps"] * row["time_us"]
    return {name: time and carried / time for name, time in times.items()}


def panels(rows):
    """Return (verb, in place) -> its rows, in ascending size."""
    found = {}
    for row in sorted(rows, key=lambda row: row["size_bytes"]):
        found.setdefault((row["verb"], row["in_place"]), []).append(row)
    return found


def draw(report, what, path):
    """Write the plot of a report to ``path``; ``what``: a key of KINDS."""
    plot, drawn = pyplot(), panels(report["rows"])
    columns = min(COLUMNS, len(drawn))
    lines = -(-len(drawn) // columns)
    size = (max(6.5, 5 * columns), 0.8 + 4.2 * lines)
    figure, axes = plot.subplots(lines, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(drawn) :]:
        axis.remove()
    for axis, ((verb, in_place), rows) in zip(axes.flat, drawn.items(), strict=False):
        panel(axis, rows, what, report["mpi"])
        algorithms = dict.fromkeys(row["algorithm"] for row in rows)
        place = "in place" if in_place else "out of place"
        axis.set_title(f"{verb}, {place} ({', '.join(algorithms)})", fontsize=10)
    first = report["rows"][0]
    trip = report["flag_round_trip_us"]
    figure.suptitle(
        f"{report['ranks']} ranks on {report['nodes']} host(s), {first['dtype']} {first['op']}, "
        f"{'registered' if first['registered'] else 'plain'} arrays"
        + (f"; flag round trip {trip:.2f} us" if trip else ""),
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plot.close(figure)


def panel(axis, rows, what, mpi):
    from matplotlib.ticker import LogLocator, NullFormatter

    peers = {row["peer"]: row["peer_dtype"] for row in rows if row["peer"]}
    names = {"distrt": "distrt", "limit": "limit", "peer": ""}
    for peer, dtype in peers.items():
        other = f" ({dtype})" if dtype != rows[0]["dtype"] else ""
        names["peer"] = f"{mpi if peer == 'mpi' else peer}{other}"
    for name, style in STYLES.items():
        points = [(row["size_bytes"], values(row, what)[name]) for row in rows]
        points = [(size, value) for size, value in points if value]
        if points:
            sizes, heights = zip(*points, strict=True)
            axis.plot(sizes, heights, label=names[name], markersize=4, **style)
    axis.set(yscale="log", xlabel="bytes", ylabel=KINDS[what])
    # Plain numbers; over few decades the powers of ten alone would be too few of them.
    bottom, top = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top / bottom < 2e3 else (1,)))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    # Sizes are powers of two: 1K and 1M where a decimal axis would have 10^3 and 10^6.
    low, high = rows[0]["size_bytes"], rows[-1]["size_bytes"]
    axis.set_xscale("log", base=2)
    ticks = [1 << bits for bits in range(0, 41, 4) if low / 2 <= 1 << bits <= high * 2]
    axis.set_xticks(ticks, [short(tick) for tick in ticks])
    axis.grid(alpha=0.3, which="major")
    axis.legend(fontsize=9)


def short(size):
    """Write 65536 as 64K."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)
