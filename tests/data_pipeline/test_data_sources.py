"""Sparse matrices and several .npz files as sources."""

from __future__ import annotations

import numpy as np
import pytest

from distrt.data import AutoShardPolicy, Dataset, DistributedDataset, Options
from distrt.errors import InvalidArgumentError, NotFoundError


@pytest.mark.parametrize("kind", ["csr_matrix", "csr_array", "coo_matrix"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sparse_rows_become_dense(kind, size, on_ranks):
    sparse = pytest.importorskip("scipy.sparse")
    dense = (np.arange(35).reshape(7, 5) % 3).astype(np.float32)
    matrix = getattr(sparse, kind)(dense)

    def make():
        return Dataset.from_tensor_slices({"x": matrix, "y": np.arange(7)})

    assert [row["x"].tolist() for row in make()] == dense.tolist()
    assert make().element_spec["x"].shape == (5,) and make().element_spec["x"].dtype == np.float32

    def body(ranks):
        distributed = DistributedDataset(make().shuffle(7, seed=1).batch(4), ranks)
        return [(part["x"].tolist(), part["y"].tolist()) for part in distributed]

    seen = on_ranks(size, body)
    rows = {y: x for mine in seen for part in mine for x, y in zip(*part, strict=True)}
    assert [rows[i] for i in range(7)] == dense.tolist()


def test_a_sparse_matrix_of_other_length_is_refused():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(InvalidArgumentError, match=r"\['x'\]: 3, \['y'\]: 2"):
        Dataset.from_tensor_slices({"x": sparse.csr_matrix(np.eye(3)), "y": np.arange(2)})


def by(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    return dataset.with_options(options)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("policy", ["FILE", "DATA"])
def test_npz_files(tmp_path, size, policy, on_ranks):
    paths, at = [], 0
    for number, rows in enumerate((3, 4, 2)):
        paths.append(tmp_path / f"{number}.npz")
        x = np.arange(at, at + rows)
        np.savez(paths[-1], x=x, y=np.stack([x, -x], 1).astype(np.float32))
        at += rows
    dataset = Dataset.from_npz(paths)
    assert [int(row["x"]) for row in dataset] == list(range(9))

    def body(ranks):
        distributed = DistributedDataset(by(dataset.batch(4), policy), ranks, workers=True)
        return [(part["x"].tolist(), part["y"].tolist()) for part in distributed]

    seen = on_ranks(size, body)
    assert sorted(x for mine in seen for part in mine for x in part[0]) == list(range(9))
    assert all([x, -x] == y for mine in seen for part in mine for x, y in zip(*part, strict=True))
    if policy == "FILE" and size == 3:
        assert [[x for part in mine for x in part[0]] for mine in seen] == [
            [0, 1, 2],
            [3, 4, 5, 6],
            [7, 8],
        ]


def test_npz_files_of_other_names_or_missing(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(2))
    np.savez(tmp_path / "b.npz", z=np.arange(2))
    with pytest.raises((ValueError, InvalidArgumentError)):
        list(Dataset.from_npz([tmp_path / "a.npz", tmp_path / "b.npz"]).batch(4))
    with pytest.raises(NotFoundError, match="missing"):
        list(Dataset.from_npz([tmp_path / "missing.npz"]))
