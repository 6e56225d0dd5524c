"""``CudaKernels``: the CUDA kernels for CuPy arrays (layer 2: kernels).

May import: errors, reduce_op, arrays, kernels.base, cupy. The kernels are
csrc/cuda/kernels.cu, compiled here by NVRTC when a device first needs them.
CuPy's own compile path is not used, for two reasons: it appends ``-ftz=true``,
which would flush the float32 subnormals that the host keeps, and its cache does
not see edits of included headers. Compiling needs neither a GPU nor a driver.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import cupy
import numpy as np
from cupy_backends.cuda.libs import nvrtc

from distrt.arrays import DType, dtype_of
from distrt.errors import DeviceError
from distrt.kernels.base import Kernels, accumulator, agrees, kernel_name, kernel_names
from distrt.reduce_op import ReduceOp

__all__ = ["CudaKernels", "compile_cubin", "exported_names", "source"]

OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
# 2,048 threads fill a multiprocessor of every data-centre GPU; more blocks only queue up.
THREADS, BLOCKS_PER_MULTIPROCESSOR = 256, 8
PACK_BYTES = 16

_INCLUDE = re.compile(r'^#include "(distrt/\w+\.h)"\n', re.MULTILINE)


def _csrc() -> Path:
    """Return the directory of the sources: installed in the package, or the checkout's."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


