"""``Dataset``: sources, transformations, specs and argument errors, on one rank."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from distrt.data import INFINITE_CARDINALITY, ArraySpec, Dataset
from distrt.errors import DTypeError, InvalidArgumentError, NotFoundError

Pair = collections.namedtuple("Pair", ["x", "y"])


def values(dataset):
    return [element.tolist() for element in dataset]


def test_python_numbers_are_narrowed_and_arrays_keep_their_dtype():
    dataset = Dataset.from_tensor_slices(
        {"i": [1, 2], "f": [0.5, 1.5], "a": np.array([1.0, 2.0]), "h": np.array([1, 2], np.int8)}
    )
    first = next(iter(dataset.batch(2)))
    assert {name: leaf.dtype.name for name, leaf in first.items()} == {
        "i": "int32",
        "f": "float32",
        "a": "float64",
        "h": "int8",
    }
    assert first["f"].tolist() == [0.5, 1.5]


def test_structures_survive_slicing_mapping_and_batching():
    dataset = Dataset.from_tensor_slices(Pair([1, 2, 3], ({"z": [4, 5, 6]}, [7, 8, 9])))
    # A named tuple is one argument of map, a plain tuple is unpacked.
    mapped = dataset.map(lambda pair: (pair, pair.x + pair.y[1]))
    batch, total = next(iter(mapped.map(lambda pair, total: (pair, total * 2)).batch(3)))
    assert isinstance(batch, Pair)
    assert batch.y[0]["z"].tolist() == [4, 5, 6]
    assert total.tolist() == [16, 20, 24]


def test_a_list_is_data_in_sources_and_results():
    assert values(Dataset.from_tensor_slices([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert values(Dataset.range(2).map(lambda x: [x, x + 1])) == [[0, 1], [1, 2]]
    with pytest.raises(InvalidArgumentError, match="equal shapes"):
        Dataset.from_tensor_slices([[1], [2, 3]])


@pytest.mark.parametrize("args", [(0,), (5,), (2, 7), (7, 2), (1, 10, 3), (10, 1, -4)])
def test_range_is_python_range_in_int64(args):
    assert values(Dataset.range(*args)) == list(range(*args))
    assert len(Dataset.range(*args)) == len(range(*args))
    batch = list(Dataset.range(*args).batch(100))
    assert [part.dtype for part in batch] == [np.int64] * min(len(range(*args)), 1)
    assert Dataset.range(*args).element_spec == ArraySpec((), np.int64)


def test_from_tensors_is_one_element():
    dataset = Dataset.from_tensors((np.ones((2, 3)), 5))
    assert len(dataset) == 1
    assert dataset.element_spec == (ArraySpec((2, 3), np.float64), ArraySpec((), np.int32))


def test_elements_are_the_consumers_own():
    source = np.arange(6.0).reshape(3, 2)
    for dataset in (
        Dataset.from_tensor_slices(source),
        Dataset.from_tensors(source),
        Dataset.from_tensor_slices(source).batch(2),
        Dataset.from_tensor_slices(source).map(lambda row: np.negative(row, out=row)),
    ):
        for element in dataset:
            element[...] = -1
    assert source.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_memory_maps_and_strided_arrays_are_rows_too(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    strided = np.arange(24).reshape(12, 2)[::2]
    dataset = Dataset.from_tensor_slices((mapped, strided)).shuffle(6, seed=1).batch(6)
    (batch,) = dataset
    assert type(batch[0]) is np.ndarray
    order = (batch[0][:, 0] / 2).astype(int)
    assert sorted(order.tolist()) == list(range(6))
    assert batch[1].tolist() == strided[order].tolist()


def test_from_npz_reads_npz_and_npy(tmp_path):
    x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    batches = list(Dataset.from_npz(tmp_path / "data.npz").batch(3))
    assert [sorted(batch) for batch in batches] == [["x", "y"]] * 2
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == x.tolist()
    assert values(Dataset.from_npz(str(tmp_path / "x.npy"))) == x.tolist()
    assert len(Dataset.from_npz(tmp_path / "x.npy")) == 5


def test_from_npz_opens_the_file_when_needed_and_names_it(tmp_path):
    late = Dataset.from_npz(tmp_path / "late.npy").batch(2)
    with pytest.raises(NotFoundError, match=r"late\.npy"):
        next(iter(late))
    np.save(tmp_path / "late.npy", np.arange(3))
    assert values(late) == [[0, 1], [2]]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"\x93NUMPY\x01\x00v\x00{"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"bad\.npz"):
        list(Dataset.from_npz(tmp_path / "bad.npz"))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("drop", [False, True])
def test_batch_sizes_and_cardinality(rows, drop):
    dataset = Dataset.range(rows).batch(4, drop_remainder=drop)
    lengths = [len(batch) for batch in dataset]
    full, rest = divmod(rows, 4)
    assert lengths == [4] * full + ([rest] if rest and not drop else [])
    assert len(dataset) == dataset.cardinality() == len(lengths)
    assert dataset.element_spec == ArraySpec((4 if drop else None,), np.int64)


def test_take_skip_repeat_and_their_cardinalities():
    five = Dataset.range(5)
    expected = [
        (five.take(3), [0, 1, 2]),
        (five.take(9), [0, 1, 2, 3, 4]),
        (five.take(-1), [0, 1, 2, 3, 4]),
        (five.take(0), []),
        (five.skip(3), [3, 4]),
        (five.skip(9), []),
        (five.skip(-1), []),
        (five.repeat(2), [0, 1, 2, 3, 4] * 2),
        (five.repeat(0), []),
        (five.repeat().take(7), [0, 1, 2, 3, 4, 0, 1]),
        (five.repeat(3).skip(12), [2, 3, 4]),
        (Dataset.range(0).repeat(), []),
    ]
    for dataset, elements in expected:
        assert values(dataset) == elements
        assert len(dataset) == len(elements)


def test_an_infinite_dataset_has_no_length():
    endless = Dataset.range(5).repeat().batch(4)
    assert endless.cardinality() == INFINITE_CARDINALITY == -1
    assert endless.skip(3).cardinality() == INFINITE_CARDINALITY
    assert endless.take(3).cardinality() == 3
    assert endless
    with pytest.raises(TypeError, match="infinite"):
        len(endless)


def test_a_dataset_can_be_iterated_many_times_even_at_once():
    dataset = Dataset.range(4).map(lambda x: x * x)
    assert list(zip(values(dataset), values(dataset), strict=True)) == [
        (0, 0),
        (1, 1),
        (4, 4),
        (9, 9),
    ]
    first, second = iter(dataset), iter(dataset)
    assert [next(first), next(second), next(first)] == [0, 0, 1]


def test_element_spec_of_maps_finds_the_dimensions_that_vary():
    batches = Dataset.from_tensor_slices(np.ones((7, 3), np.float32)).batch(4)
    assert batches.map(lambda x: x.T).element_spec == ArraySpec((3, None), np.float32)
    assert batches.map(lambda x: x.sum(0)).element_spec == ArraySpec((3,), np.float32)
    ragged = Dataset.range(1, 6).map(lambda n: np.zeros(n))
    assert ragged.element_spec == ArraySpec((None,), np.float64)
    # Nothing to look at: the examples are zeros of the right shape.
    empty = Dataset.from_tensor_slices(np.ones((0, 3), np.int8)).map(lambda x: x + x)
    assert empty.element_spec == ArraySpec((3,), np.int8)


def test_batching_unequal_elements_says_what_was_found():
    ragged = Dataset.range(1, 6).map(lambda n: np.zeros(n)).batch(2)
    with pytest.raises(InvalidArgumentError, match=r"float64\[1\], float64\[2\]"):
        next(iter(ragged))
    mixed = Dataset.range(2).map(lambda n: (n, n) if n else {"n": n}).batch(2)
    with pytest.raises(InvalidArgumentError, match="different structures"):
        next(iter(mixed))


def test_as_numpy_iterator_gives_numpy_leaves():
    ((scalar, vector),) = Dataset.from_tensors((3, [1.5, 2.5])).as_numpy_iterator()
    assert isinstance(scalar, np.int32)
    assert vector.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dataset.from_tensor_slices({"x": [1, 2], "y": [1]}), r"\['x'\]: 2, \['y'\]: 1"),
        (lambda: Dataset.from_tensor_slices((np.ones(3), 5)), r"\[1\] is a scalar"),
        (lambda: Dataset.from_tensor_slices(()), "at least one array"),
        (lambda: Dataset.range(), "expected"),
        (lambda: Dataset.range(1, 5, 0), "step other than 0"),
        (lambda: Dataset.range(5).batch(0), "batch_size: expected 1 or more, got 0"),
        (lambda: Dataset.range(5).batch(-2), "got -2"),
        (lambda: Dataset.range(5).shuffle(0), "buffer_size: expected 1 or more"),
        (lambda: Dataset.range(5).prefetch(-2), "buffer_size: expected -1 or more"),
    ],
)
def test_bad_values_are_refused_at_once(make, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        make()
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.from_tensors(None),
        lambda: Dataset.from_tensor_slices(["a", "b"]),
        lambda: Dataset.range(2.5),
        lambda: Dataset.range(5).batch("4"),
        lambda: Dataset.range(5).map(3),
        lambda: Dataset.range(5).shuffle(5, seed=1.5),
    ],
)
def test_bad_types_are_refused_at_once(make):
    with pytest.raises(TypeError) as caught:
        make()
    assert isinstance(caught.value, DTypeError)


def test_repr_shows_the_pipeline_and_touches_nothing(tmp_path):
    dataset = Dataset.from_npz(tmp_path / "none.npz").shuffle(7).batch(4)
    assert repr(dataset) == (
        "<Dataset from_npz.shuffle(7, seed=None, reshuffle_each_iteration=True).batch(4, False)>"
    )
