"""Sampling options of `LLM` on a tiny model: defaults of the model, allowed tokens, bad words, truncated prompts."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.option_checks import ConfigurationError
from tests.helpers.llms import build_llm, random_prompts, reference
from tests.helpers.tokenizer import VOCAB

EOS = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SUGGESTED = {"temperature": 0.25, "top_k": 20, "top_p": 0.95, "max_new_tokens": 2000, "eos_token_id": [7, 2]}


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=1)


@pytest.fixture
def copy(path, tmp_path):
    return shutil.copytree(path, tmp_path / "model")


def opened(folder, **options) -> LLM:
    return build_llm(folder, Buckets((8,), (2,), (64,)), **options)


def texts(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


# ---- generation_config.json


def test_requests_without_params_are_sampled_as_the_model_suggests(copy):
    (copy / "generation_config.json").write_text(json.dumps(SUGGESTED))
    llm = opened(copy, seed=3)
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.25, top_k=20, top_p=0.95, max_tokens=2000)
    assert llm.tokenizer.eos_token_ids == (7, 2)
    request = llm.prepare([5] * 10)
    # The suggestion may be longer than the context; what a user asks for may not.
    assert request.params == dataclasses.replace(params, max_tokens=54)
    with pytest.raises(ValueError, match="plus max_tokens 2000 exceeds max_len 64"):
        llm.prepare([5] * 10, params)
    assert llm.prepare([5] * 10, params, fit=True).params == request.params
    assert llm.prepare("ab", SamplingParams()).params == SamplingParams()
    assert llm.prepare([5] * 63).params.max_tokens == 1
    with pytest.raises(ValueError, match="64 tokens plus max_tokens 1 exceeds max_len 64"):
        llm.prepare([5] * 64)


def test_none_takes_nothing_but_the_end_of_sequence(copy):
    (copy / "generation_config.json").write_text(json.dumps(SUGGESTED))
    (copy / "tokenizer.json").unlink()  # which would know the tokens too
    llm = opened(copy, generation_config="none")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.prepare([5]).sequences[0].eos_ids == (7, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[]", "must hold a JSON object, it holds a list"),
        ('{"temperature": "hot"}', "temperature must be a number .* generation_config='none'"),
        ('{"top_p": 0}', "top_p must be a number"),
        ('{"max_new_tokens": 0}', "max_tokens must be an integer"),
    ],
)
def test_damaged_suggestions_are_named(copy, text, message):
    (copy / "tokenizer.json").unlink()
    (copy / "generation_config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        LLM(copy)


@pytest.mark.parametrize("choice", ["vllm", "", None, 3, ["auto"]])
def test_a_choice_is_auto_or_none(path, choice):
    with pytest.raises(ConfigurationError, match="generation_config must be 'auto' or 'none', got"):
        LLM(path, generation_config=choice)


# ---- tokens that may be chosen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(small, path, temperature):
    allowed, (prompt, other) = [5, 60, 61, 100, EOS], random_prompts([9, 4], seed=1)
    params = dataclasses.replace(GREEDY, temperature=temperature, allowed_token_ids=allowed, seed=1)
    (tokens, beside) = texts(small, [prompt, other], [params, GREEDY])
    assert set(tokens) <= set(allowed)
    assert beside == texts(small, [other], GREEDY)[0]
    if temperature:
        assert len(set(tokens)) > 2
        return
    logits = reference(path, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    for token, row in zip(tokens, logits, strict=True):
        assert row[token] > max(row[allowed]) - 1e-3


def test_allowed_tokens_need_no_compilation(small):
    prompts = random_prompts([9, 4], seed=1)
    params = SamplingParams(max_tokens=8, seed=1, logit_bias={4: 1.0})
    texts(small, prompts, params)
    compiled = small.compilations
    texts(small, prompts, dataclasses.replace(params, allowed_token_ids=[5, 6], bad_words=["a", "the end"]))
    assert small.compilations == compiled


def test_a_choice_of_nothing_is_refused(small):
    for more in ({"bad_words": [[5], [6]]}, {"min_tokens": 2, "stop_token_ids": [5, 6]}):
        with pytest.raises(ValueError, match="prompt 0: allowed_token_ids leave no token"):
            small.generate("a", SamplingParams(allowed_token_ids=[5, 6], **more))
    with pytest.raises(ValueError, match=f"allowed_token_ids: token {VOCAB} is not in the model's vocabulary"):
        small.generate("a", SamplingParams(allowed_token_ids=[VOCAB]))
    with pytest.raises(ValueError, match="entries together"):
        small.generate("a", SamplingParams(bad_words=[f"{i:03}" for i in range(101)]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_never_completed(small, temperature):
    """Words of the tokens that the model says most, of one to four tokens; everything before the first is as it was."""
    prompts = random_prompts([6, 11, 3], seed=4)
    params = dataclasses.replace(GREEDY, temperature=temperature, seed=5, max_tokens=40)
    free = texts(small, prompts, params)
    words = [tokens[at : at + size] for tokens, at, size in zip(free, (9, 4, 20), (4, 2, 3), strict=True)]
    words = [*words, [free[0][30]]]
    tokens_of = texts(small, prompts, dataclasses.replace(params, bad_words=words))

    def ends(tokens, i):
        return any(tokens[max(0, i + 1 - len(word)) : i + 1] == word for word in words)

    for before, after in zip(free, tokens_of, strict=True):
        assert not any(ends(after, i) for i in range(len(after)))
        first = next((i for i in range(len(before)) if ends(before, i)), len(before))
        assert first < 40
        assert after[:first] == before[:first]


def test_bad_words_as_text_are_banned_with_and_without_a_space(small):
    """The tokens of "th" and " th" differ: a byte-level tokenizer writes the space as a part of the word."""
    (encoded,) = small.prepare("a", SamplingParams(bad_words=["th"])).params.bad_words
    assert encoded == tuple(small.tokenizer.encode("th"))  # " th" ends with it
    tokens = {word: tuple(small.tokenizer.encode(word)) for word in ("en", "me me", "x")}
    request = small.prepare("a", SamplingParams(bad_words=list(tokens)))
    assert request.params.bad_words == tuple(tokens.values())
    likely = SamplingParams(max_tokens=30, logit_bias={tokens["x"][0]: 100}, bad_words="xx", seed=1)
    (output,) = small.generate("a", likely)
    assert "xx" not in output.outputs[0].text
    assert output.outputs[0].text.count("x") == 15


def test_bad_words_without_a_tokenizer_are_token_ids(small, monkeypatch):
    monkeypatch.setattr(small, "tokenizer", None)
    with pytest.raises(ValueError, match="bad_words as text need a tokenizer"):
        small.generate([5], SamplingParams(bad_words=["a"]))
    assert small.prepare([5], SamplingParams(bad_words=[[7, 8]])).params.bad_words == ((7, 8),)


# ---- prompts


def test_long_prompts_can_be_truncated(small):
    (prompt,) = random_prompts([100], seed=6)
    for count, end in ((10, 10), (63, 40), (-1, 40)):
        params = dataclasses.replace(GREEDY, truncate_prompt_tokens=count, max_tokens=24)
        if count == 63:
            with pytest.raises(ValueError, match="63 tokens plus max_tokens 24 exceeds max_len 64"):
                small.generate(prompt, params)
            continue
        (output,) = small.generate(prompt, params)
        assert output.prompt_token_ids == prompt[-end:]
        assert output.outputs[0].token_ids == texts(small, [prompt[-end:]], GREEDY)[0]
    params = dataclasses.replace(GREEDY, truncate_prompt_tokens=-1, max_tokens=None)
    assert len(small.prepare(prompt, params).token_ids) == 63
    assert small.prepare(prompt[:5], params).token_ids == prompt[:5]


# ---- chats


def test_a_chat_with_a_template_of_its_own(small):
    """The model has none. Its options, and a final message that is continued."""
    template = "{{ eos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mark }}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]

    def prompt(**options):
        (output,) = small.chat(messages, GREEDY, chat_template=template, **options)
        text = small.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        assert output.outputs[0].token_ids == texts(small, [output.prompt_token_ids], GREEDY)[0]
        return text

    assert prompt() == "</s>[hi][Well]"
    assert prompt(chat_template_kwargs={"mark": "!"}) == "</s>[hi][Well]!"
    assert prompt(continue_final_message=True) == "</s>[hi][Well"
    assert small.chat_prompt(messages, chat_template=template, mark="?") == small.tokenizer.encode(
        "</s>[hi][Well]?", add_special_tokens=False
    )
    with pytest.raises(ValueError, match="chat_template must be the text of a Jinja template, got 3"):
        small.chat(messages, chat_template=3)
    with pytest.raises(ValueError, match="not valid, line 1"):
        small.chat(messages, chat_template="{% if %}")
    with pytest.raises(ValueError, match="no chat template: give chat_template"):
        small.chat(messages)
