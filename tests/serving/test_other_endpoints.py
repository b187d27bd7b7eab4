"""Embeddings, responses, tokens, and the page."""

from __future__ import annotations

import numpy as np
import openai
import pytest

from inferlib import SamplingParams
from tests.helpers.servers import NAME, ScriptedLLM, serving

GREEDY = {"model": NAME, "temperature": 0}


def test_embeddings(client, served_llm):
    """The client asks for base64; floats are the same vectors."""
    texts = ["ab", "a longer text"]
    expected = served_llm.embed(texts)
    answer = client.embeddings.create(model=NAME, input=texts)
    np.testing.assert_allclose([entry.embedding for entry in answer.data], expected, rtol=1e-5, atol=1e-6)
    ids = [served_llm.tokenizer.encode(text) for text in texts]
    floats = client.embeddings.create(model=NAME, input=ids, encoding_format="float")
    np.testing.assert_allclose([entry.embedding for entry in floats.data], expected, rtol=1e-5, atol=1e-6)
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    mean = client.embeddings.create(model=NAME, input="ab", extra_body={"pooling": "mean", "normalize": False})
    np.testing.assert_allclose(mean.data[0].embedding, served_llm.embed("ab", "mean", normalize=False)[0], atol=1e-5)
    for options, message in (
        ({"input": "x", "dimensions": 3}, "cut them in the client"),
        ({"input": []}, "must be a text"),
        ({"input": "x" * 200}, "exceeds max_len"),
        ({"input": "x", "extra_body": {"pooling": "max"}}, "pooling"),
        ({"input": "x", "encoding_format": "int8"}, "float or base64"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.embeddings.create(model=NAME, **options)


def test_tokens(http, served_llm):
    ids = served_llm.tokenizer.encode("abc")
    answer = http.post("/tokenize", json={"model": NAME, "prompt": "abc", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 128, "tokens": ids, "token_strs": ["a", "b", "c"]}
    messages = [{"role": "user", "content": "ab"}]
    chat = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert chat["tokens"] == served_llm.chat_prompt(messages, add_generation_prompt=False)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "abc"}
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": ["a"]}), ("/detokenize", {"tokens": [-1]})):
        assert http.post(path, json=body).status_code == 400


def test_a_response(client, served_llm):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    (expected,) = served_llm.chat(messages, params)
    options = {**GREEDY, "input": "ab", "instructions": "s", "max_output_tokens": 12}
    answer = client.responses.create(**options)
    assert (answer.output_text, answer.status) == (expected.outputs[0].text, "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 12
    events = list(client.responses.create(**options, stream=True))
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert events[-1].response.output_text == answer.output_text
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]}]
    assert client.responses.create(**{**options, "input": parts}).output_text == answer.output_text


def test_thoughts_of_a_response(served_llm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    llm = ScriptedLLM(served_llm, [["<think>\nHm", "m.</thi", "nk>\n\nHel", "lo"]])
    with serving(llm, chat_template=template) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x")
        thoughts, message = client.responses.create(model=NAME, input="ab").output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "Hmm.")
        assert (message.type, message.content[0].text, message.status) == ("message", "Hello", "completed")
        events = list(client.responses.create(model=NAME, input="ab", stream=True))
        with client.responses.stream(model=NAME, input="ab") as stream:
            assert stream.get_final_response().output_text == "Hello"
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hmm."
    assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1]
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp-1"}, "send the whole conversation"),
        ({"tools": [{"type": "web_search"}]}, "use /v1/chat/completions"),
        ({"store": True}, "store=false"),
        ({"input": [{"type": "function_call_output"}]}, "no message"),
        ({"input": 3}, "a text or a list of messages"),
        ({"extra_body": {"surprise": 1}}, "Unrecognized"),
    ],
)
def test_wrong_responses(client, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": NAME, "input": "ab", **options})


def test_the_page(http):
    """It is one file that names no other address, and what it shows is a number each."""
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "http://" not in page.text
    assert "https://" not in page.text
    load = http.get("/load").json()
    assert (load["model"], load["rows"], load["running"]) == (NAME, 4, 0)
    for name in ("waiting", "used_pages", "pages", "cached_tokens", "prompt_tokens", "generated_tokens", "seconds"):
        assert f"load.{name}" in page.text
        assert load[name] >= 0
