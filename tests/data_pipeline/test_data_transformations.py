"""tf.data's transformations against plain Python, alone and split over ranks."""

from __future__ import annotations

import itertools
import operator
import threading

import numpy as np
import pytest

from distrt.arrays import map_structure
from distrt.data import ArraySpec, Dataset, DistributedDataset
from distrt.errors import DTypeError, InvalidArgumentError

SIZES = [1, 2, 3, 4]
COUNTS = [0, 1, 2, 3, 4, 7, 13]


def plain(dataset):
    return [map_structure(lambda leaf: leaf.tolist(), element) for element in dataset]


def odd(x):
    return x % 2 == 1


# name -> (dataset over n rows, what plain Python makes of range(n))
CHAINS = {
    "filter": (lambda d: d.filter(odd), lambda n: list(range(1, n, 2))),
    "take_while": (lambda d: d.take_while(lambda x: x < 5), lambda n: list(range(min(n, 5)))),
    "scan": (
        lambda d: d.scan(np.int64(0), lambda s, x: (s + x, s + x)),
        lambda n: list(itertools.accumulate(range(n))),
    ),
    "flat_map": (
        lambda d: d.flat_map(lambda x: Dataset.range(x, x + x % 3)),
        lambda n: [y for x in range(n) for y in range(x, x + x % 3)],
    ),
    "concatenate": (
        lambda d: d.concatenate(Dataset.range(100, 103)),
        lambda n: [*range(n), 100, 101, 102],
    ),
    "shard": (lambda d: d.shard(3, 1), lambda n: list(range(n))[1::3]),
    "cache": (lambda d: d.cache(), lambda n: list(range(n))),
    "unbatch": (lambda d: d.batch(3).unbatch(), lambda n: list(range(n))),
    "unbatch_drop": (lambda d: d.batch(3, True).unbatch(), lambda n: list(range(n // 3 * 3))),
    "unbatch_map": (
        lambda d: d.batch(3).map(lambda x: x * 2).unbatch(),
        lambda n: list(range(0, 2 * n, 2)),
    ),
    "map": (lambda d: d.map(lambda x: x * x, 3), lambda n: [x * x for x in range(n)]),
    "enumerate": (
        lambda d: d.enumerate(5).map(lambda i, x: i * 100 + x),
        lambda n: [(i + 5) * 100 + i for i in range(n)],
    ),
    "zip": (
        lambda d: Dataset.zip((d, Dataset.range(10, 20))).map(lambda a, b: a * b),
        lambda n: [a * b for a, b in zip(range(n), range(10, 20), strict=False)],
    ),
    "repeat_filter": (
        lambda d: d.repeat(2).filter(odd).skip(1),
        lambda n: [x for _ in range(2) for x in range(n) if x % 2][1:],
    ),
    "generator": (
        lambda d: Dataset.from_generator(
            lambda: iter(d.as_numpy_iterator()), output_signature=ArraySpec((), np.int64)
        ),
        lambda n: list(range(n)),
    ),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CHAINS)
def test_elements_and_their_number(name, count):
    chain, expected = CHAINS[name]
    dataset, wanted = chain(Dataset.range(count)), expected(count)
    assert plain(dataset) == wanted
    assert plain(dataset) == wanted  # another pass
    assert dataset.cardinality() in (-2, len(wanted))
    assert dataset.element_spec == ArraySpec((), np.int64)
    assert plain(dataset.batch(4)) == [wanted[i : i + 4] for i in range(0, len(wanted), 4)]
    from_two = dataset._node.handles_from((0,), 2)
    assert [dataset._node.fetch(handle).tolist() for handle in from_two] == wanted[2:]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHAINS)
def test_the_parts_of_all_ranks_are_the_batches(name, size, on_ranks):
    chain, expected = CHAINS[name]

    def body(ranks):
        distributed = DistributedDataset(chain(Dataset.range(13)).batch(5), ranks)
        return [[part.tolist() for part in distributed] for _ in range(2)]

    seen, wanted = on_ranks(size, body), expected(13)
    batches = [wanted[i : i + 5] for i in range(0, len(wanted), 5)]
    for passed in range(2):
        steps = zip(*(mine[passed] for mine in seen), strict=True)
        assert [list(itertools.chain(*parts)) for parts in steps] == batches


# Where a rank makes its own rows only: its map function is called for no other.
LEAN = {
    "flat_map": lambda d: Dataset.range(1).flat_map(lambda _: d),
    "interleave": lambda d: Dataset.range(1).interleave(lambda _: d),
    "zip": lambda d: Dataset.zip((d, d.map(operator.neg))).map(lambda a, b: a),
    "concatenate": lambda d: d.concatenate(Dataset.range(0)),
    "cache": lambda d: d.cache(),
    "enumerate": lambda d: d.enumerate().map(lambda i, x: x),
    "unbatch": lambda d: d.batch(5).unbatch(),
    "shard": lambda d: d.shard(1, 0),
    "threads": lambda d: d.map(lambda x: x, 2),
    "padded": None,
}


@pytest.mark.parametrize("name", LEAN)
def test_a_rank_makes_only_its_own_rows(name, on_ranks):
    made, lock = {0: [], 1: [], 2: []}, threading.Lock()

    def body(ranks):
        def note(x):
            with lock:
                made[ranks.rank].append(int(x))
            return x

        rows = Dataset.range(12).map(note)
        if name == "padded":
            batches = rows.map(lambda x: np.full(int(x) % 3, x)).padded_batch(6, [3])
        else:
            batches = LEAN[name](rows).batch(6)
        distributed = DistributedDataset(batches, ranks)
        with lock:
            made[ranks.rank].clear()
        return len(list(distributed))

    assert on_ranks(3, body) == [2, 2, 2]
    for rank in range(3):
        own = [6 * step + 2 * rank + i for step in range(2) for i in range(2)]
        assert set(made[rank]) == set(own), name


def test_interleave_takes_turns_as_tf_data():
    def make(cycle, block):
        dataset = Dataset.range(4).interleave(
            lambda x: Dataset.range(10 * x, 10 * x + 3 - x % 2), cycle, block
        )
        return plain(dataset)

    assert make(1, 1) == [0, 1, 2, 10, 11, 20, 21, 22, 30, 31]
    assert make(2, 1) == [0, 10, 1, 11, 2, 20, 30, 21, 31, 22]
    assert make(2, 2) == [0, 1, 10, 11, 2, 20, 21, 30, 31, 22]
    assert make(4, 1) == make(None, 1) == [0, 10, 20, 30, 1, 11, 21, 31, 2, 22]
    assert make(9, 100) == make(1, 1)


def test_shuffles_inside_flat_map_agree_over_the_ranks(on_ranks):
    def body(ranks):
        dataset = Dataset.range(3).flat_map(lambda x: Dataset.range(10 * x, 10 * x + 8).shuffle(8))
        distributed = DistributedDataset(dataset.batch(6), ranks)
        return [[part.tolist() for part in distributed] for _ in range(2)]

    seen = on_ranks(3, body)
    orders = []
    for passed in range(2):
        steps = zip(*(mine[passed] for mine in seen), strict=True)
        orders.append([row for parts in steps for part in parts for row in part])
        assert sorted(orders[-1]) == [10 * x + i for x in range(3) for i in range(8)]
    assert orders[0] != orders[1]
    inside = [[row % 10 for row in orders[0] if row // 10 == x] for x in range(3)]
    assert inside[0] != inside[1] or inside[1] != inside[2]


def test_structures():
    pairs = Dataset.zip({"a": Dataset.range(3), "b": (Dataset.range(5, 9), Dataset.range(3))})
    assert plain(pairs) == [{"a": i, "b": (5 + i, i)} for i in range(3)]
    assert plain(pairs.batch(2)) == [
        {"a": [0, 1], "b": ([5, 6], [0, 1])},
        {"a": [2], "b": ([7], [2])},
    ]
    assert plain(pairs.batch(2).unbatch()) == plain(pairs)
    assert plain(pairs.filter(lambda x: x["a"] > 1)) == [{"a": 2, "b": (7, 2)}]
    assert plain(Dataset.zip(Dataset.range(2), Dataset.range(2)).enumerate()) == [
        (0, (0, 0)),
        (1, (1, 1)),
    ]
    assert Dataset.range(5).reduce(np.int64(0), lambda s, x: s + x) == 10
    texts = Dataset.from_tensor_slices(np.array(["a", "bcd"])).map(lambda x: str(x) + "!")
    (batch,) = texts.batch(4)
    assert batch.tolist() == ["a!", "bcd!"]


@pytest.mark.parametrize("size", SIZES)
def test_padded_batches(size, on_ranks):
    rows = [np.full((x, 2), x) for x in (1, 3, 2, 0, 4)]

    def make(shapes, values=None):
        dataset = Dataset.range(5).map(lambda i: rows[int(i)])
        return dataset.padded_batch(3, shapes, values)

    first = np.full((3, 3, 2), -1)
    second = np.full((2, 4, 2), -1)
    for batch, group in ((first, rows[:3]), (second, rows[3:])):
        for index, row in enumerate(group):
            batch[index, : len(row)] = row

    def body(ranks):
        return [
            [part.tolist() for part in DistributedDataset(make(shapes, -1), ranks)]
            for shapes in (None, [None, 2], [-1, None])
        ]

    for passed in range(3):
        seen = [mine[passed] for mine in on_ranks(size, body)]
        for step, batch in enumerate((first, second)):
            assert [row for mine in seen for row in mine[step]] == batch.tolist()
    (fixed, _) = make([5, 2], 7)
    assert fixed.shape == (3, 5, 2) and fixed[0, 1:].tolist() == [[7, 7]] * 4
    assert make([5, 2])._node.own_rows and not make(None)._node.own_rows
    with pytest.raises(InvalidArgumentError, match=r"shape \[3, 2\] does not fit .* \[2, 2\]"):
        list(make([2, 2]))
    with pytest.raises(InvalidArgumentError, match="2 dimensions"):
        make([2])
    with pytest.raises(InvalidArgumentError, match="expected a padded shape of 2"):
        make({"a": [2]})


REFUSED = {
    "filter_value": (lambda d: d.filter(lambda x: x), "expected .* to return a bool, got int64"),
    "filter_vector": (lambda d: d.batch(2).filter(lambda x: x > 1), r"got bool\[2\]"),
    "scan_single": (lambda d: d.scan(0, lambda s, x: s), "expected .* to return \\(new_state"),
    "scan_state": (lambda d: d.scan(0, lambda s, x: (1.5, x)), "the state to stay"),
    "flat_map": (lambda d: d.flat_map(lambda x: [x]), "to return a Dataset"),
    "flat_map_dtype": (
        lambda d: d.flat_map(lambda x: Dataset.range(2, output_type="f8" if x > 1 else "i8")),
        "one structure, rank and dtype.*float64",
    ),
    "zip": (lambda d: Dataset.zip((d, [1])), "structure of datasets"),
    "concatenate": (lambda d: d.concatenate([1]), "expected a Dataset"),
    "concatenate_dtype": (
        lambda d: d.concatenate(Dataset.range(2, output_type=np.float32)),
        "got element: float32",
    ),
    "shard_index": (lambda d: d.shard(2, 2), "expected 0 to 1, got 2"),
    "shard_count": (lambda d: d.shard(0, 0), "1 or more"),
    "unbatch": (lambda d: d.unbatch(), "scalars: element"),
    "unbatch_uneven": (
        lambda d: d.batch(2).map(lambda x: (x, x[:1])).unbatch(),
        r"\[0\]: 2, \[1\]: 1",
    ),
    "interleave": (lambda d: d.interleave(lambda x: d, 0), "cycle_length: expected 1 or more"),
    "map_calls": (lambda d: d.map(abs, 0), "num_parallel_calls: expected 1 or more"),
    "callable": (lambda d: d.filter(3), "expected a function"),
    "options": (lambda d: d.with_options({}), "expected distrt.data.Options"),
    "apply": (lambda d: d.apply(lambda d: 3), "to return a Dataset"),
    "batch_shapes": (
        lambda d: d.flat_map(lambda x: Dataset.from_tensors(np.ones(int(x)))).batch(2),
        "different shapes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name):
    make, text = REFUSED[name]
    with pytest.raises((InvalidArgumentError, DTypeError), match=f"(?s){text}"):
        list(make(Dataset.range(4)))


# -------------------------------------------------------------------- generators

SIGNATURE = {"x": ArraySpec((None,), np.float32), "y": ArraySpec((), np.int32)}


def test_generators_are_called_anew_and_closed():
    events = []

    def rows(n):
        events.append("start")
        try:
            for i in range(n):
                yield {"y": i, "x": [i] * i}
        finally:
            events.append("end")

    dataset = Dataset.from_generator(rows, args=(3,), output_signature=SIGNATURE)
    assert plain(dataset) == [{"x": [float(i)] * i, "y": i} for i in range(3)]
    assert next(iter(dataset))["x"].dtype == np.float32
    assert events == ["start", "end"] * 2
    assert dataset.element_spec == SIGNATURE and dataset.cardinality() == -2
    typed = Dataset.from_generator(
        lambda: [(1, [2.0])], (np.int64, np.float64), ((), (1,))
    ).element_spec
    assert typed == (ArraySpec((), np.int64), ArraySpec((1,), np.float64))
    seen = Dataset.from_generator(lambda: [np.ones(3), np.ones(2)])
    assert seen.element_spec == ArraySpec((None,), np.float64)
    assert plain(seen) == [[1.0] * 3, [1.0] * 2]


@pytest.mark.parametrize(
    ("element", "got"),
    [
        ({"x": [1.0]}, "y"),
        ([1.0], "instance of dict"),
        ({"x": [1.0], "y": 1.5}, "1.5 does not become int32"),
        ({"x": [1.0], "y": 2**40}, "does not fit into int32"),
        ({"x": 1.0, "y": 1}, r"shape \[\]"),
        ({"x": [[1.0]], "y": 1}, r"shape \[1, 1\]"),
        ({"x": np.ones(1, complex), "y": 1}, "complex128 does not become float32"),
        ({"x": None, "y": 1}, "NoneType"),
    ],
)
def test_what_a_generator_did_not_declare_is_refused(element, got):
    good = {"x": [1.0], "y": 1}
    dataset = Dataset.from_generator(lambda: [good, element], output_signature=SIGNATURE)
    pattern = r"(?s)element 1 of .*: expected \['x'\]: float32\[None\].*"
    with pytest.raises(InvalidArgumentError, match=pattern + got):
        list(dataset)


def test_bad_signatures_are_refused():
    with pytest.raises(InvalidArgumentError, match="got both"):
        Dataset.from_generator(list, np.int32, (), output_signature=SIGNATURE)
    with pytest.raises(InvalidArgumentError, match="output_shapes"):
        Dataset.from_generator(list, np.int32)
    with pytest.raises(InvalidArgumentError, match="gives nothing"):
        Dataset.from_generator(list)
    with pytest.raises(DTypeError, match="expected a function"):
        Dataset.from_generator([1, 2])


def test_generators_that_differ_are_told(on_ranks):
    def body(ranks):
        def rows():
            yield from np.random.default_rng(ranks.rank).standard_normal(8)

        dataset = Dataset.from_generator(rows, output_signature=ArraySpec((), np.float64))
        with pytest.raises(InvalidArgumentError, match="read different data up to step 0"):
            list(DistributedDataset(dataset.batch(4), ranks))
        return True

    assert on_ranks(2, body) == [True, True]


def test_a_fixed_first_dimension_is_no_batch(on_ranks):
    def body(ranks):
        dataset = Dataset.from_generator(
            lambda: [np.ones(4)], output_signature=ArraySpec((4,), np.float64)
        )
        with pytest.raises(InvalidArgumentError, match="is not batched"):
            DistributedDataset(dataset, ranks)
        return True

    assert on_ranks(2, body) == [True, True]
