"""Wrong requests: the right status, OpenAI's body, a message that names the fix; and the server goes on."""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from inferlib.engine.engine import Engine
from inferlib.serving.service import Limits
from tests.helpers.servers import NAME, serving

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "ab"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields):
    return {"model": NAME, "messages": MESSAGES, "max_tokens": 2, **fields}


def complete(**fields):
    return {"model": NAME, "prompt": "ab", "max_tokens": 2, **fields}


WRONG = [
    (CHAT, chat(model="other"), 404, "model", "this server has tiny"),
    (CHAT, [], 400, None, "the body must be a JSON object"),
    (CHAT, {"model": NAME}, 400, "messages", "give at least one"),
    (CHAT, chat(messages=[{"role": "nobody", "content": "x"}]), 400, "messages[0]", "a role of system"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", "give a text"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0].content", "text"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "must be a number"),
    (CHAT, chat(temperature=-1), 400, "temperature", "temperature must be"),
    (CHAT, chat(n=2, temperature=0), 400, "n", "must be 1 when temperature is 0"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "needs logprobs=true"),
    (CHAT, chat(logprobs=True, top_logprobs=50), 400, "logprobs", "20"),
    (CHAT, chat(max_tokens=500), 400, None, "maximum context length is 128 tokens"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "max_tokens must be"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 500}]), 400, None, "shorten the prompt"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "give stream=true"),
    (CHAT, chat(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "Unrecognized"),
    (CHAT, chat(surprise=1), 400, "surprise", "Unrecognized request argument"),
    (CHAT, chat(functions=[]), 400, "functions", "use tools"),
    (CHAT, chat(store=True), 400, "store", "nothing is stored"),
    (CHAT, chat(modalities=["audio"]), 400, "modalities", "text"),
    (CHAT, chat(chat_template="x"), 400, "chat_template", "--trust-request-chat-template"),
    (CHAT, chat(reasoning_effort="low"), 400, "reasoning_effort", "knows none"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, None, "no option of the template"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "needs tools"),
    (CHAT, chat(tools=[{}]), 400, "tools[0]", "must be"),
    (CHAT, chat(tools=[TOOL], tool_choice={"function": {"name": "g"}}), 400, "tool_choice", "none of the tools f"),
    (CHAT, chat(tools=[TOOL]), 400, "tools", "takes no tools"),
    (CHAT, chat(response_format={"type": "yaml"}), 400, "response_format.type", "json_schema"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format.schema", "is missing"),
    (CHAT, chat(logit_bias={"a": 1}), 400, "logit_bias", "token ids"),
    (CHAT, chat(stop=[1]), 400, "stop", "list of texts"),
    (CHAT, chat(seed=-1), 400, "seed", "seed must be"),
    (COMPLETE, complete(prompt=None), 400, "prompt", "a list of token ids"),
    (COMPLETE, complete(prompt=[]), 400, "prompt", "a list of token ids"),
    (COMPLETE, complete(prompt=[[1, "a"]]), 400, "prompt", "a list of token ids"),
    (COMPLETE, complete(prompt=[10**9]), 400, None, "outside the vocabulary"),
    (COMPLETE, complete(suffix="x"), 400, "suffix", "not supported"),
    (COMPLETE, complete(best_of=3), 400, "best_of", "use n"),
    (COMPLETE, complete(max_tokens=0), 400, "max_tokens", "only with echo"),
    (COMPLETE, complete(use_beam_search=True), 400, "use_beam_search", "LLM.beam_search"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), WRONG)
def test_a_wrong_request(http, path, body, status, param, message):
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_bodies_that_are_no_json(http):
    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        answer = http.post(CHAT, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert http.get("/health").status_code == 200


def test_addresses_and_methods(http):
    for method, path, status in (("GET", "/v2", 404), ("GET", CHAT, 405), ("POST", "/health", 405)):
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["type"] != "") == (status, True)
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_errors_of_the_client(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="x", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=7000)
    assert caught.value.param == "temperature"


def test_a_template_that_raises(served_llm):
    template = "{{ raise_exception('roles must alternate') }}"
    with serving(served_llm, chat_template=template) as address:
        answer = httpx.post(address + CHAT, json=chat())
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]
        assert httpx.post(address + COMPLETE, json=complete(), timeout=300).status_code == 200


def test_limits(served_llm, monkeypatch):
    advance, limits = Engine.advance, Limits(body=1000, prompt=8, requests=1)
    with serving(served_llm, limits=limits) as address:
        answer = httpx.post(address + CHAT, json=chat(user="x" * 1000))
        assert (answer.status_code, "--max-body" in answer.json()["error"]["message"]) == (413, True)
        chunked = httpx.post(address + CHAT, content=iter([b"x" * 600, b"x" * 600]))
        assert chunked.status_code == 413
        answer = httpx.post(address + COMPLETE, json=complete(prompt="x" * 9))
        assert (answer.status_code, "takes 8" in answer.json()["error"]["message"]) == (400, True)
        slow = lambda engine, **options: time.sleep(0.05) or advance(engine, **options)  # noqa: E731
        monkeypatch.setattr(Engine, "advance", slow)  # the stream lasts until the other request has come
        with httpx.stream("POST", address + COMPLETE, json=complete(max_tokens=100, stream=True, ignore_eos=True)):
            busy = httpx.post(address + COMPLETE, json=complete())
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")


def test_keys(served_llm):
    with serving(served_llm, keys=("one", "two")) as address:
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}, {"authorization": "Bearer é"}):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = httpx.get(f"{address}/v1/models", headers=encoded)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("one", "two"):
            assert openai.OpenAI(base_url=f"{address}/v1", api_key=key).models.list().data[0].id == NAME
        assert httpx.get(f"{address}/health").status_code == 200


def test_an_engine_that_fails(served_llm, monkeypatch):
    """Whole answers get status 500, streams that have begun an event; the next request is served."""
    advance, left = Engine.advance, [3]

    def failing(engine, **options):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device is gone")
        return advance(engine, **options)

    with serving(served_llm) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
        options = {"model": NAME, "prompt": "ab", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
        monkeypatch.setattr(Engine, "advance", failing)
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.completions.create(**options)
        left[0] = 6
        with pytest.raises(openai.APIError, match="the device is gone"):
            list(client.completions.create(**options, stream=True))
        assert len(client.completions.create(**options).choices) == 1
