"""Chats and completions through OpenAI's client: create, stream, log-probabilities, n, seeds, stop, usage, leaving."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest

from inferlib import SamplingParams
from inferlib.serving.streaming import encode
from tests.helpers.servers import NAME

MESSAGES = [{"role": "user", "content": "ab"}]
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def expected(served_llm):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return served_llm.chat(MESSAGES, params)[0]


def test_a_chat(client, expected):
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert choice.message.tool_calls is None
    assert (choice.finish_reason, answer.object, answer.model) == ("length", "chat.completion", NAME)
    size = len(expected.prompt_token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        size,
        12,
        size + 12,
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id.startswith("req-")


def test_a_streamed_chat(client, expected):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(messages=MESSAGES, **GREEDY, **options)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 12)


def test_the_stream_helper_of_the_client(client, expected):
    """It takes no answer that max_tokens ended, so a stop string ends this one."""
    text = expected.outputs[0].text
    with client.chat.completions.stream(messages=MESSAGES, **GREEDY, stop=text[6:8]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == text[: text.index(text[6:8])]


def test_events_as_they_are_written(http):
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 2, "stream": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.slow
def test_chat_logprobs(client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 12
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert isinstance(entry.bytes, list)
    chunks = client.chat.completions.create(messages=MESSAGES, **GREEDY, logprobs=True, top_logprobs=3, stream=True)
    streamed = [e for chunk in chunks if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
    assert streamed == entries
    none = client.chat.completions.create(messages=MESSAGES, **GREEDY, logprobs=True)
    assert none.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.slow
def test_several_answers_and_seeds(client):
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 6, "n": 3, "temperature": 1, "seed": 5}
    first, second = (client.chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_stop(client, expected):
    text = expected.outputs[0].text
    stop = text[4:6]
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]
    chunks = client.chat.completions.create(messages=MESSAGES, **GREEDY, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text[: text.index(stop)]


def test_completions(client, served_llm):
    """Several prompts of both kinds, whole and streamed."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["ab", "a longer prompt"]
    expected = [output.outputs[0].text for output in served_llm.generate(prompts, params)]
    answer = client.completions.create(prompt=prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1]
    ids = [served_llm.tokenizer.encode(prompt) for prompt in prompts]
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=ids, **GREEDY, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected


@pytest.mark.slow
def test_completion_logprobs_and_echo(client, served_llm):
    answer = client.completions.create(prompt="abc", **GREEDY, logprobs=2, echo=True)
    (choice,) = answer.choices
    assert choice.text.startswith("abc")
    assert len(choice.logprobs.tokens) == 3 + 12
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
    assert choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert all(1 <= len(top) <= 2 for top in choice.logprobs.top_logprobs[3:])  # tokens may have the same text
    (known,) = served_llm.logprobs([served_llm.tokenizer.encode("abc")])
    assert choice.logprobs.token_logprobs[1:3] == pytest.approx(known.tolist(), abs=1e-4)
    scored = client.completions.create(model=NAME, prompt="abc", max_tokens=0, logprobs=0, echo=True)
    assert scored.choices[0].text == "abc"
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(known.tolist(), abs=1e-4)


def test_options_of_vllm(client, served_llm):
    body = {"allowed_token_ids": [70, 71], "min_tokens": 4, "top_k": 2, "ignore_eos": True}
    answer = client.completions.create(model=NAME, prompt="x", max_tokens=4, extra_body=body)
    assert set(answer.choices[0].text) <= set(served_llm.tokenizer.decode([70, 71]))


def test_a_client_that_leaves_frees_its_row(client, served_llm):
    """While it streams, and while it waits for a whole answer."""
    long = {"model": NAME, "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(messages=MESSAGES, **long, stream=True)
    next(iter(stream))
    stream.close()
    assert_becomes_idle(served_llm)

    async def leave():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="x", max_retries=0) as other:
            task = asyncio.create_task(other.completions.create(prompt=["a"] * 20, **long))
            while not served_llm.engine.scheduler.running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert_becomes_idle(served_llm)


def assert_becomes_idle(llm):
    for _ in range(2000):
        if llm._runner.settled().result() and llm.engine.scheduler.idle and not llm._runner._texts:
            return
        time.sleep(0.005)
    raise AssertionError("rows are still in use")


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (NAME, 128)
    assert client.models.retrieve(NAME).id == NAME


def test_health_and_metrics(client, http):
    before = _metric(http, "vllm:generation_tokens_total")
    client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert http.get("/health").json() == {"status": "ok"}
    assert _metric(http, "vllm:generation_tokens_total") == before + 12
    assert _metric(http, "vllm:num_requests_running") == 0
    text = http.get("/metrics").text
    for name in ("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum", "kv_cache_usage_perc"):
        assert f"vllm:{name}" in text


def _metric(http, name: str) -> float:
    (line,) = [x for x in http.get("/metrics").text.splitlines() if x.startswith(name + "{")]
    return float(line.rsplit(" ", 1)[1])


def test_json_is_one_line_for_every_client():
    value = {"text": "a\x85b\u2028c\u2029d\x0ce\x1cf\né"}
    assert encode(value).splitlines() == [encode(value)]
    assert json.loads(encode(value)) == value
    assert "é" in encode(value)
