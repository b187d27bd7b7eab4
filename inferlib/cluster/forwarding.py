"""An HTTP request that goes through an ASGI application of this process, and its answer as a stream of parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class ForwardedRequest:
    """blocks: hashes of its prompt's prefixes, which it is routed by."""

    method: str
    path: str
    headers: Headers
    body: bytes
    blocks: tuple[bytes, ...] = ()

    def scope(self) -> dict[str, Any]:
        """The request as an ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": list(self.headers),
        }


@dataclass(frozen=True)
class Head:
    """The beginning of an answer."""

    status: int
    headers: Headers


async def answer_parts(app: Callable[..., Awaitable[None]], request: ForwardedRequest) -> AsyncIterator[Head | bytes]:
    """The answer of an application: its head, then its body as it comes. Leaving the loop cancels the request."""
    parts: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    pending = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        # Who leaves the loop cancels the task, so no message says that the client is gone.
        return pending.pop() if pending else await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(app(request.scope(), receive, parts.put))
    task.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            if part["type"] == "http.response.start":
                yield Head(part["status"], tuple(part.get("headers", ())))
            elif part.get("body"):
                yield part["body"]
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
