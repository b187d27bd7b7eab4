"""Tools and thoughts over HTTP. What the model writes is scripted: a tiny one writes no calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import pytest

from tests.helpers.servers import NAME, ScriptedLLM, serving

MESSAGES = [{"role": "user", "content": "How is it in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% endif %}{% endfor %}{{ tools | length if tools }}"
)
QWEN = TEMPLATE + "{# <tool_call> </think> #}"
PIECES = ["<think>W", "eather.</think>\n\nI look.\n<tool_", 'call>{"name": "weather", "argum', 'ents": {"city": ']
PIECES += ['"Paris"}}\n</tool_call>', '\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>']


@contextmanager
def client_of(llm, template: str = QWEN, **options) -> Iterator[openai.OpenAI]:
    with (
        serving(llm, chat_template=template, **options) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def scripted(served_llm) -> Callable[..., ScriptedLLM]:
    return lambda *pieces: ScriptedLLM(served_llm, [pieces])


def test_calls(scripted):
    with client_of(scripted(*PIECES)) as client:
        (choice,) = client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == choice.message.reasoning == "Weather."
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert len({call.id for call in calls}) == 2


def test_streamed_calls(scripted):
    """By the client's helper, which joins pieces; and the pieces themselves."""
    options = {"model": NAME, "messages": MESSAGES, "tools": [WEATHER]}
    with client_of(scripted(*PIECES)) as client:
        with client.chat.completions.stream(**options) as stream:
            events = list(stream)
            message = stream.get_final_completion().choices[0].message
        chunks = list(client.chat.completions.create(**options, stream=True))
    assert message.content == "I look."
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Paris", "Rome"]
    assert sum(event.type == "tool_calls.function.arguments.done" for event in events) == 2
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in pieces if call.id] == ["weather", "weather"]
    assert sum(call.index == 0 for call in pieces) > 2
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Weather."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_only(scripted):
    with client_of(scripted(*PIECES)) as client:
        options = {"model": NAME, "messages": MESSAGES, "tools": [WEATHER], "parallel_tool_calls": False}
        (choice,) = client.chat.completions.create(**options).choices
    assert len(choice.message.tool_calls) == 1


def test_no_tools_and_no_thoughts_are_parsed_unless_wanted(scripted):
    text = "".join(PIECES)
    with client_of(scripted(*PIECES)) as client:
        options = {"model": NAME, "messages": MESSAGES}
        (choice,) = client.chat.completions.create(**options, tools=[WEATHER], tool_choice="none").choices
        assert choice.message.content == text.partition("</think>\n\n")[2]
        (choice,) = client.chat.completions.create(**options, extra_body={"include_reasoning": False}).choices
        assert choice.message.content == text
    with client_of(scripted(*PIECES), reasoning_parser="none", tool_parser="none") as client:
        assert client.chat.completions.create(**options).choices[0].message.content == text
        with pytest.raises(openai.BadRequestError, match="--tool-parser"):
            client.chat.completions.create(**options, tools=[WEATHER])


def test_thoughts_that_the_prompt_begins(scripted):
    with client_of(scripted("We", "ather.</think>Fine."), QWEN + "<think>\n") as client:
        (choice,) = client.chat.completions.create(model=NAME, messages=MESSAGES).choices
    assert (choice.message.reasoning, choice.message.content) == ("Weather.", "Fine.")


def test_harmony(scripted):
    pieces = (
        "<|channel|>analysis<|mess",
        "age|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather",
    )
    with client_of(scripted(*pieces, '<|message|>{"city": "Paris"}'), TEMPLATE + "{# <|channel|> #}") as client:
        options = {"model": NAME, "messages": MESSAGES, "tools": [WEATHER]}
        (choice,) = client.chat.completions.create(**options).choices
        with pytest.raises(openai.BadRequestError, match="tool_choice auto only"):
            client.chat.completions.create(**options, tool_choice="required")
    assert choice.message.reasoning == "Hm."
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'


def test_a_conversation_with_calls_goes_on(scripted, served_llm):
    """The template gets arguments as an object."""
    llm = scripted("Fine.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    with client_of(llm) as client:
        client.chat.completions.create(model=NAME, messages=messages, tools=[WEATHER])
        prompt = served_llm.tokenizer.decode(llm.asked[0][0]["prompt_token_ids"])
        assert '{"city": "Paris"}' in prompt
        call["function"]["arguments"] = "{"
        with pytest.raises(openai.BadRequestError, match="is not valid JSON"):
            client.chat.completions.create(model=NAME, messages=messages)
