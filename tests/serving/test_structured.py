"""Answers of a given form: Pydantic schemas through the client's `parse`, forced tools, and vLLM's fields."""

from __future__ import annotations

import json
import re

import openai
import pydantic
import pytest

from tests.helpers.servers import NAME, serving

MESSAGES = [{"role": "user", "content": "ab"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools }}{# <tool_call> #}"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2, 3]}, "sure": {"type": "boolean"}},
    "required": ["size", "sure"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]


class Verdict(pydantic.BaseModel):
    size: int = pydantic.Field(ge=1, le=9)
    sure: bool


def create(client: openai.OpenAI, **options):
    return client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=100, seed=1, **options)


@pytest.mark.slow
def test_pydantic_schemas(client):
    options = {"model": NAME, "max_tokens": 100, "seed": 1}
    parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Verdict, **options)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(messages=MESSAGES, response_format=Verdict, **options) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)
    answer = client.responses.parse(model=NAME, input="ab", max_output_tokens=100, text_format=Verdict, temperature=0)
    assert isinstance(answer.output_parsed, Verdict)


def test_fields_of_vllm(client):
    for body in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert create(client, extra_body=body).choices[0].message.content in ("yes", "no")
    assert re.fullmatch(
        "a[bc]+d", create(client, extra_body={"guided_regex": "a[bc]{1,5}d"}).choices[0].message.content
    )
    text = client.completions.create(
        model=NAME,
        prompt="x",
        max_tokens=100,
        extra_body={"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": "", "seed": 1},
    )
    assert json.loads(text.choices[0].text).keys() == {"size", "sure"}
    for body, message in (
        ({"guided_regex": "("}, "regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "give one"),
        ({"structured_outputs": {"yaml": 1}}, "Unrecognized"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            create(client, extra_body=body)


def test_forced_tools(served_llm):
    """The named function, and any of several."""
    with serving(served_llm, chat_template=TEMPLATE) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        named = {"type": "function", "function": {"name": "g"}}
        (choice,) = create(client, tools=TOOLS, tool_choice=named).choices
        (call,) = choice.message.tool_calls
        assert call.function.name == "g"
        assert json.loads(call.function.arguments).keys() == {"size", "sure"}
        options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = create(client, **options).choices
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            assert call.function.name in ("f", "g")
            assert json.loads(call.function.arguments).keys() == {"size", "sure"}
        streamed = "".join(
            call.function.arguments or ""
            for chunk in create(client, **options, stream=True)
            for call in chunk.choices[0].delta.tool_calls or ()
        )
        assert streamed == choice.message.tool_calls[0].function.arguments
