"""Checkpoints on any number of ranks."""

import ml_dtypes
import numpy as np
import pytest

import distrt
from distrt.errors import DistrtError, DTypeError, InvalidArgumentError, NotFoundError
from distrt.train import SGD, Adam, Checkpoint

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def strategy():
    return distrt.MirroredStrategy(device="cpu")


@pytest.fixture
def folder(strategy, tmp_path_factory):
    return strategy.communicator.broadcast_object(tmp_path_factory.mktemp("checkpoint"))


def model(strategy, start, dtype=np.float32):
    with strategy.scope():
        return {
            "w": distrt.Variable(np.full((2, 3), start, dtype), name="w"),
            "deep": [distrt.Variable(np.float16(start), name="s")],
        }


def stepped(strategy, optimizer, variables):
    grads = [np.ones(v.shape) for v in variables]
    strategy.run(lambda: optimizer.apply_gradients(zip(grads, variables, strict=True)))


def test_what_was_written_is_read_and_training_goes_on_alike(strategy, folder):
    one, other = model(strategy, 1.0), model(strategy, 5.0)
    adam, later = Adam(0.1), Adam(0.1)
    flat = [one["w"], *one["deep"]]
    flat_other = [other["w"], *other["deep"]]
    stepped(strategy, adam, flat)
    path = folder / "a.safetensors"
    Checkpoint(model=one, optimizer=adam).write(path)
    assert [p.name for p in folder.iterdir()] == ["a.safetensors"]

    later.build(flat_other)
    Checkpoint(model=other, optimizer=later).read(path)
    assert later.iterations == 1
    stepped(strategy, adam, flat)
    stepped(strategy, later, flat_other)
    for a, b in zip(flat, flat_other, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes() and a.shape == b.shape


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint64", "bool", "complex64", "bfloat16"])
def test_every_dtype_comes_back(strategy, folder, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    Checkpoint(array=array, zero=np.array(array[0, 0])).write(folder / "c")
    other, zero = np.empty_like(array), np.empty((), dtype)
    Checkpoint(array=other, zero=zero).read(folder / "c")
    assert (other == array).all() and zero == array[0, 0]


def test_what_cannot_be_restored_is_not_saved(strategy, folder):
    for thing in (3, None, np.float32(1)):
        with pytest.raises(DTypeError, match=r"things/1: expected an array or a Variable"):
            Checkpoint(things=[np.ones(2), thing]).write(folder / "d")
    assert list(folder.iterdir()) == []


def test_an_optimizer_must_be_built_before(strategy, folder):
    one = model(strategy, 1.0)
    adam = Adam()
    adam.build([one["w"]])
    Checkpoint(optimizer=adam).write(folder / "e")
    with pytest.raises(InvalidArgumentError, match=r"optimizer\.build\(variables\)"):
        Checkpoint(optimizer=Adam()).read(folder / "e")


def test_a_missing_file_raises_on_every_rank(strategy, folder):
    with pytest.raises(NotFoundError, match=r"(?s)reading checkpoint .*rank 0: .*no checkpoint at"):
        Checkpoint(model=model(strategy, 1.0)).read(folder / "none")
    with pytest.raises(FileNotFoundError):
        Checkpoint(model=model(strategy, 1.0)).read(folder / "none")


def test_what_cannot_be_written_raises_on_every_rank_and_leaves_nothing(strategy, folder):
    with pytest.raises(DistrtError, match=r"(?s)writing checkpoint .*rank 0: .*Error"):
        Checkpoint(model=model(strategy, 1.0)).write(folder / "no" / "such" / "folder")
    assert list(folder.iterdir()) == []


def test_other_contents_are_refused_and_change_nothing(strategy, folder):
    path = folder / "b.safetensors"
    Checkpoint(model=model(strategy, 1.0)).write(path)
    wide = model(strategy, 2.0, np.float64)
    with pytest.raises(InvalidArgumentError, match=r"model/w: expected float64\[2, 3\].*float32"):
        Checkpoint(model=wide).read(path)
    assert (wide["w"].numpy() == 2.0).all()
    # Where one rank holds something else, no rank is changed.
    last = strategy.num_replicas_in_sync - 1
    Checkpoint(a=np.ones(3)).write(folder / "f")
    mine = np.zeros(4 if strategy.communicator.rank == last else 3)
    with pytest.raises(InvalidArgumentError, match=rf"rank {last}: .*a: expected float64\[4\]"):
        Checkpoint(a=mine).read(folder / "f")
    assert (mine == 0).all()
    with pytest.raises(InvalidArgumentError, match=r"missing \['optimizer/iterations'\]"):
        Checkpoint(model=model(strategy, 1.0), optimizer=SGD()).read(path)
