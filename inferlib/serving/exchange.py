"""One request and its answer: the body is read up to a limit, and a client that leaves ends the work for it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers

from inferlib.serving.errors import ApiError
from inferlib.serving.service import Service, new_id
from inferlib.serving.streaming import EventStream, Send, encode

_LOG = logging.getLogger("inferlib.serving")
Answer = Callable[[Service, Any, "Exchange"], Awaitable[Any]]


class Exchange:
    """What an endpoint answers on. It returns a JSON value; or it sends `events`, and returns None."""

    def __init__(self, send: Send, request_id: str):
        self.request_id = request_id
        self._send, self._headers = send, [(b"x-request-id", request_id.encode("latin-1"))]
        self.events = EventStream(send, self._headers)

    async def json(self, status: int, value: Any) -> None:
        body = encode(value).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += self._headers
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if status in (429, 503):
            headers.append((b"retry-after", b"1"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def error(self, error: ApiError) -> None:
        """Send an error; if the answer has begun, as its last event."""
        if not self.events.started:
            await self.json(error.status, error.body())
        else:
            await self.events.event(error.body())
            await self.events.close()


class Endpoint:
    """An ASGI application that answers JSON with JSON or events."""

    def __init__(self, service: Service, answer: Answer):
        self._service, self._answer = service, answer

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        exchange = Exchange(send, new_id("req"))
        try:
            body = await read_json(scope, receive, self._service.options.limits.body)
            with self._service.admitted():
                value = await _unless_left(receive, self._answer(self._service, body, exchange))
            if value is not None:
                await exchange.json(200, value)
        except ClientLeft:
            return
        except ApiError as error:
            self._service.metrics.errors[error.status] += 1
            await exchange.error(error)
        except Exception as error:
            _LOG.exception("request %s failed", exchange.request_id)
            self._service.metrics.errors[500] += 1
            await exchange.error(ApiError(500, f"the server failed: {error}; see its log", code="internal_error"))


class ClientLeft(Exception):
    """Nobody waits for an answer."""


async def read_json(scope: Any, receive: Callable[[], Awaitable[Any]], limit: int) -> Any:
    """The body of a request. Raises ApiError if it is longer than the limit, or no JSON."""
    too_large = ApiError(
        413, f"the body is larger than {limit} bytes: send less, or start the server with a larger --max-body"
    )
    length = Headers(scope=scope).get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            break
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


async def _unless_left(receive: Callable[[], Awaitable[Any]], work: Awaitable[Any]) -> Any:
    """The result of the work, which is cancelled when the client disconnects: ClientLeft."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
