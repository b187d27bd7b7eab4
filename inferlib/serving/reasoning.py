"""Thoughts between two markers at the beginning of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from inferlib.serving.deltas import Content
from inferlib.serving.tools.machine import Machine


@dataclass(frozen=True)
class Markers:
    """What stands before and behind thoughts."""

    open: str
    close: str


THINK = Markers("<think>", "</think>")  # DeepSeek R1, Qwen 3, GLM 4.5 and many others
MARKERS = {
    "think": THINK,
    "mistral": Markers("[THINK]", "[/THINK]"),
    "seed": Markers("<seed:think>", "</seed:think>"),
    "granite": Markers("Here is my thought process:", "Here is my response:"),
}


class Thoughts(Machine):
    """Tells thoughts from content. White space around either is left out.

    inside: the prompt ends with the opening marker. An answer without it is content, then; with it, thoughts.
    """

    def __init__(self, markers: Markers, *, inside: bool):
        super().__init__()
        self._markers, self._state = markers, "inside" if inside else "start"
        self._leading = True  # nothing of this part was passed on
        self._pause = ""  # white space that more thoughts may follow

    def step(self) -> bool:
        if self._state == "start":
            return self._start()
        if self._state == "inside":
            return self._inside()
        if self._leading:
            self.skip_space()
            self._leading = not self.rest
        if self.rest:
            self._emit(Content(self.rest))
            self.rest = ""
        return False

    def _start(self) -> bool:
        """Before the opening marker, or content without it."""
        stripped = self.rest.lstrip()
        if stripped.startswith(self._markers.open):
            self.rest, self._state = stripped[len(self._markers.open) :], "inside"
        elif self._markers.open.startswith(stripped) and not self.final:
            return False
        else:
            self._state, self._leading = "content", False
        return True

    def _inside(self) -> bool:
        if self._leading:
            self.skip_space()
            opened = self.starts(self._markers.open)  # some models write again what the prompt ends with
            if opened is not False:
                return bool(opened)
        text, marker = self.until((self._markers.close,))
        self._think(text)
        if marker is not None:
            self._state, self._leading = "content", True
        return marker is not None

    def _think(self, text: str) -> None:
        text, self._pause = self._pause + text, ""
        if body := text.rstrip():
            self._leading = False
            self.reasoning(body)
        self._pause = text[len(body) :]
