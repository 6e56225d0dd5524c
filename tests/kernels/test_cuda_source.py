"""The CUDA build without a GPU: NVRTC, nvcc and the names; ``emulated-cuda`` runs the kernels."""

import re
import shutil
import subprocess

import pytest

from distrt.errors import DeviceError
from distrt.kernels import kernels_for
from distrt.kernels.base import kernel_names
from tests.kernels.conftest import has_gpu
from tests.kernels.emulated import CSRC

cuda = pytest.importorskip("distrt.kernels.cuda", reason="CuPy is not installed")
nvrtc = cuda.nvrtc


@pytest.fixture(scope="module")
def nvrtc_works():
    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy raises what its loader raised
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.fixture(scope="module")
def hopper(nvrtc_works):
    """The cubin for compute capability 9.0 and the assembler's report."""
    program = nvrtc.createProgram(cuda.source(), "kernels.cu", (), ())
    options = ("-arch=sm_90", "--ptxas-options=-v", *cuda.OPTIONS)
    nvrtc.compileProgram(program, options)
    return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)


def test_cuda_arrays_get_the_cuda_kernels():
    if not has_gpu():
        pytest.skip("no GPU on this machine: the gpu-cuda runs of these tests are left out")
    import cupy

    assert isinstance(kernels_for(cupy.zeros(2)), cuda.CudaKernels)


def test_cuda_source_is_one_text():
    text = cuda.source()
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("struct Storage<bf16>") == 1


def test_nvrtc_exports_the_names_of_the_table(hopper):
    image, _ = hopper
    assert cuda.exported_names(image) == tuple(sorted(kernel_names()))


def test_nvrtc_spills_no_register(hopper):
    _, log = hopper
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert len(frames) == len(kernel_names())
    assert set(frames) == {("0", "0")}


def test_nvrtc_ptx_for_a_newer_gpu_keeps_the_bits_of_the_host(nvrtc_works):
    ptx = cuda.compile_cubin("compute_120").decode()
    assert ".ftz" not in ptx
    assert not re.search(r"\bfma\.rn", ptx)
    assert set(re.findall(r"(?:div|sqrt)\.\w+\.f\d\d", ptx)) == {
        "div.rn.f32", "div.rn.f64", "sqrt.rn.f32", "sqrt.rn.f64"
    }  # fmt: skip
    # Loads through the read-only cache would miss what a peer writes.
    assert ".nc" not in ptx
    body = ptx.split(".entry distrt_fold_sum_bf16")[1].split(".entry")[0]
    assert "ld.global.v4" in body
    assert "st.global.v4" in body


def test_nvrtc_image_comes_from_the_cache_the_second_time(nvrtc_works, tmp_path, monkeypatch):
    monkeypatch.setenv("DISTRT_CACHE_DIR", str(tmp_path / "new" / "cache"))
    image = cuda.cached_image("sm_75")
    assert cuda.exported_names(image) == tuple(sorted(kernel_names()))
    assert cuda.cached_image("sm_75") == image
    (file,) = (tmp_path / "new" / "cache").iterdir()
    assert file.name.startswith("sm_75-")
    # Whatever lies there is taken, so this shows that nothing was compiled.
    file.write_bytes(b"from the disk")
    assert cuda.cached_image("sm_75") == b"from the disk"


def test_nvrtc_works_without_a_place_for_the_cache(nvrtc_works, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DISTRT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cuda, "compile_cubin", lambda arch: arch.encode())
    assert cuda.cached_image("sm_90") == b"sm_90"


def test_nvrtc_refusal_shows_the_log(nvrtc_works):
    with pytest.raises(DeviceError, match="cannot compile the kernels for sm_1"):
        cuda.compile_cubin("sm_1")


def test_cuda_target_of_a_device():
    known = (75, 80, 86, 90, 100)
    targets = [cuda.target(gpu, known) for gpu in (75, 80, 87, 89, 90, 103, 120)]
    assert targets == ["sm_75", "sm_80", "sm_86", "sm_86", "sm_90", "sm_100", "compute_100"]
    with pytest.raises(DeviceError, match=r"compute capability 7\.0, .* 7\.5 and newer"):
        cuda.target(70, known)


def test_nvcc_compiles_the_cuda_source(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH; NVRTC compiles the same source")
    include = [f"-I{CSRC / 'include'}", f"-I{CSRC}"]
    # To PTX only: the assembler's half of the work is tested with NVRTC.
    command = [nvcc, "-ptx", "-arch=sm_90", "-std=c++17", *include, str(CSRC / "cuda/kernels.cu")]
    subprocess.run([*command, "-o", str(tmp_path / "kernels.ptx")], check=True)
    names = re.findall(r"\.entry (distrt_\w+)", (tmp_path / "kernels.ptx").read_text())
    assert tuple(sorted(names)) == tuple(sorted(kernel_names()))
