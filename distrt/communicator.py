"""The communicator: the verbs (layer 4).

May import: general, verbs, engine, point_to_point, choice, transport, settings, reduce_op, errors.
What each verb means is said here; verbs.py does it for any argument, engine.py picks
the algorithm. Nothing below raises for bad input; nothing above sends a byte.

A verb with one plain array tries the quick way first: one call into compiled code,
which does the checks, the fingerprint and the collective (csrc/shared/quick.cpp) and
answers None where the call is not plain. The general way then makes the same call on
the same channel, so ranks may go different ways.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, final

import numpy as np

from distrt.choice import Choice
from distrt.engine import Engine
from distrt.errors import ContextError, DistrtError, InvalidArgumentError, by_rank
from distrt.general import General
from distrt.point_to_point import PointToPoint
from distrt.reduce_op import ReduceOp
from distrt.settings import Settings
from distrt.transport.base import Transport
from distrt.transport.shared_memory import Node
from distrt.verbs import Call, Verbs

__all__ = ["Communicator"]

_T = TypeVar("_T")


@final
class Communicator:
    """The collective verbs over the ranks of a transport.

    Every verb takes a NumPy or CuPy array, a Python number, or a nested
    structure (tuples, lists, dicts, named tuples; the order of a dict's keys
    never matters), must be called by all ranks in the same order, and gives all
    ranks the same bits. Arguments are never changed; results are new arrays, or
    ``out``. Any layout (strided, Fortran-ordered, read-only, empty) will do.
    Element types: float16/32/64, bfloat16, all integers; complex for SUM and
    MEAN; bool for MIN and MAX. The mean of integers is a float (true division).

    Where ranks disagree on the call, or one of them passes what cannot be
    taken, every rank raises CollectiveMismatchError naming rank -> call. A rank
    makes its calls from one thread at a time; another one gets a ContextError.
    With ``async_op=True`` every verb returns a ``Work``; see ``all_reduce``.

    Attributes:
      rank, size: this rank and the number of ranks.
      transport: what carries the bytes.
      node: the memory that the ranks share, where all are on one host.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings | None = None,
        node: Node | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.rank, self.size, self.transport = transport.rank, transport.size, transport
        self.settings = settings or Settings()
        transport.timeout_seconds = self.settings.timeout_seconds
        self.node = node
        self._engine = Engine(transport, self.settings, node, choice)
        self._quick = self._engine.quick
        self._general = General(self._engine, self.rank)
        self._verbs = Verbs(self._engine, self.rank, self.size)
        self._pairs = PointToPoint(transport, self._engine.abandon)
        self._derived = False

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size} over {self.transport.name}>"

    # ------------------------------------------------------------------ verbs

    def all_reduce(
        self,
        value: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the ranks' values; every rank gets the result. All ranks must call.

        Args:
          value: equal structure, shapes and dtypes on all ranks.
          op: SUM, MEAN, PROD, MIN or MAX; a ReduceOp or its name.
          out: arrays, structured as ``value``, that receive the result; may be ``value``.
          async_op: return a ``Work`` at once; the call goes on in the background, in the
            order of the calls. ``value`` and ``out`` belong to it until ``wait()`` returns,
            which gives the result, or raises what the call would have raised.

        Returns:
          The result, structured as ``value``; ``out`` where it was given. Of IndexedSlices
          (SUM or MEAN, no ``out``; numbers of rows may differ) the rows of all ranks, in
          rank order, duplicates kept.

        Source: MPI_Allreduce, tf.distribute.ReplicaContext.all_reduce.
        """
        tried = None if async_op else self._quick.all_reduce(value, op, out)
        if tried is None or tried is False:
            prepare = functools.partial(self._verbs.all_reduce, value, op, out)
            return self._general.make("all_reduce", prepare, tried, async_op)
        return tried

    def reduce(
        self,
        value: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        root: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        """As ``all_reduce``, but only ``root`` gets the result; the others get None.

        Source: MPI_Reduce.
        """
        prepare = functools.partial(self._verbs.reduce, value, op, root)
        return self._general.make("reduce", prepare, async_op=async_op)

    def reduce_scatter(
        self,
        value: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Combine the ranks' values; rank r gets the r-th part of the rows. All ranks must call.

        Args:
          value: equal structure, shapes and dtypes on all ranks; at least one dimension.
            [n * k, ...] gives [k, ...] on each of n ranks; where the rows do not divide,
            the first ranks get one more.
          op: as in ``all_reduce``, whose bits these are where both take one algorithm.
          out: arrays that receive this rank's part.

        Source: MPI_Reduce_scatter.
        """
        tried = None if async_op else self._quick.reduce_scatter(value, op, out)
        if tried is None or tried is False:
            prepare = functools.partial(self._verbs.reduce_scatter, value, op, out)
            return self._general.make("reduce_scatter", prepare, tried, async_op)
        return tried

    def broadcast(
        self, value: Any, root: int = 0, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Give every rank ``root``'s value. All ranks must call.

        Args:
          value: equal structure, shapes and dtypes on all ranks; only root's contents count.
          root: the rank whose value it is.
          out: arrays, structured as ``value``, that receive it; may be ``value``.

        Source: MPI_Bcast.
        """
        tried = None if async_op else self._quick.broadcast(value, root, out)
        if tried is None or tried is False:
            prepare = functools.partial(self._verbs.broadcast, value, root, out)
            return self._general.make("broadcast", prepare, tried, async_op)
        return tried

    def all_gather(
        self, value: Any, axis: int = 0, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Concatenate the ranks' values along ``axis``, in rank order. All ranks must call.

        Args:
          value: at least one dimension; shapes may differ along ``axis`` only, parts may be empty.
          axis: counted from the end where negative.
          out: arrays, structured as ``value``, that receive the result.

        Source: MPI_Allgatherv, tf.distribute.ReplicaContext.all_gather.
        """
        tried = None
        if axis == 0 and not async_op:
            tried = self._quick.all_gather(value, 0, out)
        if tried is None or tried is False:
            prepare = functools.partial(self._verbs.all_gather, value, axis, out)
            return self._general.make("all_gather", prepare, tried, async_op)
        return tried

    def gather(self, value: Any, root: int = 0, axis: int = 0, *, async_op: bool = False) -> Any:
        """As ``all_gather``, but only ``root`` gets the result; the others get None.

        Source: MPI_Gatherv.
        """
        prepare = functools.partial(self._verbs.gather, value, root, axis)
        return self._general.make("gather", prepare, async_op=async_op)

    def scatter(self, value: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Give rank r the r-th part of the rows of ``root``'s value. All ranks must call.

        Args:
          value: equal structure, shapes and dtypes on all ranks; only root's contents
            count. Rows are divided as in ``reduce_scatter``.
          root: the rank whose value it is.

        Source: MPI_Scatterv.
        """
        prepare = functools.partial(self._verbs.scatter, value, root)
        return self._general.make("scatter", prepare, async_op=async_op)

    def all_to_all(
        self,
        value: Any,
        counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send a part of the rows to each rank; return what came, in rank order. All must call.

        Args:
          value: equal structure, dtypes and shapes on all ranks; with ``counts`` the
            numbers of rows may differ.
          counts: rows for each rank, by default equally many. All ranks give them or none.
          out: arrays, structured as ``value``, that receive the result.

        Source: MPI_Alltoall, MPI_Alltoallv.
        """
        tried = None
        if counts is None and not async_op:
            tried = self._quick.all_to_all(value, 0, out)
        if tried is None or tried is False:
            prepare = functools.partial(self._verbs.all_to_all, value, counts, out)
            return self._general.make("all_to_all", prepare, tried, async_op)
        return tried

    def barrier(self, *, async_op: bool = False) -> Any:
        """Return once all ranks have called it. Source: MPI_Barrier."""
        return self._general.make("barrier", self._verbs.barrier, async_op=async_op)

    def send(self, value: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send ``value`` to rank ``dest``, which must ``recv`` it. Not collective.

        Returns once the memory of ``value`` may be used again, which may need the receiver's
        call. Messages of one pair of ranks and one tag arrive in order.

        Args:
          value: an array, a number, or a structure of them.
          dest: another rank.
          tag: from 0 to 32703; a receiver takes messages of its own tag only.
          async_op: return a ``Work`` at once.

        Source: MPI_Send, MPI_Isend.
        """
        return self._pairs.send(value, dest, tag, async_op)

    def recv(self, out: Any, source: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Receive what rank ``source`` sends into ``out``, and return it. Not collective.

        Args:
          out: arrays of the structure, shapes and dtypes that are sent.
          source, tag, async_op: see ``send``.

        Raises:
          InvalidArgumentError: something else was sent; it is lost.

        Source: MPI_Recv, MPI_Irecv.
        """
        return self._pairs.recv(out, source, tag, async_op)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value`` in rank order. All ranks must call.

        For small things; arrays belong to ``all_gather``.
        """
        pickled = functools.partial(pickle.dumps, value, pickle.HIGHEST_PROTOCOL)
        prepare = functools.partial(self._verbs.objects, "", None, pickled)
        payloads = self._general.make("all_gather_object", prepare)
        return [pickle.loads(payload) for payload in payloads]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return ``root``'s picklable ``value`` on every rank. All ranks must call."""
        pickled = functools.partial(pickle.dumps, value, pickle.HIGHEST_PROTOCOL)
        prepare = functools.partial(self._verbs.objects, f"root={root}", root, pickled)
        payload = self._general.make("broadcast_object", prepare)
        return value if self.rank == root else pickle.loads(payload)

    # ------------------------------------------------------- other communicators

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks that give this ``color``. All ranks must call.

        Its calls and this one's do not wait for each other, and may be made in another
        order on each rank where all but one are asynchronous.

        Args:
          color: an int from 0 on; None: this rank gets None.
          key: the order of its ranks; those of equal keys keep theirs.

        Source: MPI_Comm_split.
        """

        def prepare() -> Call:
            for name, number in (("color", 0 if color is None else color), ("key", key)):
                if not isinstance(number, int | np.integer):
                    raise InvalidArgumentError(f"split: {name}={number!r}: expected an int")
            if color is not None and color < 0:
                raise InvalidArgumentError(f"split: color={color}: expected 0 or more, or None")
            return self._verbs.derive(lambda: self.transport.split(color, key))

        return self._of(self._general.make("split", prepare))

    def dup(self, **changes: Any) -> Communicator:
        """Return a communicator of the same ranks, whose calls are ordered among themselves only.

        All ranks must call.

        Args:
          changes: settings that differ from this one's, equal on all ranks; ``algorithm`` is
            added to what is forced already.

        Source: MPI_Comm_dup.
        """

        def prepare() -> Call:
            self._engine.choice.forcing(changes.get("algorithm", ""))
            self.settings._replace(**changes)
            return self._verbs.derive(self.transport.dup, str(sorted(changes.items())))

        made = self._of(self._general.make("dup", prepare), changes)
        assert made is not None
        return made

    def channel(self) -> Transport:
        """Return the same ranks with messages of their own, not ordered with any call.

        All ranks must call. For layers above that exchange messages in the background, as
        a ``Lookahead`` does.
        """

        def prepare() -> Call:
            return self._verbs.derive(self.transport.dup)

        made: Transport = self._general.make("channel", prepare)
        made.timeout_seconds = self.settings.timeout_seconds
        return made

    def free(self) -> None:
        """Give back what a communicator made by ``split`` or ``dup`` holds. All ranks must call.

        It cannot be used any more. What is never freed is kept until the program ends.

        Raises:
          ContextError: it is the world's.

        Source: MPI_Comm_free.
        """

        def prepare() -> Call:
            if not self._derived:
                raise ContextError("free: expected a communicator made by split or dup")
            return self._verbs.free()

        self._general.make("free", prepare)

    def _of(
        self, transport: Transport | None, changes: Mapping[str, Any] = MappingProxyType({})
    ) -> Communicator | None:
        if transport is None:
            return None
        node, choice = self._engine.derived(transport)
        choice = choice.forcing(changes.get("algorithm", ""))
        made = Communicator(transport, self.settings._replace(**changes), node, choice)
        made._derived = True
        return made

    # ----------------------------------------------------------------- the rest

    def together(
        self, what: str, action: Callable[[], _T], ranks: Sequence[int] | None = None
    ) -> _T | None:
        """Run ``action`` and raise on every rank where it failed on any. All ranks must call.

        For work that can fail on one rank only (opening a file, writing a
        checkpoint): no rank goes on, and none waits, when another could not.

        Args:
          what: what is being done, for the message.
          action: called on ``ranks``, by default on all.
          ranks: the ranks that do it; the others only learn how it went.

        Returns:
          The action's result on the ranks that did it, else None.

        Raises:
          DistrtError: of the class of the first failing rank's error, where that
            is one of distrt's, naming rank -> error; on the failing ranks the
            original error is its cause.
        """
        result, failure = None, None
        with self._general.alone("together"):
            if ranks is None or self.rank in ranks:
                try:
                    result = action()
                except Exception as error:
                    failure = error
            kind = type(failure) if isinstance(failure, DistrtError) else DistrtError
            report = None if failure is None else (kind, f"{type(failure).__name__}: {failure}")
            reports = dict(enumerate(self.all_gather_object(report)))
        failed = {rank: report for rank, report in reports.items() if report is not None}
        if not failed:
            return result
        first = next(iter(failed.values()))[0]
        texts = {rank: text for rank, (_, text) in failed.items()}
        raise first(f"{what} failed:\n{by_rank(texts)}") from failure

    def empty(self, like: Any, count: int, dtype: Any) -> Any:
        """Return [count] of ``dtype``, uninitialised, in the memory of ``like``. Not collective.

        On the host it is registered where the ranks share memory; see ``distrt.empty``.
        """
        return self._engine.empty(like, count, dtype)

    def algorithm_for(self, verb: str, nbytes: int = 0) -> str:
        """Return the name of the algorithm that NumPy arrays take. Not collective."""
        return self._engine.algorithm_for(verb, nbytes)

    @property
    def nodes(self) -> int:
        """Number of groups of ranks that share memory; the table is read for so many nodes."""
        return len(self._engine.groups)

    def ranges(self, verb: str) -> tuple[tuple[int | None, str], ...]:
        """Return (up to how many bytes, algorithm) of every size, for NumPy arrays. Not collective.

        Raises:
          InvalidArgumentError: an algorithm was asked for that cannot be taken.
        """
        return self._engine.ranges(verb)

    def algorithms(self, verb: str) -> tuple[str, ...]:
        """Return the names of all algorithms that NumPy arrays can take. Not collective."""
        return self._engine.algorithms(verb)

    @contextlib.contextmanager
    def using(self, algorithm: str) -> Iterator[None]:
        """Take ``algorithm`` in all calls inside that can. All ranks must do so.

        Waits for the calls in the background before it begins and ends.

        Args:
          algorithm: as DISTRT_ALGORITHM: a name, or "all_reduce=ring,broadcast=direct".

        Raises:
          InvalidArgumentError: there is no such algorithm.
        """
        before = self._quick
        with self._engine.using(algorithm):
            self._quick = self._engine.quick
            try:
                yield
            finally:
                self._quick = before

    def flag_round_trip(self, rounds: int = 2000) -> float | None:
        """Return how long a flag takes from rank 0 to rank 1 and back, in seconds. All must call.

        What bounds every collective in shared memory from below; None where there is none.
        """
        if self._engine.direct is None:
            return None
        times = []
        for _ in range(5):
            self.barrier()
            times.append(self._engine.direct.channel.round_trips(rounds) / rounds)
            self.barrier()
        shortest: float = self.broadcast_object(min(times))
        return shortest

    @contextlib.contextmanager
    def unsynchronised(self, call: Callable[[], Any]) -> Iterator[None]:
        """Let ``call``, a quick one, do its memory traffic and wait for nobody: its limit.

        For benchmarks. Only this call may be made inside, and its results mean nothing.
        All ranks must enter and leave together.
        """
        call()
        direct = self._engine.direct
        assert direct is not None, "calls in messages wait for each other"
        direct.channel.unsynchronised(True)
        try:
            yield
        finally:
            direct.channel.unsynchronised(False)
            self.barrier()

    @contextlib.contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """Prepare a collective call: an exception inside is told to all ranks, then raised.

        The others, who make the call, raise CollectiveMismatchError instead of waiting.
        """
        with self._general.refusing(call):
            yield
