"""Sends requests to a server and measures its answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx

from inferlib.bench.events import event_data
from inferlib.bench.workload import Asked, Load


class BenchError(ValueError):
    """A server that cannot be measured."""


@dataclass(frozen=True)
class Endpoint:
    """url: of the server, with or without /v1. model: None asks the server. chat: ask by chats, not by completions.
    ignore_eos: answers have all tokens that they may, of servers with vLLM's option. timeout: seconds of a request."""

    url: str
    model: str | None = None
    key: str | None = None
    chat: bool = False
    ignore_eos: bool = False
    timeout: float = 600.0

    @property
    def base(self) -> str:
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"

    def client(self) -> httpx.AsyncClient:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=self.timeout)

    def body(self, asked: Asked) -> tuple[str, dict[str, Any]]:
        """The address and the body of a request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": asked.max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat or not isinstance(asked.prompt, str):
            text = asked.prompt
            body["messages"] = [{"role": "user", "content": text}] if isinstance(text, str) else text
            return f"{self.base}/chat/completions", body
        return f"{self.base}/completions", body | {"prompt": asked.prompt}


@dataclass
class Measured:
    """One request: seconds after the start at which it was sent, got its first token and ended. gaps: seconds between
    events with text. error: why it has no answer; None if it has."""

    sent: float
    first: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def itl(self) -> float | None:
        """Mean seconds between tokens after the first; None if there are none."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.end - self.first) / (self.output_tokens - 1)


async def find_model(endpoint: Endpoint) -> str:
    """The first model of a server. Raises BenchError if it does not answer."""
    try:
        async with endpoint.client() as client:
            answer = await client.get(f"{endpoint.base}/models", timeout=min(endpoint.timeout, 30))
        if answer.status_code != 200:
            raise BenchError(f"{endpoint.base}/models answers with {_message(answer.status_code, answer.content)}")
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BenchError(f"no server answers at {endpoint.base}: {reason}; start one, or correct --url") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError, UnicodeError):
        raise BenchError(f"{endpoint.base}/models lists no model: give --model") from None


async def measure(
    endpoint: Endpoint,
    asked: list[Asked],
    load: Load,
    *,
    seed: int = 0,
    done: Callable[[Measured], None] = lambda measured: None,
) -> list[Measured]:
    """Send requests as the load says. Errors are in the results. done: called with each result as it comes."""
    room = nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    async with endpoint.client() as client:
        start = time.perf_counter()

        async def one(request: Asked, at: float) -> Measured:
            await asyncio.sleep(at - (time.perf_counter() - start))
            async with room:
                measured = await _ask(client, endpoint, request, start)
            done(measured)
            return measured

        return await asyncio.gather(*map(one, asked, load.times(asked, seed)))


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, asked: Asked, start: float) -> Measured:
    url, body = endpoint.body(asked)
    measured = Measured(time.perf_counter() - start)
    try:
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                measured.error = _message(answer.status_code, await answer.aread())
            else:
                await _read(answer, measured, start)
    except httpx.HTTPError as error:
        measured.error = " ".join(str(error).split()) or type(error).__name__
    measured.end = time.perf_counter() - start
    return measured


async def _read(answer: httpx.Response, measured: Measured, start: float) -> None:
    """Take the events of an answer. Its last line says that it is whole."""
    last, events, ended = 0.0, 0, False
    async for data in event_data(answer.aiter_bytes()):
        if data == "[DONE]":
            ended = True
            break
        try:
            chunk = json.loads(data)
        except ValueError:
            measured.error = f"an event is no JSON: {data[:100]}"
            return
        if chunk.get("error"):
            measured.error = str(chunk["error"].get("message", chunk["error"]))[:200]
            return
        if any(map(_has_text, chunk.get("choices") or ())):
            now = time.perf_counter() - start
            if measured.first is None:
                measured.first = now
            else:
                measured.gaps.append(now - last)
            last, events = now, events + 1
        if usage := chunk.get("usage"):
            _count(measured, usage)
    if not ended:
        measured.error = "the stream ended before [DONE]"
    measured.output_tokens = measured.output_tokens or events


def _count(measured: Measured, usage: dict[str, Any]) -> None:
    measured.prompt_tokens = usage.get("prompt_tokens") or 0
    measured.output_tokens = usage.get("completion_tokens") or 0
    measured.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    names = ("content", "reasoning", "reasoning_content", "tool_calls")
    return bool(choice.get("text") or any(delta.get(name) for name in names))


def _message(status: int, body: bytes) -> str:
    """The status and what the server says of it."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")
    return f"status {status}: {' '.join(text.split())[:200]}"
