"""`LLM` as users call it, on a tiny model: texts, stops, log-probabilities, streams, bad input.

References are full passes of transformers. Half a minute, most of it compilation.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import get_type_hints

import numpy as np
import pytest

from inferlib import LLM, Buckets, EngineOptions, Parallelism, SamplingParams
from inferlib.buckets import pick, rounded_up
from inferlib.checkpoint.source import CheckpointError
from inferlib.config import EngineConfig, EngineSettings
from inferlib.models.config import ConfigError
from inferlib.option_checks import ConfigurationError
from inferlib.sharding.shards import make_shards
from tests.helpers.llms import assert_greedy, random_prompts, reference
from tests.helpers.tokenizer import VOCAB

EOS = 2
TOLERANCE = 1e-4  # on log-probabilities, float32
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(seed=11, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def completion(llm: LLM, prompt, params):
    return llm.generate(prompt, params)[0].outputs[0]


# ---- results


def test_results_come_in_order_with_texts_and_ids(small, path):
    texts = ["The first text", "b", "Some others, longer"]
    outputs = small.generate(texts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    for text, output in zip(texts, outputs, strict=True):
        assert output.finished
        assert output.prompt_token_ids == small.tokenizer.encode(text)
        (result,) = output.outputs
        assert result.text == small.tokenizer.decode(result.token_ids)
        assert (result.index, result.finish_reason, result.stop_reason) == (0, "length", None)
        assert result.logprobs is result.cumulative_logprob is output.prompt_logprobs is None
        assert_greedy(path, output.prompt_token_ids, result.token_ids)


def test_forms_of_prompts(small):
    """One text, one list of ids, an array and lists of them all mean what they look like."""
    ids = small.tokenizer.encode("hello")
    expected = completion(small, "hello", GREEDY).token_ids
    for prompt in (ids, tuple(ids), np.array(ids), ["hello"], [ids], [np.array(ids, np.uint16)]):
        (output,) = small.generate(prompt, GREEDY)
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == ids
    assert small.generate([], GREEDY) == []


def test_max_tokens_none_fills_the_context(small):
    (prompt,) = random_prompts([10])
    result = completion(small, prompt, dataclasses.replace(GREEDY, max_tokens=None))
    assert len(result.token_ids) == 64 - 10
    assert result.finish_reason == "length"


def test_n_outputs_differ_and_the_first_is_that_of_n_1(small):
    (prompt,) = random_prompts([9])
    outputs = small.generate(prompt, dataclasses.replace(SAMPLED, n=4))[0].outputs
    assert [o.index for o in outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in outputs}) == 4
    assert completion(small, prompt, SAMPLED).token_ids == outputs[0].token_ids
    again = small.generate(prompt, dataclasses.replace(SAMPLED, n=4))[0].outputs
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]


def test_requests_without_a_seed_differ(small):
    (prompt,) = random_prompts([9])
    outputs = small.generate([prompt] * 4, dataclasses.replace(SAMPLED, seed=None))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_metrics(small):
    outputs = small.generate(random_prompts([9, 3, 5]), dataclasses.replace(SAMPLED, n=2))
    for output in outputs:
        metrics = output.metrics
        assert metrics.generated == sum(len(o.token_ids) for o in output.outputs) == 24
        assert metrics.arrival_time < metrics.first_token_time < metrics.finished_time
        assert metrics.ttft == metrics.first_token_time - metrics.arrival_time
        # Each output took at most the whole time for its eleven later tokens.
        assert 0 < metrics.itl <= (metrics.finished_time - metrics.first_token_time) / 11 * (1 + 1e-6)
        assert metrics.tokens_per_second == pytest.approx(24 / (metrics.finished_time - metrics.arrival_time))


def test_one_token_has_no_itl(small):
    (output,) = small.generate("a", dataclasses.replace(SAMPLED, max_tokens=1))
    assert output.metrics.itl is None
    assert output.metrics.ttft > 0


# ---- stopping


@pytest.fixture(scope="module")
def free(small):
    """What the model says to a prompt if nothing stops it; its tokens are one or two characters each."""
    (prompt,) = random_prompts([6], seed=4)
    result = completion(small, prompt, dataclasses.replace(SAMPLED, max_tokens=40))
    pieces = [small.tokenizer.decode([token]) for token in result.token_ids]
    assert "".join(pieces) == result.text
    return prompt, result, pieces


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("start", [0, 7, 20])
def test_stop_strings_across_tokens(start, keep, small, free):
    """A stop string of four characters spans tokens and dispatches; tokens after it are dropped."""
    prompt, result, pieces = free
    stop = result.text[start : start + 4]
    params = dataclasses.replace(SAMPLED, max_tokens=40, stop=["never said", stop], include_stop_str_in_output=keep)
    stopped = completion(small, prompt, params)
    at = result.text.index(stop)
    assert stopped.text == result.text[: at + 4 if keep else at]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    needed = next(i for i in range(len(pieces)) if len("".join(pieces[: i + 1])) >= at + 4)
    assert stopped.token_ids == result.token_ids[: needed + 1]

    stream = small.stream(prompt, params)
    deltas = list(stream)
    assert "".join(deltas) == stopped.text
    assert stream.output.outputs[0].token_ids == stopped.token_ids


def test_a_stop_string_cut_off_by_the_length_is_no_stop(small, free):
    prompt, _, pieces = free
    text = "".join(pieces[:10])
    params = dataclasses.replace(SAMPLED, max_tokens=10, stop=text[-2:] + "~~")
    for stopped in (completion(small, prompt, params), last_output(small.stream(prompt, params))):
        assert (stopped.text, stopped.finish_reason) == (text, "length")


def last_output(stream):
    assert "".join(stream) == stream.output.outputs[0].text
    return stream.output.outputs[0]


@pytest.mark.parametrize("keep", [False, True])
def test_stop_token_ids(keep, small, free):
    prompt, result, pieces = free
    position = next(i for i in range(5, 40) if result.token_ids[i] not in result.token_ids[:i])
    token = result.token_ids[position]
    params = dataclasses.replace(SAMPLED, max_tokens=40, stop_token_ids=[token], include_stop_str_in_output=keep)
    stopped = completion(small, prompt, params)
    assert stopped.token_ids == result.token_ids[: position + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    assert stopped.text == "".join(pieces[: position + keep])


def test_end_of_sequence(small):
    """A bias makes it certain: the first token ends, min_tokens delays it, ignore_eos goes past it."""
    always = SamplingParams(max_tokens=9, logit_bias={EOS: 100}, seed=1)
    ended = completion(small, "a", always)
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([EOS], "", "stop", None)
    later = completion(small, "a", dataclasses.replace(always, min_tokens=5))
    assert len(later.token_ids) == 6
    assert later.token_ids.index(EOS) == 5
    assert later.finish_reason == "stop"
    past = completion(small, "a", dataclasses.replace(always, ignore_eos=True))
    assert (past.token_ids, past.finish_reason) == ([EOS] * 9, "length")


def test_min_tokens_holds_back_stop_tokens(small, free):
    prompt, result, _ = free
    params = dataclasses.replace(SAMPLED, max_tokens=40, min_tokens=30, stop_token_ids=result.token_ids[:3])
    stopped = completion(small, prompt, params)
    assert not set(stopped.token_ids[:30]) & set(result.token_ids[:3])


def test_penalties_know_the_whole_prompt_and_only_this_one(small, path):
    """Prompts of several chunks, more of them than rows: greedy tokens equal those of penalised logits."""
    prompts = random_prompts([20, 31, 9, 24], seed=13)
    params = SamplingParams(
        temperature=0.0, max_tokens=10, repetition_penalty=3.0, presence_penalty=1.0, frequency_penalty=0.5
    )
    for prompt, output in zip(prompts, small.generate(prompts, params), strict=True):
        said = output.outputs[0].token_ids
        logits = reference(path, [*prompt, *said[:-1]])[len(prompt) - 1 :]
        for i, (row, token) in enumerate(zip(logits, said, strict=True)):
            counts = np.bincount(said[:i], minlength=VOCAB)
            seen = (counts > 0) | np.isin(np.arange(VOCAB), prompt)
            row = np.where(seen, np.where(row > 0, row / 3.0, row * 3.0), row) - 0.5 * counts - 1.0 * (counts > 0)
            assert row[token] > row.max() - 1e-3


# ---- probabilities


def check_entries(entries, tokens, expected, count, tokenizer):
    """Each entry holds the token and the `count` most likely ones with their log-probabilities and ranks."""
    assert len(entries) == len(tokens)
    for entry, token, row in zip(entries, tokens, expected, strict=True):
        best = np.argsort(-row)[:count].tolist()
        assert set(entry) == {token, *best}
        assert next(iter(entry)) == token
        for id_, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[id_], abs=TOLERANCE)
            assert logprob.rank == 1 + (row > row[id_]).sum()
            assert logprob.decoded_token == tokenizer.decode([id_], skip_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_a_full_pass(params, small, path):
    """Of the model's own distribution, before temperature and penalties."""
    prompts = random_prompts([13, 1, 8], seed=5)
    params = dataclasses.replace(params, logprobs=3, frequency_penalty=0.5)
    for prompt, output in zip(prompts, small.generate(prompts, params), strict=True):
        (result,) = output.outputs
        expected = log_softmax(reference(path, [*prompt, *result.token_ids]))[len(prompt) - 1 : -1]
        check_entries(result.logprobs, result.token_ids, expected, 3, small.tokenizer)
        total = expected[np.arange(len(expected)), result.token_ids].sum()
        assert result.cumulative_logprob == pytest.approx(total, abs=TOLERANCE * len(expected))


