"""What a parser makes of an answer, piece by piece: thoughts, content, and calls of functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The call number `index` of an answer begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | Reasoning | Call | Arguments


class Parser(Protocol):
    """Reads an answer. How the text is split into pieces never changes what the joined deltas are."""

    def feed(self, text: str) -> list[Delta]:
        """What this piece of the text, behind all before it, makes certain."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back: the text has ended."""
        ...


class ContentParser:
    """All text is content."""

    def feed(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class Chain:
    """Two parsers: the second reads the content of the first."""

    def __init__(self, first: Parser, second: Parser):
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Delta]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Delta]:
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, deltas: Iterable[Delta]) -> list[Delta]:
        passed: list[Delta] = []
        for delta in deltas:
            passed += self._second.feed(delta.text) if isinstance(delta, Content) else [delta]
        return passed


@dataclass
class Answer:
    """Deltas, joined. calls: name and arguments of each."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> Answer:
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, Call):
                self.calls.append((delta.name, ""))
            else:
                name, arguments = self.calls[delta.index]
                self.calls[delta.index] = name, arguments + delta.text
        return self
