"""Parsers of calls and thoughts: what families write, and that pieces never change the result."""

# ruff: noqa: RUF001 (DeepSeek's markers have wide bars)

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferlib.serving.deltas import Answer, Chain, Parser
from inferlib.serving.parsers import TOOL_PARSERS
from inferlib.serving.reasoning import MARKERS, THINK, Thoughts
from inferlib.serving.tools.objects import CallArray, Hermes, NamedCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
PARIS = '{"city": "Paris", "days": 3}'
BEGIN, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END, ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
CODER_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

# Name of a parser, what the model writes, and the answer: content, thoughts, calls.
WRITTEN = [
    ("hermes", "Hello\n", ("Hello\n", "", [])),
    (
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "now"}\n</tool_call>',
        ("I look.", "", [("weather", PARIS), ("now", "{}")]),
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', ("", "", [("now", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "\\"}</tool_call>"}}</tool_call>',
        ("", "", [("f", '{"a": "\\"}</tool_call>"}')]),
    ),
    ("hermes", "a < b <tool_call> is a tag </tool_call>", ("a < b <tool_call> is a tag </tool_call>", "", [])),
    ("hermes", '<tool_call>{"na', ('<tool_call>{"na', "", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', ("", "", [("f", '{"a": [1')])),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
        ("", "", [("weather", PARIS), ("now", "{}")]),
    ),
    (
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}',
        ("", "", [("weather", PARIS)]),
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', "", [])),
    ("llama3_json", ' It is {"name": "now"}', (' It is {"name": "now"}', "", [])),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        ("", "", [("weather", PARIS), ("now", "{}")]),
    ),
    (
        "mistral",
        f"I look. [TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]now{{}}",
        ("I look.", "", [("weather", PARIS), ("now", "{}")]),
    ),
    ("mistral", "[1, 2]", ("[1, 2]", "", [])),
    (
        "deepseek_v3",
        f"I look.{BEGIN}{CALL}function{SEP}weather\n```json\n{PARIS}\n```{END}\n{CALL}function{SEP}now\n```json\n{{}}\n"
        f"```{END}{ENDS}",
        ("I look.", "", [("weather", PARIS), ("now", "{}")]),
    ),
    (
        "deepseek_v3",
        f"{BEGIN}{CALL}weather{SEP}{PARIS}{END}{CALL}now{SEP}{{}}{END}{ENDS}",
        ("", "", [("weather", PARIS), ("now", "{}")]),
    ),
    (
        "glm45",
        f"I look.\n{GLM_CALL}\n<tool_call>now</tool_call>",
        ("I look.", "", [("weather", PARIS), ("now", "{}")]),
    ),
    ("qwen3_coder", f"I look.\n\n{CODER_CALL}", ("I look.", "", [("weather", PARIS)])),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", ("", "", [("now", "{}")])),
    ("qwen3_coder", "a <tool_call> is a tag", ("a <tool_call> is a tag", "", [])),
    ("openai", f"{ANALYSIS}<|channel|>final<|message|>Hello.", ("Hello.", "Hm.", [])),
    (
        "openai",
        f"{ANALYSIS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
        ("", "Hm.", [("weather", PARIS)]),
    ),
    (
        "openai",
        f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>"
        "commentary json<|message|>{}",
        ("I look.", "Hm.", [("now", "{}")]),
    ),
    ("openai", "no message", ("no message", "", [])),
]


def read(parser: Parser, pieces: Sequence[str]) -> Answer:
    answer = Answer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    return answer.add(parser.finish())


@pytest.mark.parametrize(("name", "text", "expected"), WRITTEN)
def test_what_families_write(name, text, expected):
    """In one piece, and in pieces of one character."""
    for pieces in ([text], text):
        answer = read(TOOL_PARSERS[name](TOOLS), pieces)
        assert (answer.content, answer.reasoning, answer.calls) == expected


def test_arguments_are_streamed():
    """They do not wait for the end of a call."""
    for name, text in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("mistral", '[TOOL_CALLS]f{"a": 1'),
        ("deepseek_v3", f'{BEGIN}{CALL}f{SEP}{{"a": 1'),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"a": 1'),
    ):
        assert Answer().add(TOOL_PARSERS[name](TOOLS).feed(text)).calls == [("f", '{"a": 1')], name


def test_thoughts():
    for text, inside, expected in (
        ("<think>\nHm. \n\n</think>\n\nHello\n", False, ("Hm.", "Hello\n")),
        ("Hm.</think>Hello", True, ("Hm.", "Hello")),
        ("<think>Hm.</think>Hello", True, ("Hm.", "Hello")),
        ("Hm. It is", True, ("Hm. It is", "")),
        (" Hello <think>", False, ("", " Hello <think>")),
        ("<thin", False, ("", "<thin")),
    ):
        for pieces in ([text], text):
            answer = read(Thoughts(THINK, inside=inside), pieces)
            assert (answer.reasoning, answer.content) == expected


def test_calls_behind_thoughts():
    text = '<think>a <tool_call> in mind</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    answer = read(Chain(Thoughts(THINK, inside=False), Hermes()), list(text))
    assert (answer.reasoning, answer.content, answer.calls) == ("a <tool_call> in mind", "", [("now", "{}")])


def test_forced_calls():
    assert read(NamedCall("weather"), [" ", PARIS]).calls == [("weather", PARIS)]
    text = f'[{{"name": "weather", "parameters": {PARIS}}}, {{"name": "now", "parameters": {{}}}}]'
    assert read(CallArray(), text).calls == [("weather", PARIS), ("now", "{}")]


# ---- pieces

MAKERS: dict[str, Callable[[], Parser]] = {
    **{name: lambda make=make: make(TOOLS) for name, make in TOOL_PARSERS.items()},
    **{f"thoughts {name}": lambda m=m: Thoughts(m, inside=False) for name, m in MARKERS.items()},
    "inside": lambda: Thoughts(THINK, inside=True),
    "chain": lambda: Chain(Thoughts(THINK, inside=False), Hermes()),
    "named": lambda: NamedCall("f"),
    "array": CallArray,
}
# Texts are made of what parsers look for, whole and torn.
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<"),
    *(BEGIN, CALL, SEP, END, ENDS, "<|python_tag|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", "<parameter=", "</parameter>", ">"),
    *(
        '{"name": "now", "arguments": {}}',
        '{"name": "weather", ',
        '"parameters": ',
        PARIS,
        '"',
        "\\",
        "{",
        "}",
        "[",
        "]",
    ),
    *(
        "</function>",
        "analysis",
        "final",
        "commentary to=functions.f",
        "```json\n",
        "function",
        "\n",
        " ",
        ";",
        ",",
        "a",
    ),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.sampled_from(
    [text for _, text, _ in WRITTEN]
)


@pytest.mark.slow
@settings(max_examples=120)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=12))
@example('<tool_call>{"name": "now"}<tool_call>', [11])
def test_pieces_never_change_the_answer(text, cuts):
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(ends)]
    for name, make in MAKERS.items():
        whole = read(make(), [text])
        assert read(make(), pieces) == whole, name
        assert read(make(), text) == whole, name


def test_every_argument_that_a_tagged_call_writes_is_json():
    for name, text in (("glm45", GLM_CALL), ("qwen3_coder", CODER_CALL)):
        for end in range(len(text)):
            for _, arguments in read(TOOL_PARSERS[name](TOOLS), [text[:end]]).calls:
                assert json.loads(arguments).items() <= json.loads(PARIS).items()
