"""``EmulatedKernels``: the CUDA kernels, run on the CPU (see emulation.cpp)."""

import ctypes
import os
import subprocess
from pathlib import Path
from typing import final

import numpy as np

from distrt.arrays import dtype_of
from distrt.kernels.base import HostMemory, accumulator, kernel_name

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"]
# Without its library: a misaligned pack is an illegal instruction, and faulthandler names the test.
FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
# Few and odd, so that threads take several packs and the grid does not fit the array.
GRID, BLOCK = 3, 5


def build(directory: Path) -> ctypes.CDLL:
    library = directory / "emulation.so"
    include = [f"-I{CSRC / 'include'}", f"-I{CSRC}"]
    command = [os.environ.get("CXX", "g++"), *FLAGS, *include, str(HERE / "emulation.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@final
class EmulatedKernels(HostMemory):
    def __init__(self, library):
        self._library = library

    def _launch(self, verb, name, arrays, count, *scalars):
        pointers = [ctypes.c_void_p(None if a is None else a.ctypes.data) for a in arrays]
        launch = self._library[f"emulate_{verb}"]
        launch.restype = None
        launch(GRID, BLOCK, self._library[name], *pointers, ctypes.c_longlong(count), *scalars)

    def fold(self, op, dtype, out, partial, local):
        self._launch("fold", kernel_name("fold", dtype, op), (out, partial, local), local.size)

    def finish(self, op, dtype, out, partial, local, divisor=1.0):
        name = kernel_name("finish", dtype, op)
        scalars = (ctypes.c_double(divisor),)
        self._launch("finish", name, (out, partial, local), local.size, *scalars)

    def widen(self, dtype, out, local):
        if accumulator(dtype) is dtype:
            np.copyto(out, local)
        else:
            self._launch("widen", kernel_name("widen", dtype), (out, local), local.size)

    def sgd(self, param, grad, velocity, *, lr, momentum, nesterov):
        name = kernel_name("sgd", dtype_of(param))
        scalars = (ctypes.c_double(lr), ctypes.c_double(momentum), ctypes.c_int(nesterov))
        self._launch("sgd", name, (param, grad, velocity), param.size, *scalars)

    def adam(self, param, grad, m, v, *, alpha, beta1, beta2, epsilon):
        name = kernel_name("adam", dtype_of(param))
        scalars = [ctypes.c_double(x) for x in (alpha, beta1, beta2, epsilon)]
        self._launch("adam", name, (param, grad, m, v), param.size, *scalars)
