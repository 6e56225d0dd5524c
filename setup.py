"""The compiled part of the package; everything else stands in setup.cfg.

Three small extensions, none of which links MPI or CUDA, so one build serves
every MPI and every machine of an architecture:

* ``distrt._host``: the host kernels of ``csrc/host``;
* ``distrt._shared``: the collectives in shared memory of ``csrc/shared``; it
  reads NumPy's structs, so it is built for one version of Python;
* ``distrt._exits``: ends the whole job with the exit code of a failing rank.

The headers and the CUDA sources are installed as package data, so that CuPy
can compile them at run time.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

CSRC = Path("csrc")
LIMITED_API = [("Py_LIMITED_API", "0x030A0000")]
# No contraction to fused multiply-adds: host and GPU must give the same bits. Nobody reads errno
# or the floating-point exception flags, and compilers vectorise more without them.
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
EXITS = CSRC / "host" / "exits.cpp"


def extension(name: str, sources: list[Path], *, reads_numpy: bool = False) -> Extension:
    includes = [str(CSRC / "include"), str(CSRC / "host")]
    return Extension(
        name,
        sources=[str(path) for path in sorted(sources)],
        depends=[str(path) for path in sorted(CSRC.rglob("*.h"))],
        include_dirs=[*includes, np.get_include()] if reads_numpy else includes,
        define_macros=[] if reads_numpy else LIMITED_API,
        extra_compile_args=FLAGS,
        language="c++",
        py_limited_api=not reads_numpy,
    )


class BuildPy(build_py):
    """Copies ``csrc/cuda`` and ``csrc/include`` into the package as ``distrt/csrc``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # kernels/cuda.py finds the checkout's own csrc
        for part in ("include", "cuda"):
            target = Path(self.build_lib) / "distrt" / "csrc" / part
            shutil.copytree(CSRC / part, target, dirs_exist_ok=True)


setup(
    cmdclass={"build_py": BuildPy},
    ext_modules=[
        extension("distrt._host", [p for p in (CSRC / "host").glob("*.cpp") if p != EXITS]),
        extension("distrt._shared", list((CSRC / "shared").glob("*.cpp")), reads_numpy=True),
        extension("distrt._exits", [EXITS]),
    ],
)
