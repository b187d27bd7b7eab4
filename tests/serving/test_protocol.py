"""Whatever a request has in its fields, reading it gives a request or an `ApiError`."""

from __future__ import annotations

import contextlib
import random

import pytest

from inferlib import SamplingParams
from inferlib.serving.errors import ApiError
from inferlib.serving.fields import Fields
from inferlib.serving.protocol import read_chat, read_completion, read_prompts
from inferlib.serving.responses import read_response

JUNK = (
    *(None, True, False, 0, 1, -1, 3.5, -0.1, 10**400, 1e999, -1e999, float("nan"), 2**40, "", "x", "\ud800", "auto"),
    *(
        [],
        [None],
        [1],
        [10**400],
        ["x"],
        [[]],
        [[1, "x"]],
        {},
        {"type": "function"},
        {"a": 1},
        {"1": "x"},
        {"1": 10**400},
    ),
    *([{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}], [{"role": "assistant", "tool_calls": 1}]),
    *([{"type": "function", "function": {"name": 1}}], {"type": "json_schema", "json_schema": {"schema": 1}}),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],),
    *(
        [{"role": "user", "content": "x", "tool_calls": [{}]}],
        [{"type": "message", "role": 1}],
        {"format": {"type": 1}},
    ),
)
FIELDS = (
    *("model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "stop"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "logit_bias", "stream", "echo"),
    *("stream_options", "response_format", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("structured_outputs", "guided_json", "guided_choice", "reasoning_effort", "reasoning", "text", "instructions"),
    *(
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
        "priority",
        "cache_salt",
        "deadline",
        "truncate_prompt_tokens",
        "depth",
        "exit_threshold",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "prompt_logprobs",
        "best_of",
        "user",
    ),
    *("suffix", "modalities", "store", "add_generation_prompt", "continue_final_message", "documents", "chat_template"),
    *("tool_choice", "functions", "include_reasoning", "ignore_eos", "previous_response_id", "include"),
    *("truncate_prompt_tokens", "surprise"),
)
READERS = {
    "chat": (read_chat, {"messages": [{"role": "user", "content": "x"}]}),
    "completion": (read_completion, {"prompt": "x"}),
    "response": (read_response, {"input": "x"}),
}


@pytest.mark.parametrize("kind", READERS)
def test_any_value_of_any_field(kind):
    """Alone, and two of them."""
    read, good = READERS[kind]
    read(good, SamplingParams())
    rng, refused = random.Random(3), 0
    bodies = [{**good, name: value} for name in FIELDS for value in JUNK]
    bodies += [{**good, **{rng.choice(FIELDS): rng.choice(JUNK) for _ in range(2)}} for _ in range(3000)]
    for body in [*bodies, *JUNK]:
        try:
            read(body, SamplingParams())
        except ApiError as error:
            refused += error.status == 400 and error.message != ""
    assert refused > len(bodies) / 3


def test_prompts():
    for value in JUNK:
        with contextlib.suppress(ApiError):
            assert read_prompts(Fields({"input": value}), "input")


def test_null_is_absent():
    """As clients send fields that are not set."""
    body = {"messages": [{"role": "user", "content": "x"}], **dict.fromkeys(set(FIELDS) - {"messages"})}
    assert read_chat(body, SamplingParams(seed=4)).common.params.seed == 4
