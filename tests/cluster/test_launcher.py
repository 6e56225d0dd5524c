"""The launcher's variables against MPI's size, on environments recorded from real launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distrt.cluster.launcher import IGNORE, check_library, check_size, launched, local_rank
from distrt.errors import LaunchError

DATA = Path(__file__).parent.parent / "data" / "launcher_environments.json"
RECORDED = [pytest.param(row, id=row["what"]) for row in json.loads(DATA.read_text())]
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: 2026\n"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI\0"


@pytest.mark.parametrize("row", RECORDED)
def test_recorded_environments(row):
    environ, size = row["environ"], row["size"]
    assert local_rank(environ) == row["local_rank"]
    assert launched(environ) is (size is not None and size > 1)
    for mpi_size in (1, size or 1, (size or 1) + 1):
        if size in (None, mpi_size):
            check_size(mpi_size, environ)
        else:
            with pytest.raises(LaunchError, match=f"says {size} tasks.*MPI says {mpi_size}:"):
                check_size(mpi_size, environ)


def test_srun_without_plugin_names_the_mend():
    environ = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
    with pytest.raises(LaunchError) as caught:
        check_size(1, environ)
    text = str(caught.value)
    for part in ("SLURM_STEP_NUM_TASKS=4", "`srun --mpi=pmi2`", "mpirun", f"{IGNORE}=1"):
        assert part in text


def test_open_mpi_python_under_hydra():
    with pytest.raises(LaunchError, match=r"PMI_SIZE=3.*MPI says 1.*Open MPI's Python"):
        check_size(1, {"PMI_RANK": "0", "PMI_SIZE": "3"})


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "2"}, 4),
        ({"PMI_SIZE": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4"}, 7),
        ({"MV2_COMM_WORLD_SIZE": "5"}, 5),
        ({"JSM_NAMESPACE_SIZE": "6", "OMPI_COMM_WORLD_SIZE": "6"}, 6),
        ({"PALS_SIZE": "8"}, 8),
        ({"FLUX_JOB_SIZE": "9", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2"}, 9),
    ],
)
def test_order_of_trust(environ, size):
    check_size(size, environ)
    assert launched(environ)
    with pytest.raises(LaunchError, match=f"says {size} tasks"):
        check_size(size + 1, environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5"},  # torchrun's leftovers
        {"SLURM_NTASKS": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"},  # an interactive step
        {"SLURM_STEP_ID": "", "SLURM_STEP_NUM_TASKS": "4"},
        {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"},
    ],
)
def test_no_launcher(environ):
    check_size(1, environ)
    check_size(4, environ)
    assert not launched(environ)
    assert local_rank(environ) is None


@pytest.mark.parametrize("value", ["", "x", "0", "-1", "1.5", "²"])
def test_nonsense_names_the_variable(value):
    with pytest.raises(LaunchError, match="PMI_SIZE must be a whole number of at least 1"):
        check_size(1, {"PMI_SIZE": value})


@pytest.mark.parametrize("value", ["", "x", "-1"])
def test_nonsense_local_rank(value):
    with pytest.raises(LaunchError, match="MPI_LOCALRANKID must be a whole number"):
        local_rank({"MPI_LOCALRANKID": value})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 3),
        ({"MPI_LOCALRANKID": "1", "SLURM_LOCALID": "0"}, 1),
        ({"SLURM_LOCALID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 2),
        ({"SLURM_LOCALID": "2"}, None),
    ],
)
def test_local_rank_precedence(environ, expected):
    assert local_rank(environ) == expected


def test_override():
    environ = {"PMI_SIZE": "x", IGNORE: "1"}
    check_size(1, environ)
    check_library(MPICH, {"OMPI_COMM_WORLD_SIZE": "2", IGNORE: "1"})
    assert not launched({"PMI_SIZE": "3", IGNORE: "1"})
    with pytest.raises(LaunchError):
        check_size(1, {"PMI_SIZE": "3", IGNORE: "0"})


@pytest.mark.parametrize("library", [MPICH, "Intel(R) MPI Library 2021.17 for Linux* OS\n"])
def test_mpich_under_open_mpis_mpirun(library):
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
    with pytest.raises(LaunchError, match=r"two MPIs.*OMPI_COMM_WORLD_SIZE=2"):
        check_library(library, environ)
    check_library(OPEN_MPI, environ)
    check_library(library, {**environ, "PMI_RANK": "0"})
    check_library(library, {"PMI_RANK": "0", "PMI_SIZE": "2"})
    check_library(library, {})
