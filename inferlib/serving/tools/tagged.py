"""Calls whose arguments stand one by one between tags: of GLM 4.5 and later, and of Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferlib.serving.tools.machine import Machine

Tools = Sequence[Mapping[str, Any]]


class TaggedMachine(Machine):
    """Writes arguments as JSON, each when its value is complete. A value is text where the function's schema says so;
    else it is JSON, or text if it is none.

    tools: functions as OpenAI describes them.
    """

    def __init__(self, tools: Tools):
        super().__init__()
        self._schemas = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}
        self._state = "content"
        self._text = self._key = ""
        self._function, self._count = "", 0

    def step(self) -> bool:
        return getattr(self, f"_{self._state}")()

    def collect(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        """The whole text before the first of the markers, once that is there."""
        text, marker = self.until(markers)
        self._text += text
        if marker is None:
            return "", None
        whole, self._text = self._text, ""
        return whole, marker

    def begin_call(self, name: str) -> None:
        self._function, self._count = name, 0
        self.call(name)

    def argument(self, key: str, text: str) -> None:
        schema = self._schemas.get(self._function, {}).get(key, {})
        start = "{" if self._count == 0 else ", "
        self._count += 1
        self.arguments(f"{start}{json.dumps(key)}: {json.dumps(_typed(text, schema), ensure_ascii=False)}")

    def end_call(self) -> None:
        self.arguments("}" if self._count else "{}")

    def end(self) -> None:
        """End the text. If a call is cut off, its complete arguments count."""
        if self._state in ("opened", "name"):
            self.content("<tool_call>" + self._text)
        elif self._state not in ("content", "closing"):
            self.end_call()


class GLM(TaggedMachine):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>, with or without line ends."""

    def _content(self) -> bool:
        text, marker = self.until(("<tool_call>",))
        self.content(text)
        self._state = "content" if marker is None else "name"
        return marker is not None

    def _name(self) -> bool:
        name, marker = self.collect(("<arg_key>", "</tool_call>"))
        if marker is None:
            return False
        self.begin_call(name.strip())
        self._begin_or_end(marker)
        return True

    def _begin_or_end(self, marker: str) -> None:
        self._state = "read_key" if marker == "<arg_key>" else "content"
        if self._state == "content":
            self.end_call()

    def _read_key(self) -> bool:
        key, marker = self.collect(("</arg_key>",))
        if marker is None:
            return False
        self._key, self._state = key.strip(), "before_value"
        return True

    def _before_value(self) -> bool:
        _, marker = self.collect(("<arg_value>",))
        self._state = "before_value" if marker is None else "read_value"
        return marker is not None

    def _read_value(self) -> bool:
        value, marker = self.collect(("</arg_value>",))
        if marker is None:
            return False
        self.argument(self._key, value)
        self._state = "between"
        return True

    def _between(self) -> bool:
        _, marker = self.collect(("<arg_key>", "</tool_call>"))
        if marker is None:
            return False
        self._begin_or_end(marker)
        return True


class QwenCoder(TaggedMachine):
    """<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>, each on its line."""

    def _content(self) -> bool:
        text, marker = self.until(("<tool_call>", "<function="))
        self.content(text)
        self._state = {"<tool_call>": "opened", "<function=": "name"}.get(marker or "", "content")
        return marker is not None

    def _opened(self) -> bool:
        """Read what is behind the marker, which is text if no function follows it. False if more text is needed."""
        function, stripped = "<function=", self.rest.lstrip()
        if function.startswith(stripped) and not self.final:
            return False
        if stripped.startswith(function):
            self.rest, self._state = stripped[len(function) :], "name"
        else:
            self.content("<tool_call>")
            self._state = "content"
        return True

    def _name(self) -> bool:
        name, marker = self.collect((">",))
        if marker is None:
            return False
        self.begin_call(name.strip())
        self._state = "between"
        return True

    def _between(self) -> bool:
        _, marker = self.collect(("<parameter=", "</function>"))
        if marker is None:
            return False
        self._state = "read_key" if marker == "<parameter=" else "closing"
        if self._state == "closing":
            self.end_call()
        return True

    def _read_key(self) -> bool:
        key, marker = self.collect((">",))
        if marker is None:
            return False
        self._key, self._state = key.strip(), "read_value"
        return True

    def _read_value(self) -> bool:
        value, marker = self.collect(("</parameter>",))
        if marker is None:
            return False
        self.argument(self._key, value.removeprefix("\n").removesuffix("\n"))
        self._state = "between"
        return True

    def _closing(self) -> bool:
        """Between </function> and </tool_call>, which some answers leave out."""
        self.skip_space()
        if not self.rest:
            return False
        closed = self.starts("</tool_call>")
        self._state = "closing" if closed is None else "content"
        return closed is not None


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value
