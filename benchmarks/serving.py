"""The server's own work per token: CPU time of its event loop's thread, while many clients stream.

    JAX_PLATFORMS=cpu python benchmarks/serving.py --model smollm2 --streams 200 --tokens 16

The clients are a process of their own. Their texts are compared with those of `LLM.generate`: none may differ. An event
has all tokens of a dispatch, and of several where the clients or the loop are slower than the model; so there are two
figures. Both have in them what a request costs once (its connection, its prompt), which few tokens share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import threading
import time

import httpx
from rich.console import Console
from rich.table import Table

from inferlib import LLM, AsyncLLM, SamplingParams
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
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    events += len(chunk["choices"])
                    count = chunk["usage"]["completion_tokens"] if chunk["usage"] else count
        return text, count, events

    async def everything() -> Texts:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    return asyncio.run(everything())


def serve(llm: LLM, prompts: list[str], tokens: int) -> tuple[Texts, float, float]:
    """What the clients got, the seconds that it took, and those of CPU time in the server's thread."""
    address = Address("127.0.0.1", 0)
    bound, server = address.bind(), Server(AsyncLLM(llm), ServerOptions(names=("model",)), address)
    bound.listen(2 * len(prompts))
    spent: list[float] = []

    def run() -> None:
        server.run(sockets=[bound])
        spent.append(time.thread_time())

    thread = threading.Thread(target=run)
    thread.start()
    with multiprocessing.get_context("spawn").Pool(1) as clients:
        clients.apply(time.sleep, (0,))  # until the process is there
        start = time.perf_counter()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        texts = clients.apply(ask, (url, prompts, tokens))
        seconds = time.perf_counter() - start
    server.should_exit = True
    thread.join()
    return texts, seconds, spent[0]


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
    texts, seconds, spent = serve(llm, prompts, arguments.tokens)
    tokens, events = sum(count for _, count, _ in texts), sum(events for _, _, events in texts)
    wrong = sum(text != known for (text, _, _), known in zip(texts, expected, strict=True))
    wrong += sum(count != arguments.tokens for _, count, _ in texts)
    table = Table("model", "streams", "tokens", "tokens/s", "tokens an event", "us a token", "us an event", "wrong")
    row = (arguments.model, len(texts), tokens, f"{tokens / seconds:.0f}", f"{tokens / events:.1f}")
    times = (f"{1e6 * spent / tokens:.0f}", f"{1e6 * spent / events:.0f}")
    table.add_row(*map(str, (*row, *times, wrong)))
    Console().print(table)


if __name__ == "__main__":
    main()
