"""Adapters of a server: clients name them in the model's place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from inferlib import LLM, AsyncLLM, Buckets, SamplingParams
from inferlib.serving.service import ServerOptions, Service
from tests.helpers.adapters import write_for
from tests.helpers.cli_model import make_model
from tests.helpers.llms import build_llm
from tests.helpers.servers import NAME, serving

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
MESSAGES = [{"role": "user", "content": "ab"}]
SAME = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    model, folder = make_model(tmp_path_factory.mktemp("model"), layers=1), tmp_path_factory.mktemp("adapters")
    for rank, name in enumerate(("first", "second"), 2):
        write_for(model, folder / name, ("q_proj", "o_proj", "down_proj"), rank)
    return model, {name: folder / name for name in ("first", "second")}


@pytest.fixture(scope="module")
def llm(adapters) -> LLM:
    """With room for one of two."""
    buckets = Buckets(prefill=(16,), batch=(4,), cache=(64,))
    model, folders = adapters
    return build_llm(model, buckets, decode_steps=2, adapters=folders, max_adapters=1, max_adapter_rank=4)


@pytest.fixture(scope="module")
def address(llm) -> Iterator[str]:
    with serving(llm) as where:
        yield where


@pytest.fixture
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed(client):
    listed = {model.id: model.model_dump() for model in client.models.list().data}
    assert list(listed) == [NAME, "first", "second"]
    assert [listed[name].get("parent") for name in listed] == [None, NAME, NAME]
    assert client.models.retrieve("second").id == "second"


@pytest.mark.slow
def test_every_endpoint_takes_one(client, llm):
    """Text, streams, chats, responses and vectors, each as in Python; the answer has the name that was asked for."""
    answers = set()
    for model, adapter in ((NAME, None), ("first", "first"), ("second", "second")):
        (expected,) = llm.generate("ab", GREEDY, adapter=adapter)
        answer = client.completions.create(model=model, prompt="ab", **SAME)
        assert (answer.choices[0].text, answer.model) == (expected.outputs[0].text, model)
        stream = client.completions.create(model=model, prompt="ab", stream=True, **SAME)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected.outputs[0].text
        (expected,) = llm.chat(MESSAGES, GREEDY, adapter=adapter)
        chat = client.chat.completions.create(model=model, messages=MESSAGES, **SAME)
        assert (chat.choices[0].message.content, chat.model) == (expected.outputs[0].text, model)
        response = client.responses.create(model=model, input="ab", temperature=0, max_output_tokens=8)
        assert (response.output_text, response.model) == (expected.outputs[0].text, model)
        vector = client.embeddings.create(model=model, input="ab")
        np.testing.assert_allclose(vector.data[0].embedding, llm.embed("ab", adapter=adapter)[0], atol=1e-5)
        answers.add(answer.choices[0].text)
    assert len(answers) == 3


@pytest.mark.slow
def test_many_at_a_time(address, llm):
    """Adapters take turns in one slot."""
    names = [NAME, "first", "second", "second", "first", NAME, "first", "second"]
    expected = {name: llm.generate("xyz", GREEDY, adapter=None if name == NAME else name)[0] for name in set(names)}

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            answers = [client.completions.create(model=name, prompt="xyz", **SAME) for name in names]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    assert asyncio.run(ask()) == [expected[name].outputs[0].text for name in names]


def test_unknown_ones_are_not_found(client, llm, adapters):
    """Also one that was unloaded meanwhile; one that was loaded is served."""
    for call in (
        lambda: client.completions.create(model="third", prompt="ab"),
        lambda: client.chat.completions.create(model="third", messages=MESSAGES),
        lambda: client.responses.create(model="third", input="ab"),
        lambda: client.embeddings.create(model="third", input="ab"),
        lambda: client.models.retrieve("third"),
    ):
        with pytest.raises(openai.NotFoundError, match="'third' does not exist: this server has tiny, first, second"):
            call()
    llm.load_adapter("third", adapters[1]["first"])
    assert client.completions.create(model="third", prompt="ab", **SAME).model == "third"
    llm.unload_adapter("third")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="third", prompt="ab")


def test_an_adapter_called_like_the_model_is_refused(llm):
    with pytest.raises(ValueError, match="'first' is the name of the model and of an adapter: rename one"):
        Service(AsyncLLM(llm), ServerOptions(names=("first",)))


def test_asyncio(llm, adapters):
    """Loaded, asked and unloaded in an event loop."""

    async def ask() -> list[int]:
        async with AsyncLLM(llm) as engine:
            await engine.load_adapter("mine", adapters[1]["second"])
            outputs = [output async for output in engine.generate("ab", GREEDY, adapter="mine")]
            await engine.unload_adapter("mine")
            return outputs[-1].outputs[0].token_ids

    assert asyncio.run(ask()) == llm.generate("ab", GREEDY, adapter="second")[0].outputs[0].token_ids
