"""The kernels under test: the host library at every instruction set, the CUDA source on the CPU,
and the CUDA module where there is a GPU."""

import pytest

from distrt import _host
from distrt.kernels.host import HostKernels
from tests.kernels.emulated import EmulatedKernels, build


@pytest.fixture(scope="session")
def emulation(tmp_path_factory):
    """The emulated CUDA kernels as a library."""
    return build(tmp_path_factory.mktemp("emulation"))


def has_gpu():
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


KINDS = [*(f"host-{isa}" for isa in _host.isas()), "emulated-cuda", *["gpu-cuda"] * has_gpu()]


@pytest.fixture(scope="module", params=KINDS)
def kernels(request):
    """Each implementation of the kernels in turn."""
    memory, kind = request.param.split("-")
    if memory == "emulated":
        yield EmulatedKernels(request.getfixturevalue("emulation"))
    elif memory == "gpu":
        from distrt.kernels.cuda import CudaKernels

        yield CudaKernels()
    else:
        usual = _host.isa()
        _host.select(kind)
        assert _host.isa() == kind
        yield HostKernels()
        _host.select(usual)
