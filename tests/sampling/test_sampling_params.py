"""SamplingParams: what is accepted, how it is normalised, and what each refusal says."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re

import numpy as np
import pytest

from inferlib.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, SamplingParams

ACCEPTED = [
    {"n": 3},
    {"max_tokens": None, "min_tokens": 10_000},
    {"max_tokens": 5, "min_tokens": 5},
    {"temperature": 0},
    {"temperature": np.float32(0.5), "top_k": np.int64(5), "seed": np.uint32(2**32 - 1)},
    {"top_k": -1},
    {"top_k": 2**31 - 1},
    {"top_p": 1e-9},
    {"min_p": 0},
    {"min_p": 1},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
    {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS), -100)},
    {"seed": 0},
    {"stop": ["a", "bc"]},
    {"stop_token_ids": list(range(MAX_STOP_TOKENS))},
    {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    {"allowed_token_ids": range(MAX_LOGIT_BIAS)},
    {"bad_words": "cat"},
    {"bad_words": ["cat", [1, 2], (3,)]},
    {"truncate_prompt_tokens": -1},
]

# Fields, and what the error must say: the field, what is allowed, the value.
REFUSED = [
    ({"n": 0}, "n must be an integer in [1, 1024], got 0"),
    ({"n": 1.0}, "n must be an integer in [1, 1024], got 1.0"),
    ({"n": True}, "n must be an integer in [1, 1024], got True"),
    ({"n": 1025}, "n must be an integer in [1, 1024], got 1025"),
    ({"n": 2, "temperature": 0}, "n must be 1 when temperature is 0 (all outputs would be equal), got 2"),
    ({"max_tokens": 0}, "max_tokens must be an integer in [1, 2147483647], got 0"),
    ({"max_tokens": 2**40}, f"max_tokens must be an integer in [1, 2147483647], got {2**40}"),
    ({"min_tokens": -1}, "min_tokens must be an integer in [0, 2147483647], got -1"),
    ({"min_tokens": 17}, "min_tokens must be at most max_tokens (16), got 17"),
    ({"temperature": -0.1}, "temperature must be a number in [0, 100], got -0.1"),
    ({"temperature": math.nan}, "temperature must be a number in [0, 100], got nan"),
    ({"temperature": math.inf}, "temperature must be a number in [0, 100], got inf"),
    ({"temperature": "1"}, "temperature must be a number in [0, 100], got '1'"),
    ({"temperature": None}, "temperature must be a number in [0, 100], got None"),
    ({"temperature": False}, "temperature must be a number in [0, 100], got False"),
    ({"top_k": -2}, "top_k must be an integer in [-1, 2147483647], got -2"),
    ({"top_p": 0}, "top_p must be a number in (0, 1], got 0"),
    ({"top_p": 1.5}, "top_p must be a number in (0, 1], got 1.5"),
    ({"min_p": -0.5}, "min_p must be a number in [0, 1], got -0.5"),
    ({"deadline": 0}, "deadline must be seconds above 0, got 0"),
    ({"deadline": -1.5}, "deadline must be seconds above 0, got -1.5"),
    ({"deadline": math.inf}, "deadline must be seconds above 0, got inf"),
    ({"deadline": math.nan}, "deadline must be seconds above 0, got nan"),
    ({"deadline": True}, "deadline must be seconds above 0, got True"),
    ({"deadline": "soon"}, "deadline must be seconds above 0, got 'soon'"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number in [0.01, 100], got 0"),
    ({"presence_penalty": 2.5}, "presence_penalty must be a number in [-2, 2], got 2.5"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty must be a number in [-2, 2], got -inf"),
    ({"logit_bias": [1, 2]}, "logit_bias must map token ids to numbers, got [1, 2]"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias: a token id must be an integer in [0, 2147483647], got '5'"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias: a token id must be an integer in [0, 2147483647], got -1"),
    ({"logit_bias": {5: 100.5}}, "logit_bias[5] must be a number in [-100, 100], got 100.5"),
    ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias must have at most 300 entries, got 301"),
    ({"seed": -1}, "seed must be an integer in [0, 4294967295], got -1"),
    ({"seed": 2**32}, "seed must be an integer in [0, 4294967295], got 4294967296"),
    ({"stop": ""}, "stop must be a string or a sequence of strings, none of them empty, got ''"),
    (
        {"stop": ["a", ""]},
        "stop must be a string or a sequence of strings, none of them empty, got ['a', '']",
    ),
    ({"stop": 5}, "stop must be a string or a sequence of strings, none of them empty, got 5"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of token ids, got 5"),
    ({"stop_token_ids": "5"}, "stop_token_ids must be a sequence of token ids, got '5'"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids: a token id must be an integer in [0, 2147483647], got 1.5"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, got None"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output must be True or False, got 'no'"),
    ({"allowed_token_ids": []}, "allowed_token_ids must be 1 to 300 tokens, got 0"),
    ({"allowed_token_ids": range(301)}, "allowed_token_ids must be 1 to 300 tokens, got 301"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids: a token id must be an integer in [0, 2147483647], got -1"),
    ({"bad_words": ["a", " "]}, "bad_words must be texts or sequences of token ids, none of them empty, got ' '"),
    ({"bad_words": [[]]}, "bad_words must be texts or sequences of token ids, none of them empty, got []"),
    ({"bad_words": [1]}, "bad_words must be texts or sequences of token ids, none of them empty, got 1"),
    ({"bad_words": {"a"}}, "bad_words must be a list of words, each text or token ids, got {'a'}"),
    ({"bad_words": [["a"]]}, "bad_words: a token id must be an integer in [0, 2147483647], got 'a'"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be an integer in [1, 2147483647], got 0"),
    ({"logprobs": 21}, "logprobs must be an integer in [0, 20], got 21"),
    ({"logprobs": True}, "logprobs must be an integer in [0, 20], got True"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer in [0, 20], got -1"),
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda f: "-".join(f))
def test_accepts(fields):
    SamplingParams(**fields)


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_refuses_with_field_value_and_range(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**fields)


def test_every_field_is_checked():
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(ValueError, match=field.name):
            SamplingParams(**{field.name: object()})


def test_sequences_and_mappings_are_normalised_copies():
    bias, ids = {np.int64(3): np.float32(1.5)}, [4, 5]
    params = SamplingParams(stop="end", stop_token_ids=ids, logit_bias=bias)
    bias[7], ids[0] = 1.0, 9
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (4, 5), {3: 1.5})
    params = SamplingParams(bad_words=["a", np.array([1, 2]).tolist()], allowed_token_ids=[5, 3, 5])
    assert (params.bad_words, params.allowed_token_ids) == (("a", (1, 2)), (5, 3))
    default = SamplingParams()
    assert (default.stop, default.stop_token_ids, default.logit_bias) == ((), (), {})


def test_logits_processors_are_functions_of_two_or_three_arguments():
    def of_two(token_ids, logits, scale=1.0):
        return logits * scale

    params = SamplingParams(temperature=0.0, logits_processors=[of_two, lambda prompt, token_ids, logits: logits])
    assert params.chosen_with_host
    assert params.takes_argmax  # of the logits that they return
    assert SamplingParams(logits_processors=of_two).logits_processors == (of_two,)
    assert SamplingParams(logits_processors=None) == SamplingParams(logits_processors=[]) == SamplingParams()
    assert SamplingParams(temperature=0.0).takes_argmax
    for wrong in ("f", 3, ["f"], [of_two, None], {"f": of_two}):
        with pytest.raises(ValueError, match="logits_processors must be a list of functions, got"):
            SamplingParams(logits_processors=wrong)
    for wrong in (lambda logits: logits, lambda a, b, c, d: d, lambda *, token_ids, logits: logits):
        with pytest.raises(ValueError, match=r"<lambda> must take \(token_ids, logits\) or \(prompt_tok"):
            SamplingParams(logits_processors=[wrong])


def test_is_a_value():
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop=["a"], stop_token_ids=[2])
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert other == params
    assert dataclasses.replace(params, n=2) != params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_greedy_and_plain():
    assert SamplingParams(temperature=0).takes_argmax
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy
    # Neither filters, nor stopping, nor what the output looks like, changes an argmax.
    unimportant = {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "seed": 1, "stop": "a", "stop_token_ids": [1]}
    assert SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, **unimportant).takes_argmax
    for field, value in {
        "temperature": 1.0,
        "min_tokens": 1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "logit_bias": {1: 1.0},
        "allowed_token_ids": [1],
        "bad_words": ["a"],
        "logprobs": 0,
    }.items():
        assert not SamplingParams(**{"temperature": 0, field: value}).takes_argmax, field


def test_stop_ids_join_end_of_sequence():
    assert SamplingParams(stop_token_ids=[5, 2, 5]).stop_ids((2, 7)) == (5, 2, 7)
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).stop_ids((2, 7)) == (5,)
    params = SamplingParams(stop_token_ids=range(MAX_STOP_TOKENS))
    assert len(params.stop_ids((3,))) == MAX_STOP_TOKENS
    with pytest.raises(ValueError, match=r"stop_token_ids .* are 17 tokens together; .* at most 16"):
        params.stop_ids((99,))


def test_validate_for_a_vocabulary():
    SamplingParams(logit_bias={99: 1}, stop_token_ids=[99]).validate_for(100)
    with pytest.raises(ValueError, match=r"^logit_bias: token 100 is not in the model's vocabulary, \[0, 100\)"):
        SamplingParams(logit_bias={3: 1, 100: 1}).validate_for(100)
    with pytest.raises(ValueError, match=r"^stop_token_ids: token 1000 is not"):
        SamplingParams(stop_token_ids=[1000]).validate_for(100)
    with pytest.raises(ValueError, match=r"^allowed_token_ids: token 100 is not"):
        SamplingParams(allowed_token_ids=[100]).validate_for(100)
    with pytest.raises(ValueError, match=r"^bad_words: token 100 is not"):
        SamplingParams(bad_words=[[5, 100]]).validate_for(100)