@functools.cache
def source() -> str:
    """Return the text of kernels.cu with its headers pasted in, each once.

    Raises:
      DeviceError: the sources are not where they were installed.
    """
    root, seen = _csrc(), set[str]()

    def paste(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return read(root / "include" / name)

    def read(path: Path) -> str:
        return _INCLUDE.sub(paste, path.read_text().replace("#pragma once\n", ""))

    try:
        return read(root / "cuda" / "kernels.cu")
    except OSError as error:
        raise DeviceError(f"the CUDA sources are missing: {error}; install distrt again") from error


def compile_cubin(arch: str) -> bytes:
    """Compile the kernels for ``arch``: a cubin for "sm_90", PTX for "compute_90".

    Raises:
      DeviceError: NVRTC refuses; the text is its log.
    """
    program = nvrtc.createProgram(source(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS))
        image = nvrtc.getCUBIN(program) if arch.startswith("sm_") else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise DeviceError(f"NVRTC cannot compile the kernels for {arch}: {log}") from error
    finally:
        nvrtc.destroyProgram(program)
    return image if isinstance(image, bytes) else image.encode()


def exported_names(image: bytes) -> tuple[str, ...]:
    """Return the kernels' names in a cubin, sorted: each has a section of code of its own."""
    return tuple(sorted({name.decode() for name in re.findall(rb"\.text\.(distrt_\w+)", image)}))


def target(capability: int, supported: Sequence[int]) -> str:
    """Return what to compile for a device: a cubin's architecture, or PTX for the driver.

    A cubin runs on its own major version from its own minor version on. A GPU
    newer than NVRTC gets PTX, which its driver translates.

    Args:
      capability: of the device, ten times major plus minor.
      supported: the capabilities that NVRTC knows.

    Raises:
      DeviceError: the GPU is older than all that NVRTC knows.
    """
    older = [known for known in supported if known <= capability]
    if not older:
        raise DeviceError(
            f"the GPU has compute capability {capability / 10}, and this NVRTC compiles for "
            f"{min(supported) / 10} and newer: install the CuPy package of an older CUDA"
        )
    best = max(older)
    return f"sm_{best}" if best // 10 == capability // 10 else f"compute_{best}"


def _cache_directory() -> Path:
    chosen = os.environ.get("DISTRT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "distrt"


def cached_image(arch: str) -> bytes:
    """Return ``compile_cubin(arch)``, from the disk where the same was compiled before.

    The directory is ``DISTRT_CACHE_DIR``, by default ``~/.cache/distrt``. Files
    are named by what they were made from and appear whole, so ranks may share
    it; where it cannot be written, each process compiles for itself.
    """
    recipe = "\0".join([source(), arch, *OPTIONS, str(nvrtc.getVersion())])
    path = _cache_directory() / f"{arch}-{hashlib.sha256(recipe.encode()).hexdigest()[:32]}"
    try:
        return path.read_bytes()
    except OSError:
        image = compile_cubin(arch)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        os.replace(file.name, path)
    return image


class _Loaded(NamedTuple):
    """The kernels on one device, and how many blocks fill it."""

    functions: dict[str, Any]
    blocks: int


def _load() -> _Loaded:
    device = cupy.cuda.Device()
    module = cupy.cuda.function.Module()
    module.load(cached_image(target(int(device.compute_capability), nvrtc.getSupportedArchs())))
    functions = {name: module.get_function(name) for name in kernel_names()}
    blocks = device.attributes["MultiProcessorCount"] * BLOCKS_PER_MULTIPROCESSOR
    return _Loaded(functions, blocks)


def _pinned(nbytes: int) -> np.ndarray:
    # The pool's blocks are larger than asked for, and there is none for zero bytes.
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


@final
class CudaKernels(Kernels):
    """The kernels of csrc/cuda, on the current device and its current stream.

    The first call on a device loads them there; the first ever on a machine
    compiles them, which takes about ten seconds.
    """

    def __init__(self) -> None:
        self._devices: dict[int, _Loaded] = {}

    def _launch(self, name: str, count: int, arrays: Sequence[Any], *scalars: np.generic) -> None:
        """Start a kernel over ``count`` elements of each array; None is a null pointer."""
        if count == 0:
            return  # CuPy would start one block all the same
        device = cupy.cuda.runtime.getDevice()
        loaded = self._devices.get(device)
        if loaded is None:
            loaded = self._devices[device] = _load()
        narrowest = min(array.dtype.itemsize for array in arrays if array is not None)
        per_block = THREADS * (PACK_BYTES // narrowest)
        blocks = min(-(-count // per_block), loaded.blocks)
        # CuPy passes arguments by the size of their type, so each has exactly the kernel's.
        pointers = (np.uintp(0 if array is None else array.data.ptr) for array in arrays)
        loaded.functions[name]((blocks,), (THREADS,), (*pointers, np.int64(count), *scalars))

    def fold(self, op: ReduceOp, dtype: DType, out: Any, partial: Any, local: Any) -> None:
        """Write ``op(partial, local)`` to ``out``."""
        n, acc = local.size, accumulator(dtype).numpy
        assert agrees(n, out=(out, acc), partial=(partial, acc), local=(local, dtype.numpy))
        self._launch(kernel_name("fold", dtype, op), n, (out, partial, local))

    def finish(
        self,
        op: ReduceOp,
        dtype: DType,
        out: Any,
        partial: Any,
        local: Any,
        divisor: float = 1.0,
    ) -> None:
        """Write ``op(partial, local) / divisor`` to ``out``, rounded once."""
        n, acc, own = local.size, accumulator(dtype).numpy, dtype.numpy
        assert agrees(n, out=(out, own), partial=(partial, acc), local=(local, own))
        assert divisor == 1 or acc.kind == "f", f"{own} is not divided, got {divisor}"
        name = kernel_name("finish", dtype, op)
        self._launch(name, n, (out, partial, local), np.float64(divisor))

    def widen(self, dtype: DType, out: Any, local: Any) -> None:
        """Copy ``local`` to ``out`` in the accumulator dtype."""
        n, acc = local.size, accumulator(dtype).numpy
        assert agrees(n, out=(out, acc), local=(local, dtype.numpy))
        if acc != dtype.numpy:
            self._launch(kernel_name("widen", dtype), n, (out, local))
        elif n:
            out.data.copy_from_device_async(local.data, local.nbytes)

    def sgd(
        self,
        param: Any,
        grad: Any,
        velocity: Any | None,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Do one step of gradient descent, in place."""
        n, own = param.size, param.dtype
        kept = param if velocity is None else velocity
        assert agrees(n, param=(param, own), grad=(grad, own), velocity=(kept, own))
        name = kernel_name("sgd", dtype_of(param))
        scalars = (np.float64(lr), np.float64(momentum), np.int32(nesterov))
        self._launch(name, n, (param, grad, velocity), *scalars)

    def adam(
        self,
        param: Any,
        grad: Any,
        m: Any,
        v: Any,
        *,
        alpha: float,
        beta1: float,
        beta2: float,
        epsilon: float,
    ) -> None:
        """Do one step of Adam, in place."""
        n, own = param.size, param.dtype
        assert agrees(n, param=(param, own), grad=(grad, own), m=(m, own), v=(v, own))
        name = kernel_name("adam", dtype_of(param))
        scalars = map(np.float64, (alpha, beta1, beta2, epsilon))
        self._launch(name, n, (param, grad, m, v), *scalars)

    def empty(self, count: int, dtype: np.dtype) -> Any:
        """Return an uninitialised CuPy array of ``count`` elements on the current device."""
        return cupy.empty(count, dtype)

    def stage_out(self, view: Any) -> np.ndarray:
        """Return a pinned copy of the bytes of ``view``; waits for the current stream."""
        buffer = _pinned(view.nbytes)
        stream = cupy.cuda.get_current_stream()
        if view.nbytes:
            view.data.copy_to_host_async(buffer.ctypes.data, view.nbytes, stream)
        stream.synchronize()
        return buffer

    def landing(self, view: Any) -> np.ndarray:
        """Return a pinned buffer of the size of ``view``."""
        return _pinned(view.nbytes)

    def land(self, view: Any, buffer: np.ndarray) -> None:
        """Copy ``buffer`` to ``view`` and wait for it, so that the buffer is free again."""
        assert buffer.nbytes == view.nbytes, f"{buffer.nbytes} bytes for {view.nbytes}"
        if view.nbytes:
            stream = cupy.cuda.get_current_stream()
            view.data.copy_from_host_async(buffer.ctypes.data, view.nbytes, stream)
            stream.synchronize()
