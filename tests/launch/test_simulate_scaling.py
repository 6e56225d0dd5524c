"""scripts/simulate_scaling.py: closed forms, symmetry, the fit, and a short run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from distrt.collectives import schedule

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_scaling.py"


@pytest.fixture(scope="module")
def sim():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # NamedTuple looks its module up.
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[SCRIPT.stem]


ALPHA, BETA, GAMMA = 2.0**-16, 2.0**-30, 2.0**-32


def machine(sim, **changes):
    link = sim.Link(ALPHA, BETA, GAMMA)
    settings = {"segment_bytes": 1 << 40, "halving_bytes": 0, "rails": 8, **changes}
    return sim.Machine(link, link, link, **settings)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("per_node", [1, 8])
def test_a_homogeneous_ring_in_closed_form(sim, n, per_node):
    chunk = 1 << 12
    step, fold = ALPHA + chunk * BETA, chunk * GAMMA
    one = machine(sim, per_node=per_node)
    count = n * chunk // 4
    assert sim.ring(count, n, one) == pytest.approx(2 * (n - 1) * step + (n - 1) * fold)
    assert sim.ring_verb("reduce_scatter", count, n, one) == pytest.approx((n - 1) * (step + fold))
    assert sim.ring_verb("all_gather", count, n, one) == pytest.approx((n - 1) * step)


def test_segments_hide_all_but_the_last_fold_and_one_latency_a_hop(sim):
    """The wire never rests: 2(n - 1)/n of the bytes, and what the first segment waits for."""
    n, segment, segments = 4, 1 << 12, 32
    one = machine(sim, segment_bytes=segment)
    link = sim.Link(segment * BETA / 4, BETA, GAMMA)
    one = one._replace(inter=link, intra=link)
    busy = 2 * (n - 1) * segments * segment * BETA
    seconds = sim.ring(n * segments * segment // 4, n, one)
    assert seconds == pytest.approx(busy + link.alpha)


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_pairs_in_closed_form(sim, n):
    log, size, share = n.bit_length() - 1, n << 10, (n - 1) / n
    short = sim.halving_doubling(size // 4, n, machine(sim, halving_bytes=size))
    assert short == pytest.approx(log * (ALPHA + size * (BETA + GAMMA)))
    long = sim.halving_doubling(size // 4, n, machine(sim))
    assert long == pytest.approx(2 * log * ALPHA + share * size * (2 * BETA + GAMMA))


@pytest.mark.parametrize("size", [1 << 8, 1 << 12, 1 << 18])
def test_a_surplus_rank_costs_a_step_or_two(sim, size):
    """Rank 1 is late by a step, so what the others send it is there already: no latency."""
    wire, fold = size * BETA, size * GAMMA
    found = sim.halving_doubling(size // 4, 5, machine(sim, halving_bytes=size))
    rank_4 = 3 * (ALPHA + wire + fold)
    rank_0 = (ALPHA + wire + fold) + 2 * (wire + fold) + (wire + ALPHA)
    assert found == pytest.approx(max(rank_4, rank_0))


def test_ranks_of_a_node_share_its_rails(sim):
    size = 1 << 12
    times = {
        rails: sim.halving_doubling(
            size // 4, 8, machine(sim, halving_bytes=size, per_node=4, rails=rails)
        )
        for rails in (1, 2, 4, 8)
    }
    # One of the three steps leaves the node, with four ranks at once.
    assert times[1] - times[4] == pytest.approx(3 * size * BETA)
    assert times[2] - times[4] == pytest.approx(size * BETA)
    assert times[8] == times[4]


def test_hierarchical_is_its_three_parts(sim):
    local, nodes, chunk = 8, 4, 1 << 10
    size = local * nodes * chunk
    one = machine(sim, per_node=local, rails=8)
    ring = 2 * (nodes - 1) * (ALPHA + chunk * BETA) + (nodes - 1) * chunk * GAMMA
    part = size // local
    scatter = 2 * ALPHA + (size + part) * BETA + (local - 1) * part * GAMMA
    gather = 2 * ALPHA + 2 * size * BETA
    found = sim.hierarchical(size // 4, local * nodes, one)
    assert found == pytest.approx(scatter + ring + gather)
    assert sim.hierarchical(size // 4, 12, one) is None, "nodes of unequal sizes"
    assert sim.direct(size // 4, 9, one) is None and sim.direct(size // 4, 8, one) > 0


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_the_program_of_rank_0_stands_for_all(size):
    for make in (schedule.all_reduce, schedule.reduce_scatter, schedule.all_gather):
        first = make(size, 0)
        for rank in range(size):
            shifted = [hop._replace(chunk=(hop.chunk + rank) % size) for hop in first]
            assert list(make(size, rank)) == shifted


def test_nothing_to_send_takes_no_time(sim):
    assert sim.ring(0, 8, machine(sim)) == 0
    assert sim.halving_doubling(0, 8, machine(sim)) == 0
    one_element = sim.ring(1, 4, machine(sim))
    assert one_element == pytest.approx(6 * (ALPHA + 4 * BETA) + 3 * 4 * GAMMA)


def row(verb, size, algorithm, seconds):
    return {
        "verb": verb,
        "size_bytes": size,
        "dtype": "float32",
        "algorithm": algorithm,
        "registered": True,
        "time_us": seconds * 1e6,
    }


@pytest.mark.parametrize("link", ["shared", "intra", "inter"])
def test_the_fit_finds_the_link_that_made_the_times(sim, link):
    true = machine(sim, per_node=1 if link == "inter" else 4)
    model = sim.shared_verb if link == "shared" else sim.ring_verb
    rows = [
        row(verb, size, "direct" if link == "shared" else "ring", model(verb, size // 4, 4, true))
        for verb in ("all_reduce", "reduce_scatter", "all_gather")
        for size in (1 << 8, 1 << 14, 1 << 20)
    ]
    start = true._replace(**{link: sim.Link(1.0, 1.0, 1.0)})
    report = {"ranks": 4, "nodes": 4 if link == "inter" else 1, "rows": rows}
    found, used = sim.fit(report, start)
    assert getattr(found, link) == pytest.approx((ALPHA, BETA, GAMMA), rel=1e-6)
    assert len(used) == 9 and {name for name, _, _ in used} == {link}
    assert [found.inter, found.intra, found.shared].count(sim.Link(1.0, 1.0, 1.0)) == 0


def test_what_cannot_be_told_apart_keeps_its_value(sim):
    """All rows fold: a byte that moves and a byte that is folded come in one ratio."""
    true = machine(sim, per_node=4)
    sizes = (1 << 8, 1 << 14, 1 << 20)
    rows = [row("all_reduce", s, "ring", sim.ring(s // 4, 4, true)) for s in sizes]
    start = true._replace(intra=sim.Link(1.0, 1.0, GAMMA))
    found, _ = sim.fit({"ranks": 4, "nodes": 1, "rows": rows}, start)
    assert found.intra == pytest.approx((ALPHA, BETA, GAMMA), rel=1e-6)


def test_a_run_prints_every_row_and_fits_a_report(sim, tmp_path):
    true = machine(sim, per_node=2)
    rows = [row("all_reduce", s, "ring", sim.ring(s // 4, 2, true)) for s in (64, 1 << 20)]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"ranks": 2, "nodes": 1, "rows": rows}))
    options = ["--ranks", "2,6,16", "--sizes", "64,1M", "--fit", str(report)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    table = [line for line in lines if len(line) == 7 and line[0].isdigit()]
    assert [line[:3] for line in table] == [
        [size, ranks, nodes]
        for size in ("64", "1048576")
        for ranks, nodes in (("2", "1"), ("6", "1"), ("16", "2"))
    ]
    assert all(float(line[3]) > 0 and float(line[4]) > 0 for line in table)
    assert [line[5] == "-" for line in table] == [True, True, False] * 2
    fitted = [line for line in lines if line and line[0] == "intra" and "all_reduce" in line]
    assert len(fitted) == 2 and all(line[-1].endswith("x") for line in fitted)


def test_a_plot_is_written(sim, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "scaling.png"
    options = ["--ranks", "2,4,16", "--sizes", "64K", "--plot", str(path)]
    assert sim.main(options) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [["--ranks", "1"], ["--algorithms", "tree"], ["--inter", "1"]])
def test_bad_options_are_refused(sim, options):
    with pytest.raises(SystemExit) as stop:
        sim.main(options)
    assert stop.value.code == 2
