"""`LLM.beam_search` finds what transformers' beam search finds, with its scores."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from inferlib import BeamSearchParams, SamplingParams
from inferlib.llm import LLM
from inferlib.sampling.beam_search import Beam, BeamSearch
from tests.helpers.llms import random_prompts, reference_beams

PROMPTS = random_prompts([9, 3, 14], seed=71)


def results_of(outputs):
    return [[(beam.tokens, pytest.approx(beam.score, abs=1e-4)) for beam in output.sequences] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4])
def test_beams_of_one_length_are_transformers(width, llama, checkpoint):
    params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
    outputs = llama.beam_search(PROMPTS, params)
    assert [reference_beams(checkpoint("llama"), p, params) for p in PROMPTS] == results_of(outputs)
    for output in outputs:
        for beam in output.sequences:
            assert beam.text == llama.tokenizer.decode(beam.tokens)
            assert (beam.finish_reason, beam.stop_reason) == ("length", None)
            assert beam.score == pytest.approx(beam.cum_logprob / 6)
    assert llama.engine.scheduler.idle
    if width == 1:
        greedy = llama.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        assert [o.sequences[0].tokens for o in outputs] == [g.prompt_token_ids + g.outputs[0].token_ids for g in greedy]


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [*(pytest.param(x, marks=pytest.mark.release) for x in (0.0, 1.0)), 2.5, -1.0])
def test_beams_that_end_are_transformers(penalty, llama, checkpoint, monkeypatch):
    """Common tokens end a continuation here, so those of several lengths compete, and searches end early."""
    params = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=penalty)
    free = llama.beam_search(PROMPTS, dataclasses.replace(params, ignore_eos=True))
    tokens = [t for output, p in zip(free, PROMPTS, strict=True) for b in output.sequences for t in b.tokens[len(p) :]]
    ids, counts = np.unique(tokens, return_counts=True)
    eos = tuple(ids[np.argsort(-counts)[:2]].tolist())
    monkeypatch.setattr(LLM, "_eos_ids", lambda self: eos)
    outputs = llama.beam_search(PROMPTS, params)
    assert [reference_beams(checkpoint("llama"), p, params, eos) for p in PROMPTS] == results_of(outputs)
    beams = [beam for output in outputs for beam in output.sequences]
    assert any(beam.stop_reason in eos and beam.finish_reason == "stop" for beam in beams)
    assert all((beam.tokens[-1] in eos) == (beam.finish_reason == "stop") for beam in beams)


def test_a_search_ends_once_nothing_better_can_come():
    """Two beams; token 0 ends. The second step finishes two, and the best that runs cannot reach them."""
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=9), [0])
    search.extend([[(1, -0.1), (0, -0.2), (2, -5.0)]])
    assert search.running == [Beam((1,), -0.1), Beam((2,), -5.0)]
    assert search.finished == [Beam((0,), -0.2)]
    search.extend([[(0, -0.1), (1, -1.0), (2, -9.0)], [(1, -0.1), (0, -0.2), (2, -0.3)]])
    assert search.running == []
    assert search.finished == [Beam((1, 0), -0.2), Beam((0,), -0.2)]


def test_bad_input(llama):
    dispatches = llama.stats.dispatches
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    for options, message in (
        ({"beam_width": 0}, "beam_width must be an integer in [1, 20], got 0"),
        ({"beam_width": 21}, "beam_width must be an integer in [1, 20], got 21"),
        ({"max_tokens": None}, "max_tokens must be"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"length_penalty": float("nan")}, "length_penalty must be"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            dataclasses.replace(params, **options)
    for prompts, wrong, message in (
        (["a", ""], params, "prompt 1: the prompt is empty"),
        ([[5] * 95], params, "prompt 0: a prompt of 95 tokens plus max_tokens 4 exceeds max_len 96"),
        ("a", SamplingParams(), "beam_search takes BeamSearchParams(beam_width=..., max_tokens=...), got"),
        ("a", BeamSearchParams(20, 4), "beam_width must be at most 19 for this model's 1 end-of-sequence tokens"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            llama.beam_search(prompts, wrong)
    assert llama.beam_search([], params) == []
    assert llama.stats.dispatches == dispatches
