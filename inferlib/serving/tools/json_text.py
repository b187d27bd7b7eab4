"""JSON that comes in pieces: where a value ends, and the name and arguments of a call written as an object."""

from __future__ import annotations

import json
from collections.abc import Callable

_SPACE = " \t\n\r"


class ValueEnd:
    """Finds the end of one JSON value, which begins with the first character.

    `take` returns how many characters of a piece belong to it; `done` says that it is complete. A number or a word
    ends before a character that cannot be part of it.
    """

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._string = self._escaped = self._begun = self._word = False

    def take(self, text: str) -> int:
        for i, character in enumerate(text):
            if self._word and character in f",]}}{_SPACE}":
                self.done = True
                return i
            self._see(character)
            if self.done:
                return i + 1
        return len(text)

    def _see(self, character: str) -> None:
        if self._string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = False
                self.done = self._depth == 0
        elif character == '"':
            self._string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        elif not self._begun:
            self._word = True
        self._begun = True


class CallObject:
    """A call as an object: its name under "name", its arguments under "arguments" or "parameters", in any order.

    `take` returns how many characters belong to it. Afterwards `name` is known or not, `pieces` has the JSON text of
    the arguments as far as it is, for the reader to clear; `done` and `failed` say that it ended well or is no call.
    accepts: says of a name whether a call may have it.
    """

    def __init__(self, accepts: Callable[[str], bool] = lambda name: True):
        self.name: str | None = None
        self.pieces: list[str] = []
        self.done = self.failed = False
        self._accepts = accepts
        self._expected = "{"  # what comes next: {, key, colon, value, comma
        self._key = self._buffer = ""
        self._value: ValueEnd | None = None
        self._has_arguments = self._quoted = False

    def take(self, text: str) -> int:
        at = 0
        while at < len(text) and not (self.done or self.failed):
            if self._value is not None:
                at += self._in_value(text[at:])
            elif text[at] in _SPACE:
                at += 1
            else:
                at += self._structure(text[at])
        return at

    def _structure(self, character: str) -> int:
        """One character between values. Returns how many are taken: the first of a value is not."""
        if self._expected == "{" and character == "{":
            self._expected = "key"
        elif self._expected in ("key", "comma") and character == "}":
            self._close()
        elif self._expected == "key" and character == '"':
            self._value, self._buffer = ValueEnd(), ""
            return 0
        elif self._expected == "colon" and character == ":":
            self._expected = "value"
        elif self._expected == "comma" and character == ",":
            self._expected = "key"
        elif self._expected == "value":
            self._value, self._buffer = ValueEnd(), ""
            self._quoted = character == '"'
            return 0
        else:
            self.failed = True
            return 0
        return 1

    def _in_value(self, text: str) -> int:
        value = self._value
        assert value is not None
        taken = value.take(text)
        streamed = self._expected == "value" and self._key in ("arguments", "parameters") and not self._quoted
        if streamed:
            self._has_arguments = True
            self.pieces.append(text[:taken])
        else:
            self._buffer += text[:taken]
        if value.done:
            self._value = None
            self._end_value(streamed)
        return taken

    def _end_value(self, streamed: bool) -> None:
        if self._expected == "key":
            self._key, self._expected = _string(self._buffer) or "", "colon"
            return
        self._expected = "comma"
        if self._key == "name" and self.name is None:
            name = _string(self._buffer)
            if name is None or not self._accepts(name):
                self.failed = True
            self.name = None if self.failed else name
        elif self._key in ("arguments", "parameters") and not streamed:
            self._has_arguments = True
            self.pieces.append(_string(self._buffer) or self._buffer)  # JSON in a string

    def _close(self) -> None:
        self.failed = self.name is None
        self.done = not self.failed
        if not self._has_arguments:
            self.pieces.append("{}")


def _string(text: str) -> str | None:
    """The value of a JSON string; None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
