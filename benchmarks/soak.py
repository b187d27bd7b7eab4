"""Send a server thousands of requests of every kind, and check that nothing is lost, wrong or left behind.

    python benchmarks/soak.py --requests 10000

The server is one of a tiny random model in this process. Requests are completions, whole and streamed, with samples,
log-probabilities, JSON schemas, adapters and prefixes that they share. Some clients leave in the middle, some read
slowly, some send what is no request. A sample of the answers is compared with those of the same requests alone. At the
end no row is taken, and threads, files and memory should be as they were after the first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inferlib import LLM, AsyncLLM, Buckets
from inferlib.bench.events import event_data
from inferlib.serving.server import Address, Server
from inferlib.serving.service import Limits, ServerOptions

NAME = "soak"
OPEN = 64  # requests at a time
ADAPTERS = ("first", "second", "third")  # of which two have room
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
BAD = (
    b"{",
    b"[]",
    b'{"prompt": 5, "max_tokens": 4}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "tpyo": 1}',
)


@dataclass
class Result:
    """What came of all requests. wrong: texts that say what was wrong."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # of requests, in JSON


@dataclass(frozen=True)
class Usage:
    """What the process holds. memory: resident bytes."""

    threads: int
    files: int
    memory: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(threading.active_count(), len(os.listdir("/proc/self/fd")), pages * resource.getpagesize())


