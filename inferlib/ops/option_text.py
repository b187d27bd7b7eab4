"""Options that users give as text such as "quest:64", or as the value that this stands for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def read_option(
    value: Any, kind: type[T], text: re.Pattern[str], make: Callable[[re.Match[str]], T], usage: str
) -> T | None:
    """The value that an option stands for: a value of this kind, what `make` makes of text that matches, or None.

    Raises ValueError, which begins with `usage`, for anything else.
    """
    if value is None or isinstance(value, kind):
        return value
    parts = text.fullmatch(value) if isinstance(value, str) else None
    if parts is None:
        raise ValueError(f"{usage}, got {value!r:.100}")
    return make(parts)
