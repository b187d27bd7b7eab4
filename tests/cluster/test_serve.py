"""Replicas on a Ray cluster of this machine: routes, routing, and the loss of a replica. About a minute."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from inferlib import LLM, Buckets, SamplingParams
from inferlib.cluster.serve import Replicas, application, build
from tests.helpers.cli_model import make_model
from tests.helpers.servers import free_port

NAMESPACE, COUNT = "serve", 2
# Few programs, which replicas load that come after the model of one process.
BUCKETS = Buckets(prefill=(128,), batch=(4,), cache=(512,))
OPTIONS = {"max_batch": 4, "max_len": 512, "buckets": BUCKETS, "decode_steps": 1, "dtype": "float32"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_model(tmp_path_factory.mktemp("cluster"), layers=1, context=512))


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    """The model of one process, which has generated."""
    llm = LLM(model, progress=False, **OPTIONS)
    texts(llm, ["abc"], 8)
    return llm


@pytest.fixture(scope="module")
def address(cluster, model, llm) -> str:
    """Replicas, which have answered, and which end with the cluster."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(model, Replicas(COUNT, COUNT, cpus=1), **OPTIONS))
    return f"http://127.0.0.1:{port}"


def ask(address: str, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=300)


def replicas() -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == NAMESPACE and "#Replica#" in a["name"]]


def texts(llm: LLM, prompts: list[str], tokens: int, **options: Any) -> list[str]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, **options))
    return [output.outputs[0].text for output in outputs]


def test_answers_are_those_of_one_process(address, model, llm):
    response = ask(address, prompt="abc")
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == texts(llm, ["abc"], 8)[0]
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == model
    assert httpx.get(f"{address}/health").status_code == 200


def test_streams_and_errors(address):
    with httpx.stream(
        "POST", f"{address}/v1/completions", json={"prompt": "abc", "max_tokens": 4, "stream": True}, timeout=300
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert ask(address, prompt="abc", model="other").status_code == 404
    assert "not valid JSON" in httpx.post(f"{address}/v1/completions", content=b"{").json()["error"]["message"]
    assert "of one server" in httpx.get(f"{address}/metrics").json()["error"]["message"]


def test_a_prefix_goes_where_it_is_cached(address):
    """By chance, one in 2 ** 7."""
    prompt = "prefix " * 45
    cached = [ask(address, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(8)]
    assert cached[0] == 0
    assert min(cached[1:]) > 0


async def _under_load(address: str, prompts: list[str], streamed: str) -> tuple[list[httpx.Response], str]:
    """All at once, with a replica killed as soon as a stream has begun; the responses, and the stream's text."""
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        body = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
        tasks = [asyncio.ensure_future(client.post("/v1/completions", json=body | {"prompt": p})) for p in prompts]
        parts = []
        request = body | {"prompt": streamed, "stream": True}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for part in response.aiter_text():
                if not parts:
                    ray.kill(ray.get_actor(replicas()[0], namespace=NAMESPACE))
                parts.append(part)
        return await asyncio.gather(*tasks), "".join(parts)


def test_a_replica_is_killed_under_load(address, llm):
    """Requests are answered, by others where need be. Streams end, or say that they were cut. Ray starts a new one."""
    prompts = [f"request {i}" for i in range(12)]
    before = set(replicas())
    responses, stream = asyncio.run(_under_load(address, prompts, "a stream"))
    assert [response.status_code for response in responses] == [200] * len(prompts)
    expected = texts(llm, prompts, 100, ignore_eos=True)
    assert [r.json()["choices"][0]["text"] for r in responses] == expected
    events = [line[6:] for line in stream.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]" or json.loads(events[-1])["error"]["code"] == "replica_lost"
    end = time.monotonic() + 120
    while len(now := set(replicas())) < COUNT or now == before:
        assert time.monotonic() < end
        time.sleep(0.5)


def test_arguments_of_the_command():
    made = build({"model": "m", "least": "2", "most": "4", "engine": '{"max_len": 64}', "resources": {"TPU": 4}})
    assert isinstance(made, serve.Application)
    for arguments, message in (
        ({}, "model is missing"),
        ({"model": "m", "replicas": 3}, "replicas is no argument: there are model, "),
        ({"model": "m", "least": 3}, "least <= most"),
        ({"model": "m", "engine": "{"}, "engine is not JSON"),
        ({"model": "m", "engine": "3"}, "engine must be a mapping"),
        ({"model": "m", "attempts": 0}, "attempts=0"),
    ):
        with pytest.raises(ValueError, match=message):
            build(arguments)
