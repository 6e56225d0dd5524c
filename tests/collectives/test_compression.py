"""Error feedback: what was sent keeps up with what should have been, to the last bit."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distrt.collectives import compression
from distrt.collectives.compression import Compressor
from distrt.communicator import Communicator
from distrt.errors import CollectiveMismatchError, DTypeError, InvalidArgumentError
from distrt.settings import Settings
from distrt.transport.loopback import LoopbackWorld
from distrt.transport.shared_memory import share
from distrt.world import world

BF16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {"bfloat16": BF16, "float16": np.dtype(np.float16)}
# Half of the last place of a number x of each type is at most |x| times this, and, for
# numbers below the smallest normal one, at most the second number.
ROUNDING = {"bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25)}

pytestmark = pytest.mark.parametrize("name", HALVES)


def bound(name, largest):
    return max(np.multiply(ROUNDING[name][0], largest).max(initial=0.0), ROUNDING[name][1])


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        hnp.arrays(np.int32, 5, elements=st.integers(-(2**15), 2**15)), min_size=1, max_size=30
    ),
    scale=st.integers(-12, -4),
)
def test_sent_plus_residual_is_the_sum_of_the_inputs(name, steps, scale):
    # Multiples of one power of two, with sums of fewer than 24 bits: every addition of
    # float32 is exact, so nothing but the residual may be missing at any time.
    compressor = Compressor(name)
    inputs, sent = np.zeros(5), np.zeros(5)
    for step in steps:
        flat = np.ldexp(step.astype(np.float32), scale)
        before = flat.copy()
        carried = compressor.residuals.get("k", np.zeros(5, np.float32)).copy()
        half = compressor.compress("k", flat)
        assert half.dtype == HALVES[name] and (flat == before).all()
        assert (half == (flat + carried).astype(HALVES[name])).all(), "rounded to nearest even"
        inputs += flat
        sent += half.astype(np.float64)
        residual = compressor.residuals["k"]
        assert residual.dtype == np.float32
        assert (inputs - sent == residual).all()
        assert (np.abs(residual) <= bound(name, np.abs(flat + carried))).all()


def test_a_constant_too_small_to_be_seen_arrives_in_the_end(name):
    # Without feedback 1 + 2**-12 would be sent as 1 for ever.
    flat = np.array([1 + 2.0**-12, 2.0**-12, -3 - 2.0**-12], np.float32)
    compressor, sent, steps = Compressor(name), np.zeros(3), 4096
    for _ in range(steps):
        sent += compressor.compress(0, flat).astype(np.float64)
    error = np.abs(sent - steps * flat.astype(np.float64))
    # The bound does not grow with the number of steps.
    assert (error <= 2 * bound(name, np.abs(flat).astype(np.float64)) + 2.0**-12).all()
    assert (np.abs(steps * flat.astype(HALVES[name]).astype(np.float64) - sent)[0]) > 0.9


def test_the_residual_is_exact_for_any_float32(name):
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, 20000, np.uint64).astype(np.uint32)
    flat = bits.view(np.float32)
    compressor = Compressor(name)
    with np.errstate(all="raise"):
        half = compressor.compress(0, flat)
    wide, residual = half.astype(np.float64), compressor.residuals[0]
    finite = np.isfinite(wide)
    assert np.isfinite(residual).all() and (residual[~finite] == 0).all()
    assert (flat[finite].astype(np.float64) == wide[finite] + residual[finite]).all()
    assert 0 < finite.sum() < finite.size


def test_what_is_not_finite_is_sent_and_leaves_nothing(name):
    compressor = Compressor(name)
    largest = np.finfo(np.float32).max
    flat = np.array([np.nan, np.inf, -np.inf, largest, 1, 1 + 2.0**-20], np.float32)
    half = compressor.compress(0, flat).astype(np.float32)
    assert np.isnan(half[0]) and half[1] == np.inf and half[2] == -np.inf and half[3] == np.inf
    assert (compressor.residuals[0] == [0, 0, 0, 0, 0, 2.0**-20]).all()
    # The next step is not poisoned.
    ones = np.ones(6, np.float32)
    assert (compressor.compress(0, ones).astype(np.float32) == 1).all()
    assert (compressor.residuals[0] == [0, 0, 0, 0, 0, 2.0**-20]).all()
    if name == "float16":
        assert compressor.compress("big", np.float32([70000, 65504]))[0] == np.inf
        assert (compressor.residuals["big"] == 0).all()


def test_keys_are_apart_and_can_be_forgotten(name):
    compressor, fresh = Compressor(name), Compressor(name)
    third = np.full(3, 1 / 3, np.float32)
    for key in ("a", ("b", 1), "a"):
        compressor.compress(key, third)
    assert set(compressor.residuals) == {"a", ("b", 1)}
    assert (compressor.residuals["a"] != compressor.residuals["b", 1]).all()
    compressor.forget("a")
    compressor.forget("never seen")
    again = compressor.compress("a", third)
    assert again.tobytes() == fresh.compress("a", third).tobytes()
    assert compressor.residuals["a"].tobytes() == fresh.residuals["a"].tobytes()


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1023])
def test_sizes_and_layouts(name, n, monkeypatch):
    monkeypatch.setattr(compression, "_BLOCK", 64)
    compressor, wide = Compressor(name), np.arange(3 * n, dtype=np.float32)
    for turn in range(2):
        residual = np.zeros(n) if turn == 0 else compressor.residuals[n].astype(np.float64)
        half = compressor.compress(n, wide[::3])
        assert half.shape == (n,)
        assert (half == (wide[::3] + residual.astype(np.float32)).astype(HALVES[name])).all()
        assert (half.astype(np.float64) + compressor.residuals[n] == wide[::3] + residual).all()
    given = np.full(n + 2, 7, HALVES[name])
    assert compressor.compress("other", wide[:n], given[1:-1]).base is given
    assert (given[1:-1] == wide[:n].astype(HALVES[name])).all()
    assert (given[[0, -1]] == 7).all()
    out = np.full(n + 2, -1, np.float32)
    assert compressor.decompress(half, out[1:-1]).base is out
    assert (out[1:-1] == half.astype(np.float32)).all() and (out[[0, -1]] == -1).all()


def test_two_of_them_give_the_same_bits(name):
    rng, one, two = np.random.default_rng(3), Compressor(name), Compressor(HALVES[name])
    for _ in range(20):
        flat = rng.standard_normal(1000).astype(np.float32)
        assert one.compress(0, flat).tobytes() == two.compress(0, flat).tobytes()


def test_what_is_refused(name):
    compressor = Compressor(name)
    third = np.full(3, 1 / 3, np.float32)
    compressor.compress("w", third)
    kept = compressor.residuals["w"].copy()
    with pytest.raises(
        InvalidArgumentError,
        match=r"expected float32\[3\] under key 'w', as before, got "
        r"float32\[4\]: take another key, or call forget\('w'\)",
    ):
        compressor.compress("w", np.ones(4, np.float32))
    assert (compressor.residuals["w"] == kept).all()
    with pytest.raises(InvalidArgumentError, match=r"flat array, got shape \(2, 2\)"):
        compressor.compress("x", np.ones((2, 2), np.float32))
    with pytest.raises(DTypeError, match=r"compress: expected .* of float32, got float64"):
        compressor.compress("x", np.ones(3))
    with pytest.raises(DTypeError, match="got list"):
        compressor.compress("x", [1.0])
    half = compressor.compress("y", third)
    with pytest.raises(DTypeError, match=f"of {name}, got float32"):
        compressor.decompress(third, third)
    with pytest.raises(DTypeError, match=f"out: expected .* of float32, got {name}"):
        compressor.decompress(half, half)
    with pytest.raises(
        InvalidArgumentError, match=r"out of 3 elements on the host, got float32\[2\]"
    ):
        compressor.decompress(half, np.empty(2, np.float32))
    assert set(compressor.residuals) == {"w", "y"}
    for dtype in (np.float32, "int8", np.int8):
        with pytest.raises(DTypeError, match="expected bfloat16 or float16"):
            Compressor(dtype)


# ------------------------------------------------------------------ all_reduce


def on_ranks(size, body, algorithm="ring"):
    settings = Settings(
        segment_bytes=64,
        stage_bytes=256,
        inline_bytes=64,
        algorithm=algorithm,
        timeout_seconds=30.0,
    )
    nodes = []

    def program(transport):
        nodes.append(share(transport, range(size), settings))
        return body(Communicator(transport, settings, nodes[-1]))

    try:
        return LoopbackWorld(size).run(program)
    finally:
        for node in nodes:
            node.close()


def check_sums(comm, name, n, op):
    """What is exact in the half type comes out exact, and nothing is left over."""
    compressor = Compressor(name)
    total = np.float32(sum(2 * rank for rank in range(comm.size)))
    expected = (np.arange(n) % 5 * comm.size + total).astype(np.float32)
    if op == "MEAN":
        expected /= np.float32(comm.size)
    for _ in range(2):
        flat = (np.arange(n) % 5 + 2 * comm.rank).astype(np.float32)
        before = flat.copy()
        result = compressor.all_reduce(comm, "w", flat, op)
        assert result.dtype == np.float32 and (flat == before).all()
        half = expected.astype(HALVES[name]).astype(np.float32)
        if (half == expected).all():
            assert (result == expected).all()
            assert all((residual == 0).all() for residual in compressor.residuals.values())
        assert compressor.all_reduce(comm, "in place", flat, op, flat) is flat
    return result.tobytes()


@pytest.mark.parametrize("algorithm", ["ring,exchange", "direct"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("elements", [lambda n: 0, lambda n: 1, lambda n: n + 1, lambda n: 1023])
def test_all_reduce(name, algorithm, size, op, elements):
    results = on_ranks(size, lambda comm: check_sums(comm, name, elements(size), op), algorithm)
    assert len(set(results)) == 1, "all ranks have the same bits"


@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize("elements", [1, 1023, 40_000])
def test_all_reduce_over_mpi(name, elements):
    comm = world().communicator
    for op in ("SUM", "MEAN"):
        bits = check_sums(comm, name, elements, op)
        assert len(set(comm.all_gather_object(bits))) == 1


def test_sums_are_made_in_float32(name):
    # 256 and 1 and 1 make 258 in bfloat16 only where partial sums are of float32.
    def body(comm):
        flat = np.full(4, 256 if comm.rank == 0 else 1, np.float32)
        return Compressor(name).all_reduce(comm, 0, flat).tolist()

    assert on_ranks(3, body) == [[258.0] * 4] * 3


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_both_roundings_are_fed_back(name, op):
    # 3 x 171 / 512 + 2**-13 needs more bits than either type has: over many steps the sum of
    # the results stays within one last place of each residual, where it would drift.
    size, steps = 3, 200
    value = np.float32(171 / 512 + 2.0**-13)

    def body(comm):
        compressor, total = Compressor(name), np.zeros(5)
        for _ in range(steps):
            total += compressor.all_reduce(comm, 0, np.full(5, value), op)
        left = [residual.astype(np.float64) for residual in compressor.residuals.values()]
        return total, left

    results = on_ranks(size, body)
    divisor = size if op == "MEAN" else 1
    wanted = steps * size * float(value) / divisor
    drift = abs(float(np.float32(value).astype(HALVES[name])) - float(value)) * steps * size
    for total, _ in results:
        assert (np.abs(total - wanted) < 0.05).all()
        assert np.abs(total - wanted).max() < drift / divisor / 2
        assert total.tobytes() == results[0][0].tobytes()
    if op == "SUM":
        # To the bit: what has not come out yet is in the residuals of the ranks and the owners.
        own = sum(left[0] for _, left in results)
        sums = np.concatenate([left[1] for _, left in results])[:5]
        assert (results[0][0] + own + sums == wanted).all()


def test_half_of_the_bytes_travel(name):
    # Counted where they leave: 2 (n - 1) parts of n halves a rank, and nothing else that grows.
    class Counting:
        def __init__(self, comm):
            self.comm, self.size, self.sent = comm, comm.size, 0
            self.refusing, self.empty = comm.refusing, comm.empty

        def all_to_all(self, value, *, out):
            (array,) = value.values()
            self.sent += array.nbytes * (self.size - 1) // self.size
            return self.comm.all_to_all(value, out=out)

        def all_gather(self, value, *, out):
            self.sent += value.nbytes * (self.size - 1)
            return self.comm.all_gather(value, out=out)

    def body(comm):
        counting, flat = Counting(comm), np.ones(1200, np.float32)
        assert (Compressor(name).all_reduce(counting, 0, flat) == comm.size).all()
        return counting.sent

    assert on_ranks(4, body) == [2 * 3 * 1200 * 4 // 4 // 2] * 4


def test_ranks_that_disagree_learn_it(name):
    def refused(comm, flat, key="w", op="SUM", out=None):
        with pytest.raises(CollectiveMismatchError) as info:
            Compressor(name).all_reduce(comm, key, flat, op, out)
        return str(info.value)

    def body(comm):
        chief, ones = comm.rank == 0, np.ones(10, np.float32)
        # 9 and 10 elements on 2 ranks take as many bytes.
        text = refused(comm, ones[:9] if chief else ones)
        assert "float32[9]" in text and "float32[10]" in text
        assert "op=MEAN" in refused(comm, ones, op="MEAN" if chief else "SUM")
        assert "'v'" in refused(comm, ones, key="v" if chief else "w")
        assert "float32, got float64" in refused(comm, np.ones(3) if chief else ones)
        assert "expected SUM or MEAN" in refused(comm, ones, op="MAX" if chief else "SUM")
        out = np.empty(9, np.float32) if chief else None
        assert "out of 10 elements" in refused(comm, ones, out=out)
        return Compressor(name).all_reduce(comm, "w", ones).tolist()

    assert on_ranks(2, body) == [[2.0] * 10] * 2
