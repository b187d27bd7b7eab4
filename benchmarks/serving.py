"""The server's own work per token: CPU time of its event loop's thread, while many clients stream.

    JAX_PLATFORMS=cpu python benchmarks/serving.py --model smollm2 --streams 200 --tokens 16

The clients are a process of their own. Their texts are compared with those of `LLM.generate`: none may differ. An event
has all tokens of a dispatch, and of several where the clients or the loop are slower than the model. What a request
costs once (its connection, its prompt) is told by streams of one token; the last figure has it in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import queue
import threading
import time
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from inferlib import LLM, AsyncLLM, SamplingParams
from inferlib.bench.events import event_data
from inferlib.serving.server import Address, Server
from inferlib.serving.service import ServerOptions

Texts = list[tuple[str, int, int]]  # of each stream: text, tokens, events


def ask(url: str, prompts: list[str], tokens: int) -> Texts:
    """All prompts at a time."""

    async def one(client: httpx.AsyncClient, prompt: str) -> tuple[str, int, int]:
        text, count, events = "", 0, 0
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        async with client.stream("POST", f"{url}/v1/completions", json=body | options) as answer:
            answer.raise_for_status()
            async for data in event_data(answer.aiter_bytes()):
                if data != "[DONE]":
                    chunk = json.loads(data)
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    events += len(chunk["choices"])
                    count = chunk["usage"]["completion_tokens"] if chunk["usage"] else count
        return text, count, events

    async def everything() -> Texts:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    return asyncio.run(everything())


class Run(NamedTuple):
    """What clients got, the seconds that it took, and those of CPU time in the server's thread."""

    texts: Texts
    seconds: float
    spent: float

    @property
    def tokens(self) -> int:
        return sum(count for _, count, _ in self.texts)

    @property
    def events(self) -> int:
        return sum(events for _, _, events in self.texts)


def serve(llm: LLM, prompts: list[str], lengths: list[int]) -> list[Run]:
    """A run for each number of tokens, one after the other, on one server."""
    address = Address("127.0.0.1", 0)
    bound, server = address.bind(), Server(AsyncLLM(llm), ServerOptions(names=("model",)), address)
    bound.listen(2 * len(prompts))
    loops: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()

    async def run() -> None:
        loops.put(asyncio.get_running_loop())
        await server.serve(sockets=[bound])

    def loop_of_server() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(run())

    thread = threading.Thread(target=loop_of_server)
    thread.start()
    loop, runs = loops.get(), []

    def spent() -> float:
        times: queue.Queue[float] = queue.Queue()
        loop.call_soon_threadsafe(lambda: times.put(time.thread_time()))
        return times.get()

    with multiprocessing.get_context("spawn").Pool(1) as clients:
        clients.apply(time.sleep, (1,))  # until process and server are there
        for tokens in lengths:
            before, start = spent(), time.perf_counter()
            texts = clients.apply(ask, (f"http://127.0.0.1:{bound.getsockname()[1]}", prompts, tokens))
            runs.append(Run(texts, time.perf_counter() - start, spent() - before))
    server.should_exit = True
    thread.join()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    parser.add_argument("--max-batch", type=int, default=64)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, max_batch=arguments.max_batch, max_len=arguments.tokens + 64, progress=False)
    prompts = [f"The number {i} is" for i in range(arguments.streams)]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]  # and compiles
    _, short, run = serve(llm, prompts, [1, 1, arguments.tokens])
    wrong = sum(text != known for (text, _, _), known in zip(run.texts, expected, strict=True))
    wrong += sum(count != arguments.tokens for _, count, _ in run.texts)
    event = (run.spent - short.spent) / (run.events - short.events)
    request = (short.spent - event * short.events) / len(prompts)
    table = Table(title=f"{arguments.model}, {len(prompts)} streams of {arguments.tokens} tokens")
    row = {
        "tokens/s": f"{run.tokens / run.seconds:.0f}",
        "tokens an event": f"{run.tokens / run.events:.1f}",
        "us a request": f"{1e6 * request:.0f}",
        "us an event": f"{1e6 * event:.0f}",
        "us a token": f"{1e6 * (run.spent - request * len(prompts)) / run.tokens:.0f}",
        "us a token, all": f"{1e6 * run.spent / run.tokens:.0f}",
        "wrong": str(wrong),
    }
    for name in row:
        table.add_column(name, justify="right")
    table.add_row(*row.values())
    Console().print(table)


if __name__ == "__main__":
    main()
