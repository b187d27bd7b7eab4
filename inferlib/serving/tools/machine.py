"""What parsers of streams have in common: text that is not certain yet, and the markers that are looked for in it."""

from __future__ import annotations

from collections.abc import Sequence

from inferlib.serving.deltas import Arguments, Call, Content, Delta, Reasoning


class Machine:
    """A parser whose `step` takes what is certain off the beginning of `rest`.

    A step returns False if it needs more text; it decides nothing that more text could change, so pieces may be cut
    anywhere. `final`: there is no more. White space at the end of content waits for what follows it, and is left out
    before a call.
    """

    def __init__(self) -> None:
        self.rest, self.final = "", False
        self._deltas: list[Delta] = []
        self._space = ""
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        self.rest += text
        return self._run()

    def finish(self) -> list[Delta]:
        self.final = True
        deltas = self._run()
        self.end()
        if self._space:
            self._emit(Content(self._space))
            self._space = ""
        return joined(deltas + self._taken())

    def step(self) -> bool:
        """Take something off `rest`, which is not empty, or change the state. False: more text is needed."""
        raise NotImplementedError

    def end(self) -> None:
        """The text has ended where it is."""

    # ---- for steps

    def until(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """Take the text up to the first of these markers, and the marker; None if there is none yet. What may be the
        beginning of one stays."""
        places = [(at, marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
        if places:
            at, marker = min(places)
            before, self.rest = self.rest[:at], self.rest[at + len(marker) :]
            return before, marker
        end = len(self.rest) if self.final else len(self.rest) - _begun(self.rest, markers)
        before, self.rest = self.rest[:end], self.rest[end:]
        return before, None

    def starts(self, marker: str) -> bool | None:
        """Whether the rest begins with a marker; None if that is not certain. If it does, the marker is taken."""
        if self.rest.startswith(marker):
            self.rest = self.rest[len(marker) :]
            return True
        return None if marker.startswith(self.rest) and not self.final else False

    def skip_space(self) -> None:
        self.rest = self.rest.lstrip()

    def content(self, text: str) -> None:
        text, self._space = self._space + text, ""
        if body := text.rstrip():
            self._emit(Content(body))
        self._space = text[len(body) :]

    def reasoning(self, text: str) -> None:
        if text:
            self._emit(Reasoning(text))

    def call(self, name: str) -> None:
        """A call begins."""
        self._space = ""
        self._emit(Call(self._calls, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if text:
            self._emit(Arguments(self._calls - 1, text))

    # ---- inside

    def _emit(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def _run(self) -> list[Delta]:
        while self.rest and self.step():
            pass
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return joined(deltas)


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    made: list[Delta] = []
    for delta in deltas:
        last = made[-1] if made else None
        if isinstance(delta, Content) and isinstance(last, Content):
            made[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            made[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, Arguments) and isinstance(last, Arguments) and last.index == delta.index:
            made[-1] = Arguments(last.index, last.text + delta.text)
        else:
            made.append(delta)
    return made


def _begun(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of the text may begin a marker."""
    most = max(map(len, markers)) - 1
    for length in range(min(most, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
