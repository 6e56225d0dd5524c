"""Types of the extension module ``distrt._exits`` (csrc/host/exits.cpp)."""

from collections.abc import Sequence

def arm(
    functions: tuple[int, ...],
    world: int,
    sends: Sequence[int],
    receives: Sequence[int],
    mpi4py_finalizes: bool,
    /,
) -> None: ...
def calls() -> tuple[int, int]: ...
def heard() -> None: ...
def abort(code: int, /) -> None: ...
