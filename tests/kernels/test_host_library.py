"""The extension module itself: its names, its checks, the GIL and the exported symbols."""

import ctypes
import threading

import numpy as np
import pytest

from distrt import _host
from distrt.arrays import DTYPES
from distrt.kernels.base import kernel_names
from distrt.kernels.host import HostKernels
from distrt.reduce_op import ReduceOp


def test_names_are_those_of_the_dtype_table():
    assert _host.names() == kernel_names()
    # Twelve rows, four ops, two verbs; two half types to widen; two updates of four floats.
    assert len(_host.names()) == 12 * 4 * 2 + 2 + 2 * 4


def test_symbols_are_exported_and_run():
    library = ctypes.CDLL(_host.__file__)
    for name in _host.names():
        assert library[name]
    a, b = np.float32([1, 2, 3]), np.float32([10, 20, 30])
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (a, a, b)]
    library["distrt_fold_sum_f32"](*pointers, ctypes.c_longlong(3))
    assert a.tolist() == [11.0, 22.0, 33.0]
    library["distrt_finish_sum_f32"](*pointers, ctypes.c_longlong(3), ctypes.c_double(2.0))
    assert a.tolist() == [10.5, 21.0, 31.5]


def test_the_widest_instruction_set_is_chosen():
    assert _host.isas()[0] == "baseline"
    assert _host.isa() == _host.isas()[-1]
    with pytest.raises(ValueError, match="does not run 'sse9'"):
        _host.select("sse9")


def test_wrong_calls_are_refused():
    with pytest.raises(TypeError, match="fold takes 5 arguments, got 2"):
        _host.fold(0, 1)
    with pytest.raises(IndexError, match="kernel index 48 is not of this verb: expected 0 to 47"):
        _host.fold(48, 0, 0, 0, 0)
    with pytest.raises(IndexError):
        _host.adam(-1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(TypeError):
        _host.widen(96, "out", 0, 0)
    with pytest.raises(TypeError):
        _host.finish(48, 0, 0, 0, 0, "two")


def test_a_large_count_gives_up_the_gil():
    """A thread that waits for the GIL gets it during the kernel, and only above the threshold."""
    row, kernels = DTYPES["f32"], HostKernels()
    array = np.zeros(8_000_000, np.float32)

    def ticks_during_one_fold():
        ticks, running = [], threading.Event()

        def tick():
            running.wait()
            ticks.append(done)

        thread = threading.Thread(target=tick)
        thread.start()
        done = False
        running.set()
        kernels.fold(ReduceOp.SUM, row, array, array, array)
        done = True
        thread.join()
        return ticks

    old = _host.set_gil_threshold(1)
    try:
        assert any(ticks_during_one_fold() == [False] for _ in range(20))
    finally:
        assert _host.set_gil_threshold(old) == 1