def test_asking_for_logprobs_changes_no_token(small):
    prompts = random_prompts([13, 1, 8], seed=5)
    without = [o.outputs[0].token_ids for o in small.generate(prompts, SAMPLED)]
    params = dataclasses.replace(SAMPLED, logprobs=0, prompt_logprobs=0)
    outputs = small.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == without
    assert all(len(entry) == 1 for o in outputs for entry in o.outputs[0].logprobs)


def test_prompt_logprobs_are_those_of_a_full_pass(small, path):
    """Also where the prompt takes several chunks; the first token has none. Two of n outputs share them."""
    prompts = random_prompts([1, 7, 8, 9, 30], seed=6)
    params = dataclasses.replace(SAMPLED, max_tokens=3, prompt_logprobs=2, n=2)
    for prompt, output in zip(prompts, small.generate(prompts, params), strict=True):
        assert output.prompt_logprobs[0] is None
        expected = log_softmax(reference(path, prompt))[:-1]
        check_entries(output.prompt_logprobs[1:], prompt[1:], expected, 2, small.tokenizer)
        assert [len(o.token_ids) for o in output.outputs] == [3, 3]


def test_prompts_may_be_mappings(small):
    params = SamplingParams(temperature=0.0, max_tokens=3)
    (expected,) = small.generate([5, 6, 7], params)
    for prompt in ({"prompt_token_ids": [5, 6, 7]}, [{"prompt_token_ids": [5, 6, 7]}]):
        (output,) = small.generate(prompt, params)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    text, mapping = small.generate(["ab", {"prompt": "ab"}], params)
    assert text.prompt_token_ids == mapping.prompt_token_ids
    for wrong in ({}, {"text": "a"}, {"prompt": "a", "prompt_token_ids": [1]}):
        with pytest.raises(ValueError, match="has either 'prompt' or 'prompt_token_ids', and perhaps"):
            small.generate(wrong)
    for wrong in ({"prompt": [1]}, {"prompt_token_ids": "a"}):
        with pytest.raises(ValueError, match="'prompt' is text and 'prompt_token_ids' are token ids"):
            small.generate(wrong)


