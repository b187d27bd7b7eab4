"""Answers of gpt-oss in OpenAI's harmony format: messages in channels (https://github.com/openai/harmony)."""

from __future__ import annotations

import re

from inferlib.serving.tools.machine import Machine

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(Machine):
    """`<|channel|>analysis<|message|>` begins thoughts; `final`, and `commentary` to nobody, content; a message
    `to=functions.NAME` is a call. The first message has no `<|start|>`, which is in the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._header: str | None = ""  # of a message whose text has not begun; None within one
        self._kind = "content"

    def step(self) -> bool:
        if self._header is not None:
            return self._in_header(self._header)
        text, marker = self.until(_ENDS)
        self._body(text)
        if marker is None:
            return False
        self._header = ""
        return True

    def _in_header(self, before: str) -> bool:
        text, marker = self.until((_MESSAGE,))
        header = before + text
        if marker is None:
            self._header = header
            return False
        self._header = None
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._kind = "call"
            self.call(recipient[1].removeprefix("functions."))
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        return True

    def _body(self, text: str) -> None:
        if self._kind == "call":
            self.arguments(text)
        elif self._kind == "reasoning":
            self.reasoning(text)
        else:
            self.content(text)

    def end(self) -> None:
        """Text without any header is no message, and so an answer as it stands."""
        if self._header and "<|" not in self._header:
            self.content(self._header)
