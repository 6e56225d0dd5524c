"""``Optional``: a part that may be missing (data room, layer 5). May import: errors."""

from __future__ import annotations

from typing import Any, final

from distrt.errors import InvalidArgumentError

__all__ = ["Optional"]

_MISSING = object()


@final
class Optional:
    """What ``get_next_as_optional`` returns. Source: ``tf.experimental.Optional``."""

    def __init__(self, value: Any = _MISSING) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is a part; False at the end of the data."""
        return self._value is not _MISSING

    def get_value(self) -> Any:
        """Return the part.

        Raises:
          InvalidArgumentError: there is none.
        """
        if self._value is _MISSING:
            raise InvalidArgumentError("get_value: the optional is empty: the data is at its end")
        return self._value

    def __repr__(self) -> str:
        return f"<Optional {self._value!r}>" if self.has_value() else "<Optional empty>"