def test_arguments_of_vllm_are_answered_by_ours(path):
    for name, hint in (("tensor_parallel_size", "parallel='tp=N'"), ("max_model_len", "max_len")):
        with pytest.raises(TypeError, match=f"'{name}'; here it is {hint}"):
            LLM(path, **{name: 2})


def test_scores_and_logits_are_those_of_a_full_pass(small, path):
    prompts = random_prompts([1, 2, 8, 9, 40, 64], seed=7)
    for prompt, scores in zip(prompts, small.logprobs(prompts), strict=True):
        expected = reference(path, prompt)
        assert scores.dtype == np.float32
        chosen = log_softmax(expected)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores, chosen, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(small.logits(prompt), expected, rtol=0, atol=TOLERANCE)
    assert small.logprobs([]) == small.score([]) == []


# ---- streams


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stream_gives_what_generate_gives(params, small):
    prompts = random_prompts([12], seed=8)
    expected = completion(small, prompts, params)
    stream = small.stream(prompts[0], params)
    deltas = list(stream)
    assert len(deltas) > len(expected.token_ids) / 2
    assert "".join(deltas) == expected.text
    assert stream.output.outputs[0].token_ids == expected.token_ids
    assert stream.output.metrics.generated == len(expected.token_ids)


def test_an_abandoned_stream_frees_its_row(small):
    """Left after two pieces of text, or never begun: the rows are free, and later results are right."""
    prompts = random_prompts([12, 5, 30], seed=9)
    expected = [completion(small, prompt, GREEDY).token_ids for prompt in prompts]
    small.stream(prompts[0], GREEDY)
    for i, _ in enumerate(small.stream(prompts[0], GREEDY)):
        if i == 1:
            break
    assert small._runner.thread.run(lambda: small.engine.scheduler.idle)
    assert [o.outputs[0].token_ids for o in small.generate(prompts, GREEDY)] == expected
    assert small.engine.scheduler.idle