def request_of(draw: random.Random) -> dict[str, Any]:
    """A completion that draws nothing or has a seed, so that it is the same at each time."""
    prefix = draw.choice(("", "The quick brown fox jumps. ", "Once upon a time there was. "))
    body: dict[str, Any] = {"prompt": f"{prefix}{draw.randrange(1000)}", "max_tokens": draw.randint(1, 24)}
    body["temperature"] = draw.choice((0, 0.8))
    body["seed"] = draw.randrange(100)
    if draw.random() < 0.2:
        body["logprobs"] = 2
    if draw.random() < 0.1:
        body |= {"n": 2, "temperature": 0.8}
    if draw.random() < 0.4:
        body["model"] = draw.choice(ADAPTERS)
    if draw.random() < 0.2:
        body["priority"] = draw.randrange(3)
    if draw.random() < 0.1:
        body |= {"max_tokens": 32, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    return body


class Soak:
    """Clients of one server. address: of the server. seed: of what they ask and do."""

    def __init__(self, address: str, seed: int = 0):
        self._draw, self._result = random.Random(seed), Result()
        self._client = httpx.AsyncClient(base_url=address, timeout=600, limits=httpx.Limits(max_connections=OPEN))
        self._gate = asyncio.Semaphore(OPEN)

    async def run(self, count: int, done: Any) -> Result:
        """Send so many requests, OPEN at a time. done: called after each."""

        async def one() -> None:
            async with self._gate:
                kind = self._draw.choices(("whole", "stream", "leave", "slow", "bad"), (6, 4, 2, 1, 1))[0]
                await getattr(self, f"_{kind}")(request_of(self._draw))
                self._result.kinds[kind] += 1
                done()

        async with self._client:
            await asyncio.gather(*(one() for _ in range(count)))
        return self._result

    async def _whole(self, body: dict[str, Any]) -> None:
        response = await self._client.post("/v1/completions", json=body)
        if response.status_code != 200:
            self._result.wrong.append(f"{response.status_code} for {body}: {response.text:.200}")
            return
        self._check(body, [choice["text"] for choice in response.json()["choices"]])

    async def _stream(self, body: dict[str, Any], pause: float = 0) -> None:
        texts = [""] * body.get("n", 1)
        ended = False
        async for event in self._events(body):
            await asyncio.sleep(pause)
            ended = event == "[DONE]"
            if not ended and "error" in (value := json.loads(event)):
                self._result.wrong.append(f"{value} for {body}")
            elif not ended:
                for choice in value["choices"]:
                    texts[choice["index"]] += choice["text"]
        if not ended:
            self._result.wrong.append(f"a stream without an end: {body}")
        self._check(body, texts)

    async def _slow(self, body: dict[str, Any]) -> None:
        await self._stream(body, 0.02)

    async def _leave(self, body: dict[str, Any]) -> None:
        left = self._draw.randint(0, 4)
        events = self._events(body | {"max_tokens": 40})
        async with contextlib.aclosing(events):
            async for _ in events:
                left -= 1
                if left < 0:
                    return

    async def _bad(self, body: dict[str, Any]) -> None:
        sent = self._draw.choice(BAD)
        response = await self._client.post("/v1/completions", content=sent)
        if response.status_code != 400 or not response.json()["error"]["message"]:
            self._result.wrong.append(f"{response.status_code} for {sent!r}")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        async with self._client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            async for data in event_data(response.aiter_bytes()):
                yield data

    def _check(self, body: dict[str, Any], texts: list[str]) -> None:
        """Equal requests have equal answers, and constrained ones fit their schema."""
        if "response_format" in body:
            self._result.wrong += [f"no JSON of the schema: {text!r}" for text in texts if not _fits(text)]
        key, answer = json.dumps(body, sort_keys=True), json.dumps(texts)
        if self._result.answers.setdefault(key, answer) != answer:
            self._result.wrong.append(f"two answers to {key}")


def _fits(text: str) -> bool:
    """Whether it is of SCHEMA, as far as it goes: 32 tokens may cut it off."""
    try:
        return isinstance(json.loads(text)["n"], int)
    except ValueError:
        return text.lstrip().startswith("{") or not text.strip()


async def alone(address: str, bodies: list[str]) -> list[str]:
    """The answers to these requests, one after the other."""
    answers = []
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        for body in bodies:
            response = await client.post("/v1/completions", content=body)
            answers.append(_answer(response))
    return answers


def _answer(response: httpx.Response) -> str:
    """The texts of an answer, or an error, in JSON."""
    if response.status_code != 200:
        return f"{response.status_code}: {response.text:.200}"
    return json.dumps([choice["text"] for choice in response.json()["choices"]])


@contextlib.contextmanager
def served(llm: LLM) -> Any:
    """The address of a server of it, until the block ends."""
    address = Address("127.0.0.1", 0)
    server = Server(AsyncLLM(llm), ServerOptions(names=(NAME,), limits=Limits(body=1 << 16)), address, drain=5)
    bound: socket.socket = address.bind()
    bound.listen(256)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Report:
    result: Result
    first: Usage
    last: Usage
    seconds: float
    sampled: int


def soak(llm: LLM, requests: int, sample: int, seed: int = 0) -> Report:
    """Run it on a model whose programs are compiled. sample: answers that are compared with those alone."""
    with served(llm) as address, Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("requests", total=requests)
        done = lambda: progress.advance(bar)  # noqa: E731
        tenth = asyncio.run(Soak(address, seed + 1).run(requests // 10, done))
        first, start = Usage.now(), time.monotonic()
        result = asyncio.run(Soak(address, seed).run(requests - requests // 10, done))
        seconds = time.monotonic() - start
        result.kinds += tenth.kinds
        result.wrong += tenth.wrong
        keys = random.Random(seed).sample(sorted(result.answers), min(sample, len(result.answers)))
        for key, answer in zip(keys, asyncio.run(alone(address, keys)), strict=True):
            if answer != result.answers[key]:
                result.wrong.append(f"{result.answers[key]} is {answer} alone: {key}")
        return Report(result, first, Usage.now(), seconds, len(keys))


def tiny_model(folder: Path) -> LLM:
    """The tests' model: one layer, bytes as tokens, more requests and adapters than rows and places for them."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.helpers.adapters import write_for
    from tests.helpers.cli_model import make_model

    model = make_model(folder / "model", layers=1)
    for rank, name in enumerate(ADAPTERS, 1):
        write_for(model, folder / name, ("q_proj", "down_proj"), rank)
    options: dict[str, Any] = {
        "max_batch": 16,
        "max_len": 128,
        "dtype": "float32",
        "decode_steps": 2,
        "progress": False,
    }
    options |= {"adapters": {name: folder / name for name in ADAPTERS}, "max_adapters": 2}
    buckets = Buckets(prefill=(32,), batch=(4, 16), cache=(128,))
    llm = LLM(str(model), buckets=buckets, **options)
    llm.warmup(("greedy", "sample", "logprobs", "processed"))
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--sample", type=int, default=200, help="answers that are compared with those alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(tiny_model(Path(folder)), args.requests, args.sample, args.seed)
    table = Table("", "after a tenth", "at the end", title=f"{args.requests} requests, {report.seconds:.0f} s")
    table.add_row("threads", str(report.first.threads), str(report.last.threads))
    table.add_row("open files", str(report.first.files), str(report.last.files))
    table.add_row("resident memory, MB", f"{report.first.memory / 1e6:.0f}", f"{report.last.memory / 1e6:.0f}")
    Console().print(table)
    print(f"requests: {dict(report.result.kinds)}; {report.sampled} answers compared with those alone")
    print("\n".join(["wrong:", *report.result.wrong[:20]]) if report.result.wrong else "nothing was wrong")
    raise SystemExit(bool(report.result.wrong))


if __name__ == "__main__":
    main()
