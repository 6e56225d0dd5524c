"""Folds and finishes of two ranks' halves, at every instruction set, against NumPy, by ``==``."""

import ctypes

import numpy as np
import pytest

from distrt import _host
from distrt.arrays import DTYPES
from distrt.kernels.reference import ReferenceKernels
from distrt.reduce_op import ReduceOp
from tests.kernels.samples import OFFSETS, SIZES, place, same, sample, untouched

REFERENCE = ReferenceKernels()
HALVES = ("f16", "bf16")
OPS = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
ADDRESSES = [ctypes.c_void_p] * 3


def pair_kernel(verb, name, op):
    """Return the active variant's kernel out of the struct Variant (variant.h), as _shared does."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    active = pointer(_host.kernels(), b"distrt._host.kernels")
    variant = ctypes.CFUNCTYPE(ctypes.c_void_p)(active)()
    rows = len(HALVES) * len(OPS)
    row = HALVES.index(name) * len(OPS) + OPS.index(op)
    at = 1 + len(_host.names()) + (0 if verb == "fold" else rows) + row
    address = ctypes.c_void_p.from_address(variant + at * ctypes.sizeof(ctypes.c_void_p)).value
    divisor = [] if verb == "fold" else [ctypes.c_double]
    return ctypes.CFUNCTYPE(None, *ADDRESSES, ctypes.c_longlong, *divisor)(address)


@pytest.fixture(params=_host.isas())
def isa(request):
    usual = _host.isa()
    _host.select(request.param)
    yield request.param
    _host.select(usual)


def run(kernel, out, first, second, *divisor):
    kernel(out.ctypes.data, first.ctypes.data, second.ctypes.data, second.size, *divisor)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.fold)
@pytest.mark.parametrize("name", HALVES)
def test_pair_fold_and_finish_equal_the_reference(isa, name, op):
    row = DTYPES[name]
    fold, finish = pair_kernel("fold", name, op), pair_kernel("finish", name, op)
    for size in SIZES:
        first, second = sample(row.numpy, size, size), sample(row.numpy, size, size + 1)
        partial = first.astype(np.float32)
        total = np.empty_like(partial)
        REFERENCE.fold(op, row, total, partial, second)
        for divisor, offsets in zip((1.0, 2.0, 3.0) * 2, OFFSETS, strict=False):
            result = np.empty_like(first)
            REFERENCE.finish(op, row, result, partial, second, divisor)
            out, block = place(REFERENCE, np.zeros_like(total), offsets[0])
            rounded, rounded_block = place(REFERENCE, np.zeros_like(first), offsets[3])
            a, _ = place(REFERENCE, first, offsets[1])
            b, _ = place(REFERENCE, second, offsets[2])
            run(fold, out, a, b)
            run(finish, rounded, a, b, divisor)
            assert same(out, total) and untouched(out, block), (size, offsets)
            assert same(rounded, result) and untouched(rounded, rounded_block), (size, offsets)
            run(finish, a, a, b, divisor)
            assert same(a, result), (size, offsets, divisor, "in place")


@pytest.mark.parametrize("name", HALVES)
def test_a_pair_of_every_half_and_some_others_sums_as_in_numpy(isa, name):
    numpy = DTYPES[name].numpy
    finish = pair_kernel("finish", name, ReduceOp.SUM)
    every = np.arange(2**16, dtype=np.uint16).view(numpy)
    for seed in range(16):
        other = sample(numpy, every.size, seed)
        got = np.empty_like(every)
        run(finish, got, every, other, 1.0)
        with np.errstate(all="ignore"):
            expected = (every.astype(np.float32) + other.astype(np.float32)).astype(numpy)
        assert same(got, expected)
