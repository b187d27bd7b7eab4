"""A target of the time between tokens: what it allows, and timing steps on a tiny model. About 10 s."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.config import EngineConfig, EngineOptions
from inferlib.engine.itl import ItlBound
from inferlib.engine.step_times import StepTimes, full_chunks
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.programs.program_set import planned_keys
from tests.helpers.llms import build_llm, new_engine, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TILES = Buckets((8, 16, 32), (2, 4), (64,), tile=8)
FEWER = Buckets((8, 32), (4,), (64,), tile=8)


def config(**options) -> EngineConfig:
    return EngineConfig(4, 64, TILES, page_size=16, **options)


@pytest.mark.parametrize("itl", [0, -0.1, math.nan, math.inf, True, "0.05", [0.05]])
def test_a_target_is_seconds(itl, tmp_path):
    with pytest.raises(ConfigurationError, match=r"itl must be seconds above 0, such as 0\.05, got"):
        EngineOptions(itl=itl)
    with pytest.raises(ConfigurationError, match="itl must be seconds above 0"):
        LLM(tmp_path, itl=itl)


def test_shapes_are_those_that_take_less(caplog):
    shapes = config().prefill_shapes()
    assert shapes == ((1, 8), (2, 8), (4, 8))
    assert ItlBound(config()).within(shapes, "greedy") == shapes
    bound = ItlBound(config(itl=0.05))
    assert bound.within(shapes, "greedy") == shapes[:1]  # nothing is known
    bound.learn("greedy", StepTimes(0.01, dict(zip(shapes, (0.02, 0.04, 0.06), strict=True))))
    assert bound.within(shapes, "greedy") == bound.within(shapes, "logprobs") == shapes[:2]
    bound.learn("sample", StepTimes(0.02, dict.fromkeys(shapes, 0.05)))
    assert bound.within(shapes, "greedy") == shapes[:2]
    assert bound.within(shapes, "processed") == shapes
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "inferlib.engine.itl"):
        bound.learn("greedy", StepTimes(0.05, dict.fromkeys(shapes, 0.0625)))
    assert "less than the shortest prefill beside 4 rows in mode 'greedy' takes, 0.0628" in caplog.text
    assert bound.within(shapes, "greedy") == shapes[:1]
    message = r"less than a decode step of 4 rows in mode 'greedy' takes: give at least 0.0603 \(0.0703 with the"
    with pytest.raises(ConfigurationError, match=message):
        bound.learn("greedy", StepTimes(0.06, dict.fromkeys(shapes, 0.07)))


def test_a_smaller_shape_than_a_step_can_end_at_is_never_the_only_one():
    """Steps within a prompt end at multiples of 16 tokens."""
    it = EngineConfig(2, 64, Buckets((8, 32), (2,), (64,)), page_size=16, itl=1e-9)
    assert it.prefill_unit == 16
    assert ItlBound(it).within(it.prefill_shapes(), "greedy") == ((1, 8), (2, 8))
    assert ItlBound(it).within(it.detail_shapes(), "greedy") == ((1, 8), (1, 32))


def test_rehearsed_prompts_stay_within_the_cache():
    it = config()
    for shape in it.prefill_shapes():
        chunks = full_chunks(it, shape, length=21)
        assert len({(row, start) for row, start, _ in chunks}) == shape[0]
        assert all(row < 4 and start + tokens <= 24 for row, start, tokens in chunks)


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=1)


@pytest.mark.slow
def test_timing_changes_nothing(path):
    """The same tokens, of prompts that come while others decode, in smaller steps; nothing compiles after warm-up."""
    prompts, llm = random_prompts([5, 40, 30, 9, 44, 3]), build_llm(path, FEWER, itl=100.0, decode_steps=1)
    assert llm.warmup(["greedy"]) == len(planned_keys(llm.config, ["greedy"]))
    with new_engine(llm, itl=None):
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    assert llm.engine.scheduler.itl._most == {"greedy": 32}
    shapes = llm.config.prefill_shapes()
    llm.engine.scheduler.itl.learn("greedy", StepTimes(1.0, {s: 1.0 if s == shapes[0] else 200.0 for s in shapes}))
    before = compilations()
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)] == expected
    llm.engine.time_steps()  # writes to all pages, also those of prompts that may come again
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)] == expected
    assert compilations() == before
    assert not np.asarray(llm.engine.state.active).any()


def test_a_target_that_cannot_be_met_is_an_error_at_the_start(path):
    with pytest.raises(ConfigurationError, match="itl 1e-09 is less than a decode step of 2 rows in mode 'greedy'"):
        build_llm(path, Buckets((8,), (2,), (64,)), itl=1e-9)


def test_steps_are_timed_while_nothing_runs(small, monkeypatch):
    monkeypatch.setattr(small.engine, "config", dataclasses.replace(small.engine.config, itl=1.0))
    stream = iter(small.stream(random_prompts([5])[0], GREEDY))
    next(stream)
    with pytest.raises(RuntimeError, match="steps are timed for itl while nothing runs"):
        small.engine.time_steps()
    stream.close()
