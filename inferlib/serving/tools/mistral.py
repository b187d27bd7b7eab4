"""Calls of Mistral: [TOOL_CALLS] and an array of objects; since 2025 a name and its arguments behind each marker."""

from __future__ import annotations

from inferlib.serving.tools.json_text import CallObject, ValueEnd
from inferlib.serving.tools.objects import ObjectMachine

_OPEN = "[TOOL_CALLS]"


class Mistral(ObjectMachine):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, where [CALL_ID] and an id
    may stand before [ARGS], and [ARGS] may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self._state = "content"
        self._value = ValueEnd()

    def step(self) -> bool:
        if self._object is not None:
            return self.in_object()
        return {
            "content": self._content,
            "opened": self._opened,
            "array": self._array,
            "name": self._name,
            "value": self._arguments,
        }[self._state]()

    def _content(self) -> bool:
        text, marker = self.until((_OPEN,))
        self.content(text)
        self._state = "content" if marker is None else "opened"
        return marker is not None

    def _opened(self) -> bool:
        self.skip_space()
        if not self.rest:
            return False
        self._state = "array" if self.rest.startswith("[") else "name"
        return True

    def _array(self) -> bool:
        """Between the objects of an array, where another marker would begin another."""
        if (opened := self.starts(_OPEN)) is not False:
            self._state = "opened" if opened else "array"
            return bool(opened)
        self.rest = self.rest[1:] if self.rest[:1] in tuple("[], \t\r\n") else self.rest
        if not self.rest:
            return False
        if self.rest.startswith("{"):
            self.begin(CallObject(), "")
        elif self.rest[0] not in "[], \t\r\n":
            self._state = "content"
        return True

    def _name(self) -> bool:
        """The name, which stays in `rest` until the arguments begin."""
        at = self.rest.find("{")
        if at < 0:
            return False
        name = self.rest[:at].replace("[ARGS]", "").split("[CALL_ID]")[0]
        self.call(name.strip())
        self.rest, self._state, self._value = self.rest[at:], "value", ValueEnd()
        return True

    def _arguments(self) -> bool:
        taken = self._value.take(self.rest)
        self.arguments(self.rest[:taken])
        self.rest = self.rest[taken:]
        if self._value.done:
            self._state = "content"
        return self._value.done

    def end(self) -> None:
        super().end()
        if self._state in ("opened", "name"):
            self.content(_OPEN + self.rest)