def test_streams_and_generate_share_the_engine(small):
    """Two streams take both rows, a third waits; generate runs to its end between their pieces."""
    prompts = random_prompts([12, 5, 30, 2], seed=9)
    expected = [completion(small, prompt, GREEDY) for prompt in prompts]
    streams = [small.stream(prompt, GREEDY) for prompt in prompts[:3]]
    iterators = [iter(stream) for stream in streams]
    texts = [next(iterator) for iterator in iterators]
    assert completion(small, prompts[3], GREEDY) == expected[3]
    for i in (2, 0, 1):
        texts[i] += "".join(iterators[i])
        assert texts[i] == expected[i].text
        assert streams[i].output.outputs[0].token_ids == expected[i].token_ids
    assert small.engine.scheduler.idle


def test_a_stream_is_read_once(small):
    stream = small.stream("ab", GREEDY)
    assert "".join(stream) == stream.output.outputs[0].text
    with pytest.raises(RuntimeError, match="read once"):
        list(stream)
    assert small.engine.scheduler.idle


# ---- without a tokenizer


def test_a_model_without_a_tokenizer_takes_token_ids(small, monkeypatch):
    (prompt,) = random_prompts([5], seed=3)
    expected = completion(small, prompt, GREEDY)
    always = SamplingParams(max_tokens=9, logit_bias={EOS: 100}, seed=1)
    monkeypatch.setattr(small, "tokenizer", None)
    result = completion(small, prompt, dataclasses.replace(GREEDY, logprobs=1))
    assert (result.token_ids, result.text) == (expected.token_ids, "")
    assert result.logprobs[0][result.token_ids[0]].decoded_token is None
    assert completion(small, prompt, always).token_ids == [EOS]
    dispatches = small.stats.dispatches
    for call in (
        lambda: small.generate("text"),
        lambda: small.generate(prompt, dataclasses.replace(GREEDY, stop="a")),
        lambda: small.stream(prompt),
        lambda: small.chat([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            call()
    assert small.stats.dispatches == dispatches


# ---- bad input

BAD_PROMPTS = {
    "empty text": ("", GREEDY, "prompt 0: the prompt is empty"),
    "empty ids": ([[5], []], GREEDY, "prompt 1: the prompt is empty"),
    "id beyond the vocabulary": ([[5, VOCAB]], GREEDY, f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
    "negative id": ([[-1]], GREEDY, "token id -1 is outside"),
    "fraction": ([[1.5, 2]], GREEDY, "a sequence of integer token ids"),
    "nothing": ([None], GREEDY, "prompt 0: a prompt is text or"),
    "text among ids": ([5, "a"], GREEDY, "integer token ids"),
    "a number": (5, GREEDY, "prompts must be text, token ids or a list of these, got 5"),
    "another object": ({"text": "a"}, GREEDY, "prompt 0: .*either .prompt. or .prompt_token_ids., and"),
    "bytes": (b"ab", GREEDY, "prompts must be text, token ids or a list of these, got b'ab'"),
    "bytes among prompts": ([b"abc"], GREEDY, "prompt 0: .*got b'abc': decode bytes to text"),
    "an array of no dimension": (np.array(5), GREEDY, "prompts must be text"),
    "params as an object": ("a", {"temperature": 0.0}, r"sampling_params must be SamplingParams or .*, got {'temp"),
    "params as objects": (["a", "b"], [GREEDY, {}], r"prompt 1: sampling_params must be SamplingParams or .*, got {}"),
    "lone surrogate": ("\ud800", GREEDY, "lone surrogate"),
    "too long": ([[5]], dataclasses.replace(GREEDY, max_tokens=64), "1 tokens plus max_tokens 64 exceeds max_len 64"),
    "too long for one": ([[5] * 64], dataclasses.replace(GREEDY, max_tokens=None), "exceeds max_len 64"),
    "fewer params": ([[5], [6]], [GREEDY], "2 prompts but 1 sampling_params"),
    "more params": ("a", [GREEDY, GREEDY], "1 prompts but 2 sampling_params"),
    "bias beyond the vocabulary": ("a", SamplingParams(logit_bias={VOCAB: 1.0}), f"token {VOCAB} is not in the model"),
    "stop beyond the vocabulary": ("a", SamplingParams(stop_token_ids=[VOCAB]), f"token {VOCAB} is not in the model"),
    "too many stops": ("a", SamplingParams(stop_token_ids=list(range(3, 20))), "at most 16"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_refused_before_device_work(name, small):
    """A good prompt before the bad one does not run either."""
    prompts, params, message = BAD_PROMPTS[name]
    dispatches = small.stats.dispatches
    with pytest.raises(ValueError, match=message):
        small.generate(prompts, params)
    assert small.stats.dispatches == dispatches
    assert small.engine.scheduler.idle


def test_bad_evaluations_are_refused_before_device_work(small):
    dispatches = small.stats.dispatches
    with pytest.raises(ValueError, match="empty"):
        small.logprobs([[5, 6], []])
    with pytest.raises(ValueError, match="exceeds max_len 64"):
        small.logprobs([[5] * 65])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        small.logits([VOCAB])
    with pytest.raises(ValueError, match="integer token ids"):
        small.logits([0.5])
    with pytest.raises(ValueError, match="n=1"):
        small.stream("a", dataclasses.replace(SAMPLED, n=2))
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        small.stream("a", {})
    with pytest.raises(ValueError, match="no chat template"):
        small.chat([{"role": "user", "content": "a"}])
    assert small.stats.dispatches == dispatches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 257}, "max_len 257 exceeds the model's context of 256"),
        ({"max_len": 0}, "max_len at least 2, got 2, 0"),
        ({"max_len": 1, "buckets": Buckets((1,), (2,), (1,))}, "max_len must hold a prompt token and a new one, got 1"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; choose one of float32, bfloat16, float16"),
        ({"buckets": Buckets((8,), (1,), (64,))}, r"largest batch bucket \(1\) must equal max_batch \(2\)"),
        ({"buckets": Buckets((8,), (2,), (32,))}, r"largest cache bucket \(32\) must equal max_len \(64\)"),
        ({"buckets": (8, 64)}, r"buckets must be Buckets\(prefill=.*, got \(8, 64\)"),
        ({"max_len": "64"}, "max_len must be a whole number, got '64'"),
        ({"max_batch": 2.0}, "max_batch must be a whole number, got 2.0"),
        ({"buckets": Buckets((128,), (2,), (64,))}, r"largest prefill bucket \(128\) exceeds max_len \(64\)"),
    ],
)
def test_bad_settings_are_refused(options, message, path):
    with pytest.raises(ValueError, match=message):
        LLM(path, **{"max_batch": 2, "max_len": 64, "progress": False, **options})


def test_options_of_a_config_and_keywords_are_the_same(path):
    """A keyword replaces the config's value; what is not given has the platform's default."""
    options = EngineOptions(max_batch=2, max_len=64, buckets=Buckets((8,), (2,), (64,)), decode_steps=3, in_flight=4)
    config = LLM(path, options, scan=True, in_flight=1, progress=False).config
    assert (config.max_batch, config.buckets, config.decode_steps) == (2, options.buckets, 3)
    assert (config.scan, config.in_flight, config.free_layouts) == (True, 1, False)


def test_a_complete_config_is_taken_as_it_is(path):
    config = dataclasses.replace(EngineConfig.make("cpu", 2, 64, Buckets((8,), (2,), (64,))), decode_steps=3, scan=True)
    assert LLM(path, config, progress=False).config == config
    split = dataclasses.replace(config, shards=make_shards(Parallelism.parse("tp=2")))
    with pytest.raises(ConfigurationError, match=r"LLM makes the mesh.* parallel='tp=...'"):
        LLM(path, split)


def test_unknown_options_are_refused(path):
    with pytest.raises(TypeError, match=r"argument 'max_btach'; known: dtype, .*, max_batch, max_len, .*, platform"):
        LLM(path, max_btach=2)
    with pytest.raises(
        TypeError, match=r"config must be EngineOptions\(...\) or an EngineConfig, got {'max_batch': 2}"
    ):
        LLM(path, {"max_batch": 2})
    assert get_type_hints(EngineSettings) == get_type_hints(EngineOptions)


def test_sizes_may_be_numpys():
    made = EngineConfig.make("cpu", np.int64(2), np.uint8(64))
    assert (made.max_batch, type(made.max_batch), type(made.max_len)) == (2, int, int)


@pytest.mark.parametrize("sizes", [(), (0, 8), (8, 4), (4, 4), (8.0,), ("8",), 8, None])
@pytest.mark.parametrize("name", ["prefill", "batch", "cache"])
def test_bad_buckets_are_refused(name, sizes):
    with pytest.raises(ConfigurationError, match=f"{name} buckets must be ascending positive sizes"):
        Buckets(**{"prefill": (8,), "batch": (2,), "cache": (64,), name: sizes})


def test_bad_tiles_are_refused():
    for tile in (0, -8, 8.0, "8"):
        with pytest.raises(ConfigurationError, match="a tile has a positive number of tokens, got"):
            Buckets((8,), (2,), (64,), tile=tile)
    with pytest.raises(
        ConfigurationError, match=r"beyond a tile of 8 tokens are multiples of it, not \[12\]: take \[16\]"
    ):
        Buckets((4, 8, 12), (2,), (64,), tile=8)
    with pytest.raises(ConfigurationError, match="row_limit must be a multiple of the tile, 8, got 12"):
        EngineConfig(2, 64, Buckets((8, 16), (2,), (64,), tile=8), row_limit=12)


def test_default_buckets_cover_the_limits():
    for max_batch, max_len in [(1, 2), (1, 33), (8, 2048), (64, 300), (5, 100_000)]:
        config = EngineConfig.make("cpu", max_batch, max_len)
        buckets = config.buckets
        assert (buckets.batch[-1], buckets.cache[-1]) == (max_batch, max_len)
        assert buckets.prefill[-1] == rounded_up(min(512, max_len), buckets.tile)
        assert all(p * c <= buckets.prefill[-1] for p, c in config.prefill_shapes())
        assert all(pick(buckets.cache, need) >= need for need in (1, max_len // 2 + 1, max_len))


def test_bad_folders_are_refused(path, tmp_path):
    """Each error names the file or what is known instead."""
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        LLM(tmp_path)
    folder = shutil.copytree(path, tmp_path / "model")
    hf = json.loads((folder / "config.json").read_text())
    for text, error, message in (
        ("{", CheckpointError, r"config\.json is not valid JSON"),
        ("[]", CheckpointError, r"config\.json must hold a JSON object"),
        (
            json.dumps({**hf, "architectures": ["T5Model"]}),
            ConfigError,
            "T5Model.*not supported; known: .*LlamaFor",
        ),
        (json.dumps({**hf, "architectures": None}), ConfigError, "missing.*not supported"),
        (json.dumps({**hf, "hidden_size": 100}), CheckpointError, "wrong shape: .* instead of"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(error, match=message):
            LLM(folder, progress=False)
