"""A worker process of parallel.py: a function of the user's, and what to apply it to.

May import: the standard library only; it is run as a program. Reads frames from standard input
(8 bytes of length, then pickles): first the function, then lists of arguments; answers each with
(results, exception, traceback). Standard output belongs to the answers, so what the
function prints goes to standard error.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(8)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 8 else None


def _answer(function: Callable[..., Any], payload: bytes) -> bytes:
    try:
        made = [function(*arguments) for arguments in pickle.loads(payload)]
        return pickle.dumps((made, None, ""), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, text), pickle.HIGHEST_PROTOCOL)
            pickle.loads(answer)  # many exceptions are pickled and cannot be made again
            return answer
        except Exception:
            return pickle.dumps((None, None, text), pickle.HIGHEST_PROTOCOL)


def main() -> None:
    """Answer until the input ends."""
    # The folder of this file is no place to import from: its modules have common names.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    source = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function: Callable[..., Any] = print
    problem = ""
    try:
        function = pickle.loads(_read(source) or b"")
    except Exception:
        problem = traceback.format_exc()
    while (payload := _read(source)) is not None:
        if problem:
            answer = pickle.dumps((None, None, problem), pickle.HIGHEST_PROTOCOL)
        else:
            answer = _answer(function, payload)
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


if __name__ == "__main__":
    main()
