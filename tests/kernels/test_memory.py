"""Allocation and staging: the bytes of an array out to a message and back."""

import numpy as np
import pytest

from distrt.arrays import DTYPES, to_numpy
from distrt.kernels import kernels_for
from distrt.kernels.host import HostKernels
from distrt.reduce_op import ReduceOp
from tests.kernels.samples import bits_of, place, sample


@pytest.mark.parametrize("size", [0, 1, 1021])
@pytest.mark.parametrize("name", list(DTYPES))
def test_bytes_travel_unchanged(kernels, name, size):
    dtype = DTYPES[name].numpy
    values = sample(np.uint8, size * dtype.itemsize, 1).view(dtype)
    source, _ = place(kernels, values, 1)
    target, _ = place(kernels, np.zeros_like(values), 1)
    message = kernels.stage_out(source)
    assert message.dtype == np.uint8
    assert message.nbytes == source.nbytes
    buffer = kernels.landing(target)
    buffer[...] = message
    kernels.land(target, buffer)
    assert to_numpy(target).tobytes() == values.tobytes()


def test_host_memory_is_staged_in_place():
    array = np.arange(3, dtype=np.float32)
    kernels = HostKernels()
    assert np.shares_memory(kernels.stage_out(array), array)
    assert np.shares_memory(kernels.landing(array), array)


def test_empty(kernels):
    array = kernels.empty(7, DTYPES["bf16"].numpy)
    assert array.shape == (7,)
    assert array.dtype == DTYPES["bf16"].numpy


def test_numpy_arrays_get_the_host_kernels():
    assert isinstance(kernels_for(np.zeros(2)), HostKernels)
    assert kernels_for(np.zeros(2)) is kernels_for(np.zeros(3))


def test_broken_invariants_are_named():
    kernels, row, f32 = HostKernels(), DTYPES["f32"], np.zeros(4, np.float32)
    with pytest.raises(AssertionError, match=r"partial: expected \[4\] of float32, got \(3,\)"):
        kernels.fold(ReduceOp.SUM, row, f32, f32[:3], f32)
    with pytest.raises(AssertionError, match="not contiguous"):
        kernels.fold(ReduceOp.SUM, row, f32[:2], f32[::2], f32[:2])
    with pytest.raises(AssertionError, match="starts inside an element"):
        inside = np.zeros(17, np.uint8)[1:].view(np.float32)
        kernels.fold(ReduceOp.SUM, row, f32, f32, inside)
    with pytest.raises(AssertionError, match="is not divided"):
        ints = np.zeros(4, np.int32)
        kernels.finish(ReduceOp.MEAN, DTYPES["i32"], ints, ints, ints, 2.0)
    with pytest.raises(AssertionError, match="as u8 first"):
        flags = np.zeros(4, np.bool_)
        kernels.fold(ReduceOp.MAX, DTYPES["bool"], flags.view("u1"), flags.view("u1"), flags)


def test_complex_and_bool_are_folded_as_their_kernel_rows(kernels):
    values = np.array([1 + 2j, -3 + 0.5j, 1j], np.complex64).view(np.float32)
    a, _ = place(kernels, values, 0)
    kernels.fold(ReduceOp.SUM, DTYPES["f32"], a, a, a)
    assert to_numpy(a).view(np.complex64).tolist() == [2 + 4j, -6 + 1j, 2j]
    left, _ = place(kernels, np.array([True, False, True, False]).view(np.uint8), 0)
    right, _ = place(kernels, np.array([True, True, False, False]).view(np.uint8), 0)
    kernels.fold(ReduceOp.MAX, DTYPES["u8"], left, left, right)
    assert bits_of(to_numpy(left)).view(np.bool_).tolist() == [True, True, True, False]
