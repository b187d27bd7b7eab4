"""Logits processors: functions on the host between the two programs of a step. About 20 s of compilation."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from inferlib import LLM, Buckets, Parallelism, SamplingParams, StructuredOutputs, configs
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.programs.deployment import Deployment
from inferlib.programs.program_set import UnplannedProgramError
from inferlib.sampling.logits_processors import LogitsProcessorError
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, new_engine, random_prompts, reference
from tests.helpers.tokenizer import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
# Greedy; sampled with every filter and penalty, and scored; both without processors; greedy with penalties.
KINDS = [
    dataclasses.replace(GREEDY, max_tokens=40),
    SamplingParams(seed=3, max_tokens=30, top_k=9, min_p=0.01, ignore_eos=True, logprobs=2, **PENALTIES),
    SamplingParams(temperature=0.7, seed=4, max_tokens=17, top_p=0.8, ignore_eos=True),
    GREEDY,
    dataclasses.replace(GREEDY, min_tokens=3, logit_bias={7: 0.5}, **PENALTIES),
]
LENGTHS = [5, 19, 3, 8, 30]
UNPROCESSED = (2, 3)  # the kinds without processors
BUCKETS = Buckets((8,), (2, 4), (64,))
FOUR_ROWS = Buckets((8,), (4,), (64,))


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=1)


@pytest.fixture
def llm(changed) -> LLM:
    return changed


def same(token_ids, logits):
    return logits


def with_processors(*functions, params: SamplingParams = GREEDY) -> SamplingParams:
    return dataclasses.replace(params, logits_processors=functions)


def outputs(llm: LLM, prompts, params):
    return [output.outputs[0] for output in llm.generate(prompts, params)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [None, pytest.param("dp=2,tp=2", marks=pytest.mark.release)])
def test_a_function_that_changes_nothing_changes_no_token(path, llm, parallel):
    """Prompts of several steps, more than there are rows, beside requests without; also where pages run out. On a mesh
    a function runs in `test_structured.py` too."""
    it = llm if parallel is None else build_llm(path, FOUR_ROWS, parallel=parallel)
    expected = outputs(it, random_prompts(LENGTHS), KINDS)
    with new_engine(it):
        _assert_nothing_changes(it, expected, preempts=False)
    if parallel is None:
        with new_engine(it, pages=5):
            _assert_nothing_changes(it, expected, preempts=True)


def _assert_nothing_changes(it: LLM, expected: list, *, preempts: bool) -> None:
    prompts, calls = random_prompts(LENGTHS), []

    def recorded(prompt, token_ids, logits):
        calls.append((prompt, token_ids))
        assert (logits.shape, logits.dtype) == ((VOCAB,), np.float32)
        return logits.copy()

    changed = [p if i in UNPROCESSED else with_processors(same, recorded, params=p) for i, p in enumerate(KINDS)]
    got = outputs(it, prompts, changed)
    assert [x.token_ids for x in got] == [x.token_ids for x in expected]
    for mine, theirs in zip(got[1].logprobs, expected[1].logprobs, strict=True):
        assert mine.keys() == theirs.keys()
        assert [x.logprob for x in mine.values()] == pytest.approx([x.logprob for x in theirs.values()], rel=1e-5)
    for i, x in enumerate(expected):
        seen = [token_ids for prompt, token_ids in calls if prompt == prompts[i]]
        assert seen == ([] if i in UNPROCESSED else [x.token_ids[:n] for n in range(len(x.token_ids))])
    assert_accounted(it.engine)
    assert bool(it.engine.scheduler.preemptions) == preempts


@pytest.mark.slow
def test_tokens_follow_the_changed_logits_and_so_do_log_probabilities(llm, path):
    """What is banned in place, and added by a second function, against one pass of the reference."""
    (prompt,) = random_prompts([7], seed=2)
    bias = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)

    def ban(token_ids, logits):
        logits[np.arange(VOCAB) % 3 == len(token_ids) % 3] = -np.inf
        return logits

    params = with_processors(ban, lambda token_ids, logits: logits + bias.astype(np.float64))
    params = dataclasses.replace(params, logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params)
    tokens, scores = output.outputs[0].token_ids, output.outputs[0].logprobs
    logits = reference(path, [*prompt, *tokens[:-1]])
    for i, (token, row) in enumerate(zip(tokens, logits[len(prompt) - 1 :] + bias, strict=True)):
        row[np.arange(VOCAB) % 3 == i % 3] = -np.inf
        assert row[token] > row.max() - 1e-3
        assert scores[i][token].logprob == pytest.approx(row[token] - np.log(np.exp(row).sum()), abs=1e-3)
    model_logprobs = jax.nn.log_softmax(logits, axis=-1)
    told = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    assert told == pytest.approx([float(model_logprobs[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-3)


def broken(what):
    def function(token_ids, logits):
        if len(token_ids) < 2:
            return logits
        return what(logits)

    return function


def raises(logits):
    raise KeyError("no such word")


def of_one(value):
    def changed(logits):
        logits[:] = value
        return logits

    return changed


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (raises, "raised KeyError: 'no such word'"),
        (lambda logits: None, "returned None: it must return the logits"),
        (lambda logits: logits[:-1], rf"returned the shape \({VOCAB - 1},\): logits have the shape \({VOCAB},\)"),
        (lambda logits: logits.astype(int), "returned numbers of type int64: logits are float32"),
        (lambda logits: [[1.0], []], "returned what is no array"),
        (of_one(np.nan), "returned NaN"),
        (of_one(-np.inf), "bans every token: all logits are -inf"),
        (of_one(np.inf), "returned infinity: to choose a token for certain"),
    ],
)
def test_an_error_ends_its_request_and_no_other(llm, what, message):
    prompts, params = random_prompts([5, 9]), with_processors(broken(what))
    (expected,) = outputs(llm, prompts[:1], GREEDY)
    stream = llm.stream(prompts[0], GREEDY)
    pieces = iter(stream)
    next(pieces)
    message = f"logits processor function, called for generated token 2, {message}"
    with pytest.raises(LogitsProcessorError, match=message):
        llm.generate(prompts[1:], params)
    assert "".join(pieces) is not None
    assert stream.output.outputs[0].token_ids == expected.token_ids
    assert not llm.engine.busy
    assert_accounted(llm.engine)


def test_a_function_cannot_wait_for_its_own_engine(llm):
    def asks(token_ids, logits):
        return llm.generate([[5]], GREEDY)

    with pytest.raises(LogitsProcessorError, match="a logits processor, which runs inside the engine, must not call"):
        llm.generate([[5, 6]], with_processors(asks))
    assert outputs(llm, [[5, 6]], GREEDY)


def test_several_processes_refuse_them(llm, monkeypatch):
    monkeypatch.setattr(llm, "_channel", object())
    with pytest.raises(ValueError, match="logits_processors run in one process, and several processes share this"):
        llm.prepare([5], with_processors(same))


@pytest.mark.slow
def test_their_programs_are_compiled_at_first_use_or_when_asked_for(path):
    """Those of grammars are the same."""
    llm = build_llm(path, FOUR_ROWS, decode_steps=1)
    llm.warmup(["greedy"])
    grammar = dataclasses.replace(GREEDY, structured_outputs=StructuredOutputs(choice=["Rome", "Lima"]))
    message = r"'processed' was not compiled.*warmup\(modes=...\); artifacts never"
    for params in (with_processors(same), grammar):
        with pytest.raises(UnplannedProgramError, match=message):
            llm.generate([[5]], params)
    llm.warmup(["greedy", "processed"])
    before = compilations()
    params = [with_processors(same), dataclasses.replace(with_processors(same), prompt_logprobs=1), GREEDY]
    llm.generate(random_prompts([5, 20, 9, 7]), [*params, grammar])
    assert compilations() == before
    assert llm.stats.program_misses == 0


def test_nothing_is_compiled_for_artifacts():
    modes = ("greedy", "processed")
    with pytest.raises(ConfigurationError, match="'processed' are not compiled ahead of time: leave it out"):
        Deployment(configs.load("llama3-8b"), "v5e-4", "bfloat16", BUCKETS, Parallelism.parse("tp=4"), modes)
