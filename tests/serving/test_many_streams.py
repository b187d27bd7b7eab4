"""Many streams at a time: no error, no token lost or doubled."""

from __future__ import annotations

import asyncio

import openai
import pytest

from inferlib import SamplingParams
from tests.helpers.servers import NAME

STREAMS = 80


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


@pytest.mark.slow
def test_eighty_streams(served_llm, address):
    prompts = [f"The number {i} is" for i in range(STREAMS)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    expected = [(output.outputs[0].text, 10) for output in served_llm.generate(prompts, params)]
    assert stream_all(address, prompts, 10) == expected
