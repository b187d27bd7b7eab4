"""Calls that are written as JSON objects: of Qwen and Hermes, of Llama 3, and those that a grammar forces."""

from __future__ import annotations

from collections.abc import Collection

from inferlib.serving.tools.json_text import CallObject, ValueEnd
from inferlib.serving.tools.machine import Machine


class ObjectMachine(Machine):
    """Reads calls as objects. Until an object has a name it may be no call, and its text is content then."""

    def __init__(self) -> None:
        super().__init__()
        self._object: CallObject | None = None
        self._raw = ""  # text of a call that is not certain
        self._named = False

    def begin(self, made: CallObject, raw: str) -> None:
        """An object follows. raw: what stood before it, which is content if it is no call."""
        self._object, self._raw, self._named = made, raw, False

    def in_object(self) -> bool:
        """Take what belongs to the object. Returns whether it has ended."""
        made = self._object
        assert made is not None
        taken = made.take(self.rest)
        text, self.rest = self.rest[:taken], self.rest[taken:]
        if not self._named:
            self._raw += text
        if made.name is not None:  # it is a call, however it goes on
            if not self._named:
                self._named = True
                self.call(made.name)
            self.arguments("".join(made.pieces))
            made.pieces.clear()
        if not (made.done or made.failed):
            return False
        if not self._named:
            self.content(self._raw)
        self._object = None
        return True

    def end(self) -> None:
        if self._object is not None and not self._named:
            self.content(self._raw)


class Hermes(ObjectMachine):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Qwen 2.5 and 3, and of Hermes models."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._after = False  # an object has ended, and its closing marker is to come

    def step(self) -> bool:
        if self._object is not None:
            self._after = self.in_object() and self._named
            return self._object is None
        text, marker = self.until((self.CLOSE, self.OPEN) if self._after else (self.OPEN,))
        if not self._after:
            self.content(text)
        if marker == self.OPEN:
            self.begin(CallObject(), self.OPEN)
        self._after = self._after and marker is None
        return marker is not None


class Llama3(ObjectMachine):
    """{"name": ..., "parameters": {...}}, perhaps behind <|python_tag|>, several with ; between them. Any other answer
    is content, and so is an object that names no function of the request.

    names: of these functions.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]):
        super().__init__()
        self._names = frozenset(names)
        self._calling = True  # a call may begin here
        self._separator = ""

    def step(self) -> bool:
        if self._object is not None:
            ended = self.in_object()
            self._calling = not ended or self._named
            return ended
        if not self._calling:
            self.content(self.rest)
            self.rest = ""
            return False
        space = len(self.rest) - len(self.rest.lstrip(" \t\r\n;" if self._calls else None))
        self._separator, self.rest = self._separator + self.rest[:space], self.rest[space:]
        tagged = self.starts(self.TAG)
        if tagged or not self.rest or tagged is None:
            self._separator += self.TAG if tagged else ""
            return bool(tagged)
        if self.rest.startswith("{"):
            self.begin(CallObject(self._names.__contains__), self._separator)
        else:
            self.rest = ("" if self._calls else self._separator) + self.rest
            self._calling = False
        self._separator = ""
        return True

    def end(self) -> None:
        super().end()
        if self._calling and self._object is None and not self._calls:
            self.content(self._separator)


class NamedCall(Machine):
    """The whole answer is the arguments of one function, as a grammar forces it."""

    def __init__(self, name: str):
        super().__init__()
        self._name, self._value = name, ValueEnd()

    def step(self) -> bool:
        if not self._calls:
            self.skip_space()
            if not self.rest:
                return False
            self.call(self._name)
        taken = 0 if self._value.done else self._value.take(self.rest)
        self.arguments(self.rest[:taken])
        self.rest = ""
        return False


class CallArray(ObjectMachine):
    """The whole answer is an array of calls, as a grammar forces it."""

    def step(self) -> bool:
        if self._object is not None:
            return self.in_object()
        if self.rest.startswith("{"):
            self.begin(CallObject(), "")
        else:
            self.rest = self.rest[1:]  # brackets, commas and white space
        return True
