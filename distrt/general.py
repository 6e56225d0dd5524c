"""The general way of a call: agreed on by all ranks, in the queue (layer 4).

May import: verbs, engine, progress, errors. communicator.py is the only user: it says what a
verb means, and tries the quick way first. verbs.py checks the arguments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

from distrt.engine import Engine
from distrt.errors import ContextError, DistrtError
from distrt.progress import Program, Refused
from distrt.verbs import Call

__all__ = ["General"]


@final
class General:
    """Makes the calls of one rank."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        self._busy = threading.RLock()

    def make(
        self,
        verb: str,
        prepare: Callable[[], Call],
        tried: bool | None = None,
        async_op: bool = False,
    ) -> Any:
        """Make a call: return its result or, where it is to go on in the background, its Work.

        A rank whose arguments are refused still takes part, so that the others
        learn why instead of waiting for it.

        Args:
          verb: the verb.
          prepare: checks the arguments.
          tried: what the quick way answered: None where the call is not plain, False
            where the ranks' calls differ, which remains to be explained.
          async_op: whether it is to go on in the background.
        """
        with self.alone(verb):
            self.engine.notice()
            try:
                call = prepare()
            except Exception as error:
                program, text = self._refusal(verb, error), f"{verb} (refused)"
            else:
                program, text = self._agreed(verb, call, tried), f"{verb} {call.text}".rstrip()
            queue = self.engine.queue
            return (queue.submit if async_op else queue.run)(program, text)

    def _agreed(self, verb: str, call: Call, tried: bool | None) -> Program[Any]:
        if tried is False:
            yield from self.engine.explain(f"{verb} {call.text}")
        yield from self.engine.agree(verb, call.text, call.quick, call.source)
        return (yield from call.program)

    def _refusal(self, verb: str, error: Exception) -> Program[Refused]:
        kind = "" if isinstance(error, DistrtError) else f"{type(error).__name__}: "
        yield from self.engine.agree(verb, f"refused: {kind}{error}")
        return Refused(error)

    @contextlib.contextmanager
    def alone(self, verb: str) -> Iterator[None]:
        """Refuse to begin ``verb`` while another thread of this rank is in a call.

        Two threads would pair their messages with each other's: wrong results, no
        error. Until it ends no call takes the quick way, which would not notice it.
        """
        if self.engine.busy or not self._busy.acquire(blocking=False):
            raise ContextError(
                f"{verb} was called while another thread of rank {self.rank} is in a "
                "collective call: make all collective calls of a rank from one thread"
            )
        self.engine.hold(1)
        try:
            yield
        finally:
            self.engine.hold(-1)
            self._busy.release()

    @contextlib.contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """See ``Communicator.refusing``."""
        try:
            yield
        except Exception as error:
            refused = error

            def refuse() -> Call:
                raise refused

            self.make(call, refuse)
