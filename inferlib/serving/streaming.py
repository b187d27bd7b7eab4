"""Server-sent events: lines `data: JSON` in the answer to a request, the last of them `data: [DONE]`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[Any], Awaitable[None]]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Many clients end lines at these as well, so they are escaped.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # for nginx, which would collect events
]


def encode(value: Any) -> str:
    """JSON without spaces, of one line."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


class EventStream:
    """The answer to one request as events. It begins with the first of them, so until then an error has a status."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]):
        self._send, self._headers = send, headers
        self.started = False

    async def text(self, data: str) -> None:
        """Send events that are written out."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS + self._headers})
        await self._send({"type": "http.response.body", "body": data.encode("utf-8", "replace"), "more_body": True})

    async def event(self, value: Any, name: str | None = None) -> None:
        head = "" if name is None else f"event: {name}\n"
        await self.text(f"{head}data: {encode(value)}\n\n")

    async def close(self, *, done: bool = True) -> None:
        """End the answer. done: with the line that OpenAI's clients wait for."""
        if done:
            await self.text("data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class ChunkWriter:
    """Chunks of one stream, whose beginning and end are always the same text. usage: each has a field for it."""

    def __init__(self, fields: dict[str, Any], *, usage: bool):
        self._head = f"data: {encode(fields)[:-1]}," + '"choices":['
        self._usage = usage

    def chunk(self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> str:
        """An event. choice: None in the last chunk, which has only the usage."""
        text = "" if choice is None else encode(choice)
        tail = f',"usage":{encode(usage)}' if self._usage else ""
        return f"{self._head}{text}]{tail}}}\n\n"
