"""Two hundred streams at a time: no error, no token lost or doubled."""

from __future__ import annotations

import asyncio

import openai
import pytest

from inferlib import Buckets, SamplingParams
from tests.helpers.llms import build_llm
from tests.helpers.servers import NAME, serving

STREAMS = 200


def stream_all(address: str, prompts: list[str], tokens: int) -> list[tuple[str, int]]:
    """Text and number of tokens of each, from one client."""

    async def one(client: openai.AsyncOpenAI, prompt: str) -> tuple[str, int]:
        text, count = "", 0
        options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(
            model=NAME, prompt=prompt, max_tokens=tokens, temperature=0, timeout=600, **options
        )
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            count = chunk.usage.completion_tokens if chunk.usage else count
        return text, count

    async def main() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    return asyncio.run(main())


def assert_whole(llm, address: str, tokens: int) -> None:
    prompts = [f"The number {i} is" for i in range(STREAMS)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    expected = [(output.outputs[0].text, tokens) for output in llm.generate(prompts, params)]
    assert stream_all(address, prompts, tokens) == expected


def test_two_hundred_streams(served_llm, address):
    assert_whole(served_llm, address, 10)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_two_hundred_streams_of_real_weights():
    llm = build_llm("smollm2", Buckets(prefill=(32,), batch=(64,), cache=(64,)), scan=True)
    with serving(llm) as address:
        assert_whole(llm, address, 8)
