"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from inferlib.serving.errors import ApiError
from inferlib.serving.exchange import Exchange
from inferlib.serving.service import new_id
from inferlib.serving.streaming import Send

OPEN_PATHS = frozenset(
    {"/", "/health", "/load", "/metrics"}
)  # for load balancers, Prometheus, and whoever has no key yet


def read_keys(key: str | None, file: Path | None) -> tuple[str, ...]:
    """The keys of the command line: one, or those of a file, a line each. Raises ValueError and OSError."""
    if key is not None and file is not None:
        raise ValueError("--api-key and --api-key-file are one or the other")
    keys = (key,) if key is not None else ()
    if file is not None:
        keys = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        if not keys:
            raise ValueError(f"--api-key-file {file} is empty: write a key a line")
    if any(not key or not key.isprintable() or not key.isascii() or key != key.strip() for key in keys):
        raise ValueError("an API key is printable ASCII, with no space around it")
    return keys


class KeyCheck:
    """An ASGI application in front of another: without one of the keys a request is answered with 401."""

    def __init__(self, app: Callable[..., Awaitable[None]], keys: tuple[str, ...]):
        self._app, self._keys = app, [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "the API key is missing or wrong: send the header Authorization: Bearer KEY", code="invalid_api_key"
        )
        await Exchange(send, new_id("req")).error(error)

    def _admits(self, headers: Headers) -> bool:
        sent = headers.get("authorization", "").encode("latin-1")
        matches = [hmac.compare_digest(sent, key) for key in self._keys]  # of all, so that the time says nothing
        return any(matches)
