"""Calls of DeepSeek V3, R1 and V3.1."""

# ruff: noqa: RUF001 (the markers have wide bars)
from __future__ import annotations

from inferlib.serving.tools.json_text import ValueEnd
from inferlib.serving.tools.machine import Machine

CALLS, _CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_END, _ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


class DeepSeek(Machine):
    """Between markers, `function`, a name and a block of JSON (V3, R1); or a name and JSON (V3.1)."""

    def __init__(self) -> None:
        super().__init__()
        self._state = "content"
        self._header = ""
        self._value = ValueEnd()

    def step(self) -> bool:
        if self._state == "content":
            text, marker = self.until((CALLS, _CALL))
            self.content(text)
            self._state = {CALLS: "between", _CALL: "header"}.get(marker or "", "content")
            return marker is not None
        if self._state == "between":  # calls
            _, marker = self.until((_CALL, _ENDS))
            self._state = {_CALL: "header", _ENDS: "content"}.get(marker or "", "between")
            return marker is not None
        if self._state == "header":
            text, marker = self.until((SEP,))
            self._header += text
            self._state = "header" if marker is None else "name"
            return marker is not None
        return self._name() if self._state == "name" else self._arguments()

    def _name(self) -> bool:
        """What stands before the arguments; V3 has the name there."""
        ends = [at for marker in ("{", _END) if (at := self.rest.find(marker)) >= 0]
        if not ends:
            return False
        inner = self.rest[: min(ends)].split("```")[0].strip()
        header, self._header = self._header.strip(), ""
        self.call(inner if header == "function" and inner else header)
        self.rest = self.rest[min(ends) :]
        self._state, self._value = "arguments", ValueEnd()
        if not self.rest.startswith("{"):
            self.arguments("{}")
            self._value.done = True
        return True

    def _arguments(self) -> bool:
        if not self._value.done:
            taken = self._value.take(self.rest)
            self.arguments(self.rest[:taken])
            self.rest = self.rest[taken:]
            return self._value.done
        _, marker = self.until((_END,))
        self._state = "arguments" if marker is None else "between"
        return marker is not None
