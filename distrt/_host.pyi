"""Types of the extension module ``distrt._host`` (csrc/host/module.cpp); arrays are addresses."""

def fold(index: int, out: int, partial: int, local: int, count: int, /) -> None: ...
def finish(
    index: int, out: int, partial: int, local: int, count: int, divisor: float, /
) -> None: ...
def widen(index: int, out: int, array: int, count: int, /) -> None: ...
def sgd(
    index: int,
    param: int,
    grad: int,
    velocity: int,
    count: int,
    lr: float,
    momentum: float,
    nesterov: bool,
    /,
) -> None: ...
def adam(
    index: int,
    param: int,
    grad: int,
    m: int,
    v: int,
    count: int,
    alpha: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    /,
) -> None: ...
def names() -> tuple[str, ...]: ...
def kernels() -> object: ...
def isa() -> str: ...
def isas() -> tuple[str, ...]: ...
def select(isa: str, /) -> None: ...
def set_gil_threshold(count: int, /) -> int: ...
