"""The iterator over a distributed dataset: its steps, its end, its state (data room, layer 5).

May import: lookahead, errors, arrays and the files of this room below distributed.py, whose
friend it is. Where a part must be asked about, the next one is made and announced before
this one is handed over, so the answers are there when they are needed.
"""

from __future__ import annotations

import copy
import functools
import itertools
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

from distrt.arrays import map_structure
from distrt.data.digest import Digest, digested
from distrt.data.optional import Optional
from distrt.data.pieces import empty_part
from distrt.data.pipeline import seeded, seeds_of
from distrt.data.prefetch import prefetched
from distrt.errors import DistrtError, InvalidArgumentError, by_rank
from distrt.lookahead import Lookahead, State, Status

if TYPE_CHECKING:
    from distrt.data.distributed import Distributed

__all__ = ["DistributedIterator", "OutOfRangeError"]


class OutOfRangeError(DistrtError, IndexError):
    """``get_next`` was called at the end of the data. Source: ``tf.errors.OutOfRangeError``."""


class _Made(NamedTuple):
    """This rank's next part, or why there is none."""

    state: State
    part: Any = None
    error: Exception | None = None


@final
class DistributedIterator:
    """Walks this rank's parts once; made by ``iter(distributed_dataset)``.

    All ranks must iterate equally; a rank may stop early. Its background thread, if any, ends
    when it is collected. Source: ``tf.distribute.DistributedIterator``.
    """

    distributed = True

    def __init__(self, owner: Distributed, number: int) -> None:
        self._owner = owner
        self._ahead: Lookahead | None = None
        self._begin(number, 0, None)

    def _begin(self, number: int, step: int, former: tuple[int, int] | None) -> None:
        owner = self._owner
        self._number, self._step, self._former = number, step, former
        self._digest, self._ended = Digest(), False
        self._made: _Made | None = None
        node, start = owner._node, step
        if former is not None:
            node, start = owner._rest(*former)
            start += step
        self._empty = node
        vars(self).pop("_nothing", None)
        watched = digested(node, self._digest)
        handles = watched.handles_from((number,), start)
        self._parts: Iterator[Any] = (watched.fetch(handle) for handle in handles)
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None if owner._channel is None else Lookahead(owner._channel, number)
        # A digest must stop where the part does, so nothing is read beyond it.
        size = owner.options.experimental_per_replica_buffer_size
        if self._ahead is not None and watched is node and size > 0:
            self._parts = prefetched(self._parts, size)

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            part = next(self._parts) if self._ahead is None else self._agreed(self._ahead)
        except Exception:
            # The parts are dropped here: an error that is kept would keep their thread too.
            self._ended, self._parts = True, iter(())
            raise
        self._step += 1
        place = self._owner._place
        return part if place is None else map_structure(place, part)

    def __del__(self) -> None:
        ahead: Lookahead | None = getattr(self, "_ahead", None)
        if ahead is not None and not self._ended:
            ahead.close()

    # ---------------------------------------------------------- one step ahead

    def _agreed(self, ahead: Lookahead) -> Any:
        made = self._look(ahead) if self._made is None else self._made
        statuses = ahead.wait()
        self._made = None
        states = [status.state for status in statuses]
        if State.FAILED in states:
            self._fail(made, statuses)
        if State.CLOSED in states:
            # Some rank has left this pass: nobody can tell its steps any more.
            self._ahead = None
            if made.state is State.DATA:
                return made.part
            raise StopIteration
        if State.DATA not in states:
            raise StopIteration
        self._compare(statuses)
        ended = [rank for rank, state in enumerate(states) if state is State.END]
        if ended and self._nothing is None:
            raise InvalidArgumentError(
                f"at step {self._step} of pass {self._number} rank(s) {ended} are at the end of "
                "their data, the others are not, and an element has scalars, of which none cannot "
                "be handed over: batch the dataset"
            )
        part = made.part if made.state is State.DATA else copy.deepcopy(self._nothing)
        self._look(ahead)
        return part

    @functools.cached_property
    def _nothing(self) -> Any:
        """A part of no rows; None where there cannot be one."""
        return empty_part(self._empty)

    def _look(self, ahead: Lookahead) -> _Made:
        problem = ""
        kind: type[DistrtError] = InvalidArgumentError
        try:
            made = _Made(State.DATA, next(self._parts))
        except StopIteration:
            made = _Made(State.END)
        except Exception as error:
            made = _Made(State.FAILED, error=error)
            problem = "".join(traceback.format_exception(error)).rstrip()
            kind = type(error) if isinstance(error, DistrtError) else kind
        self._made = made
        ahead.post(Status(made.state, self._digest.value, problem, kind))
        return made

    def _fail(self, made: _Made, statuses: list[Status]) -> NoReturn:
        if made.error is not None:
            raise made.error
        failed = {r: status.problem for r, status in enumerate(statuses) if status.problem}
        kind = next(status.kind for status in statuses if status.problem)
        raise kind(
            f"the input pipeline failed at step {self._step} of pass {self._number}:\n"
            f"{by_rank(failed)}"
        )

    def _compare(self, statuses: list[Status]) -> None:
        digests = {rank: f"{status.digest:08x}" for rank, status in enumerate(statuses)}
        if len(set(digests.values())) > 1:
            raise InvalidArgumentError(
                f"the ranks read different data up to step {self._step} of pass {self._number}: "
                "every rank reads the whole dataset and takes its part, so all must read the same. "
                "Give shuffles and samplers a seed that is equal on all ranks. Checksums:\n"
                f"{by_rank(digests)}"
            )

    # ------------------------------------------------------------- tf's names

    def get_next(self) -> Any:
        """Return the next part.

        Raises:
          OutOfRangeError: there is none; so does every later call.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("the distributed dataset is at its end") from None

    def get_next_as_optional(self) -> Optional:
        """Return the next part in an ``Optional``, an empty one at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    @property
    def element_spec(self) -> Any:
        """The spec of this rank's part, as ``DistributedDataset.element_spec``."""
        return self._owner.element_spec

    # ------------------------------------------------------------------- state

    def get_state(self) -> dict[str, Any]:
        """Return where the iteration stands, as JSON-able values equal on all ranks. Local.

        With it, ``set_state`` goes on with the very parts that would have come next; the
        passes after this one have the orders that they would have had.
        """
        return {
            "version": 1,
            "dataset": self._owner._whole.describe(),
            "ranks": self._owner.ranks.size,
            "seeds": seeds_of(self._owner._whole),
            "pass": self._number,
            "step": self._step,
            "former": None if self._former is None else list(self._former),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``get_state`` of an iterator over the same pipeline stood. All ranks must.

        The number of ranks may be another one: of the pass that was under way, each element
        that is left is then seen once. Rows are skipped, not made, wherever the pipeline allows.

        Raises:
          InvalidArgumentError: it is no such state, or of another pipeline, or cannot be divided
            anew over these ranks (see AutoShardPolicy.OFF and datasets from a function).
        """
        owner = self._owner
        try:
            text, ranks, seeds = state["dataset"], int(state["ranks"]), list(state["seeds"])
            number, step, former = int(state["pass"]), int(state["step"]), state["former"]
            known = state["version"] == 1
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"set_state: expected what get_state gives: {error!r}"
            ) from error
        own = owner._whole.describe()
        if not known or text != own:
            raise InvalidArgumentError(
                f"set_state: the state is of another dataset: expected {own}, got {text}"
            )
        if ranks != owner.ranks.size:
            if former is not None:
                raise InvalidArgumentError(
                    "set_state: the pass was divided anew before: start on "
                    f"{ranks} ranks, as then, or with the next pass"
                )
            former, step = (ranks, step), 0
        owner._take(seeded(owner._whole, seeds))
        owner._passes = itertools.count(number + 1)
        self._begin(number, step, None if former is None else (former[0], former[1]))
