"""The engine: scheduling against a scripted device, continuous batching, neighbours, compilations.

Most of the time is compilation: about a minute.
"""

from __future__ import annotations

import dataclasses
import math
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib import LLM
from inferlib.buckets import Buckets
from inferlib.config import EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.scheduler import Scheduler
from inferlib.engine.sequence import Sequence, Status
from inferlib.engine.step_times import StepTimes
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet, UnplannedProgramError, planned_keys
from inferlib.sampling.params import SamplingParams
from tests.helpers.engines import assert_accounted, smallest_model
from tests.helpers.llms import MAX_LEN, assert_greedy, new_engine, random_prompts
from tests.helpers.scripted_device import (
    EOS,
    Row,
    Script,
    ScriptedDevice,
    assert_served,
    choose_by_length,
    go_on,
    scripted_engine,
    sequence,
    sequences_of,
    serve,
    traffic,
)

# ---- the engine over a scripted device


@settings(max_examples=60)
@given(traffic())
@pytest.mark.slow
def test_any_traffic_is_served_completely_and_in_order(case):
    config, jobs, _ = case
    engine = scripted_engine(config, [script for script, _, _ in jobs])
    choose_by_length(engine)
    sequences = sequences_of(case)
    serve(engine, sequences, case, assert_accounted)
    assert_served(sequences, case)


@pytest.mark.slow
@settings(max_examples=50)
@given(traffic(), st.integers(0, 20))
def test_prompts_beside_rows_are_bounded_by_a_target_and_go_on(case, fit):
    """Steps of more than `fit` prompt tokens are too long for the target."""
    config, jobs, _ = case
    config = dataclasses.replace(config, itl=1.0)
    engine = scripted_engine(config, [script for script, _, _ in jobs])
    times = {shape: 1.0 if math.prod(shape) <= fit else 1.1 for shape in config.prefill_shapes()}
    engine.scheduler.itl.learn("greedy", StepTimes(1.0, times))
    steps, run = [], ScriptedDevice.run
    engine.programs.run = lambda key, *inputs: steps.append(key) or run(engine.programs, key, *inputs)
    sequences = sequences_of(case)
    serve(engine, sequences, case, lambda engine: None)
    sizes = [math.prod(shape) for shape in config.prefill_shapes()]
    most = max(fit, min(size for size in sizes if size >= config.prefill_unit))
    assert all(key.chunks * key.chunk <= most for key in steps if key.rows and key.chunks)
    assert_served(sequences, case)


@pytest.mark.slow
@settings(max_examples=40)
@given(traffic())
def test_a_repeated_dispatch_is_what_would_be_planned_anew(case):
    config, jobs, _ = case
    config = dataclasses.replace(config, speculation=None)  # which chooses by time

    class Anew(Scheduler):
        def plan(self, max_steps):
            self._repeats = 0
            return super().plan(max_steps)

    def dispatches(kind) -> list:
        engine = scripted_engine(config, [script for script, _, _ in jobs])
        engine.scheduler = engine.programs.scheduler = kind(config, engine.plan)
        sequences, sent, send = [sequence(script) for script, _, _ in jobs], [], engine._send
        number = {id(s): i for i, s in enumerate(sequences)}
        engine._send = lambda d: (sent.append((d.key, [(number[id(s)], s.scheduled) for s in d.rows])), send(d))
        for round_ in range(60):
            go_on(engine, sequences, case, round_)
        return sent

    assert dispatches(Scheduler) == dispatches(Anew)


def scripted(engine_config: EngineConfig, *jobs: tuple[int, int | None]) -> tuple[Engine, list[Sequence]]:
    """An engine with one-token prompts in the queue, each (max_tokens, number of its stop token or None)."""
    scripts = [
        Script([8 + i], [EOS if j + 1 == end else 8 + j for j in range(20)], "greedy", budget)
        for i, (budget, end) in enumerate(jobs)
    ]
    engine, sequences = scripted_engine(engine_config, scripts), [sequence(script) for script in scripts]
    for s in sequences:
        engine.add(s)
    return engine, sequences


def test_rows_with_all_tokens_in_flight_go_on_after_an_early_return():
    """The first row's last tokens are under way when the third ends: the device stops there, for all rows."""
    config = EngineConfig(3, 40, Buckets((2, 8), (3,), (40,)), decode_steps=4, in_flight=2)
    engine, sequences = scripted(config, (5, None), (20, None), (20, 3), (3, None))
    for _ in range(50):
        engine.advance()
    assert [len(s.tokens) for s in sequences] == [5, 20, 3, 3]
    assert not engine.busy


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_finished_row_is_taken_at_once(in_flight):
    """Once a finish is known, the next dispatch carries a waiting prompt, while the other rows decode."""
    config = EngineConfig(2, 40, Buckets((8,), (2,), (40,)), decode_steps=4, in_flight=in_flight)
    engine, _ = scripted(config, *[(20, 2 + 3 * i % 7) for i in range(12)])
    sent, send = [], engine._send
    engine._send = lambda dispatch: (sent.append(dispatch), send(dispatch))
    taken = 0
    while engine.busy:
        finished = [s for s in engine.advance() if s.status is Status.FINISHED]
        if finished and (waiting := list(engine.scheduler.waiting)):
            before = len(sent)
            engine.advance()
            assert [chunk.sequence for chunk in sent[before].chunks] == waiting[:1]
            assert len(sent[before].rows) == 2 - len(finished)
            taken += 1
    assert taken >= 5


def test_a_waiting_prompt_makes_the_device_return_early():
    """Nobody waits: four steps. A prompt waits for a row: the dispatch ends with the first row that does."""
    config = EngineConfig(2, 40, Buckets((8,), (2,), (40,)), decode_steps=4, in_flight=1)
    for jobs, expected in ([(9, 3), (9, None)], 5), ([(9, 3), (9, None), (9, None)], 2):
        engine, sequences = scripted(config, *jobs)
        for _ in range(3):  # two prompts, then a dispatch of decoding
            engine.advance()
        assert [len(s.tokens) for s in sequences[:2]] == [3, expected]


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.advance()


def test_a_lost_dispatch_is_an_error_and_no_endless_loop(monkeypatch):
    """A program that fails ends its sequences with the error; those that come later are served."""
    config = EngineConfig(2, 40, Buckets((8,), (2,), (40,)), decode_steps=4, in_flight=1)
    engine, sequences = scripted(config, (9, None), (9, None))
    engine.advance()
    engine.advance()
    monkeypatch.setattr(ScriptedDevice, "run", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        engine.advance()
    monkeypatch.undo()
    assert all(isinstance(s.error, ZeroDivisionError) and s.status is Status.FINISHED for s in sequences)
    engine.programs.rows = [Row() for _ in range(2)]
    assert not engine.busy
    later = sequence(Script([8], [9] * 5, "greedy", 9))
    engine.add(later)
    drain(engine)
    assert len(later.tokens) == 9


def test_programs_outside_the_buckets_are_refused(llama):
    with pytest.raises(UnplannedProgramError, match="no bucket holds 'decode 3x8 greedy cache 96'"):
        llama.engine.programs.get(ProgramKey("greedy", 3, MAX_LEN, 8))


# ---- the engine over a model

PROMPTS = random_prompts([11, 5, 1, 20, 8, 33, 2, 16], seed=20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(seed=3, max_tokens=16, ignore_eos=True, top_p=0.95, frequency_penalty=0.3)


def tokens_of(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_neighbours_change_no_row(params, small):
    """The same prompt alone, first and last among seven others: in a bucket of one row and in one of two."""
    mine, others = PROMPTS[0], PROMPTS[1:]
    (alone,) = tokens_of(small, [mine], params)
    with new_engine(small, buckets=dataclasses.replace(small.config.buckets, batch=(2,))):
        assert tokens_of(small, [mine], params) == [alone]
    assert tokens_of(small, [mine, *others], params)[0] == alone
    assert tokens_of(small, [*others, mine], params)[-1] == alone


def test_neighbours_that_sample_change_no_greedy_row(small):
    """Programs that sample or report log-probabilities give a greedy row the tokens of a greedy program."""
    expected = tokens_of(small, PROMPTS, GREEDY)
    mixed = [GREEDY if i % 2 else SAMPLED for i in range(len(PROMPTS))]
    assert tokens_of(small, PROMPTS, mixed)[1::2] == expected[1::2]


@pytest.mark.parametrize("waiting", [0, 1])
def test_the_device_returns_early_only_for_a_prompt_that_waits(waiting, llama):
    """The first row ends in the middle of eight steps."""
    with new_engine(llama, in_flight=1) as engine:
        prompts, budgets = random_prompts([3] * (4 + waiting), seed=24), [5, 30, 30, 30, 30]
        sequences = [Sequence(p, GREEDY, budget, seed=0) for p, budget in zip(prompts, budgets, strict=False)]
        for s in sequences:
            engine.add(s)
        engine.advance()
        engine.advance()  # two prompts each
        before = [len(s.tokens) for s in sequences[:4]]
        assert before == [2, 2, 1, 1]
        engine.advance()
        assert [len(s.tokens) for s in sequences[:4]] == ([5, 5, 4, 4] if waiting else [5, 10, 9, 9])
        for s in sequences[1:]:
            engine.cancel(s)


@pytest.mark.slow
def test_hundreds_of_requests(llama, checkpoint):
    """500 prompts out of 30, each with its own number of tokens: every result is that of its prompt."""
    rng = np.random.default_rng(21)
    pool = random_prompts(rng.integers(1, 10, 30).tolist(), seed=22)
    longest = tokens_of(llama, pool, dataclasses.replace(GREEDY, max_tokens=6))
    for prompt, tokens in zip(pool[:5], longest, strict=False):
        assert_greedy(checkpoint("llama"), prompt, tokens)
    which, counts = rng.integers(0, 30, 500), rng.integers(1, 7, 500).tolist()
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in counts]
    results = tokens_of(llama, [pool[i] for i in which], params)
    assert results == [longest[i][:count] for i, count in zip(which, counts, strict=True)]
    assert llama.engine.scheduler.idle
    assert all(pages.free == pages.pool.count for pages in llama.engine.scheduler.pages)
    assert not llama.engine.busy


def test_strict_programs_refuse_what_warmup_left_out(small):
    """Before any device work, and without harm to what comes next."""
    with new_engine(small) as engine:
        engine.programs = ProgramSet(engine.model, engine.plan, engine.config)
        with pytest.raises(ValueError, match=r"modes are a list of 'greedy', 'sample', .*, 'embed', got .*fast"):
            small.warmup(["fast"])
        assert small.warmup([]) == 0
        with pytest.raises(UnplannedProgramError, match="'sample' was not compiled ahead of time"):
            small.generate([PROMPTS[1], PROMPTS[2]], [SAMPLED, GREEDY])
        with pytest.raises(UnplannedProgramError, match="'logprobs' was not compiled ahead of time"):
            small.logprobs([PROMPTS[1]])
        with pytest.raises(UnplannedProgramError, match="'greedy' was not compiled ahead of time"):
            next(iter(small.stream(PROMPTS[1], GREEDY)))
        assert small.stats.dispatches == 0
        assert not engine.busy


def test_a_mode_has_its_own_programs(small):
    """Four decode programs and two prefill programs each; a prompt's logits and log-probabilities one more."""
    counts = [len(planned_keys(small.config, [mode])) for mode in ("greedy", "sample", "logprobs")]
    assert counts == [7, 6, 7]
    assert all(key.mode == "greedy" for key in planned_keys(small.config, ["greedy"]))


def test_gpus_have_single_steps_of_few_rows_only():
    """Three of eleven; the host's changes of logits take one step of any number of rows."""
    config = EngineConfig.make("gpu", 512, 2304)
    keys = planned_keys(config, ["greedy", "processed"])
    single = [key.rows for key in keys if key.mode == "greedy" and key.steps == 1 and not (key.chunks or key.part)]
    assert single == [rows for rows in config.row_buckets if rows <= 16] == [1, 8, 16]
    assert len([key for key in keys if key.mode == "greedy" and key.steps == 4 and not key.cascade]) == 11
    assert len([key for key in keys if key.part == "forward" and not key.chunks]) == 11
    for rows in (64, 512):
        config = EngineConfig.make("tpu", rows, 64)
        assert config.one_step_buckets == config.row_buckets
        config = EngineConfig.make("gpu", rows, 64, Buckets((64,), (rows,), (64,)))
        assert config.one_step_buckets == (rows,)
        assert ProgramSet.make(smallest_model(), config).decisive in planned_keys(config)
    config = EngineConfig.make("gpu", 512, 40)
    assert ProgramSet.make(smallest_model(), config).decisive in planned_keys(config)


@pytest.mark.slow
def test_nothing_compiles_after_warmup(small, monkeypatch):
    monkeypatch.setattr(small.engine.programs, "strict", False)  # others use this engine afterwards
    assert small.warmup() == 20
    compilations = small.compilations
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = random_prompts([3, 20, 1, 9, 14], seed=23)
    tokens = tokens_of(small, prompts, greedy)
    short = dataclasses.replace(SAMPLED, max_tokens=8)
    details = dataclasses.replace(short, logprobs=3)
    small.generate(prompts, [greedy, short, details, greedy, dataclasses.replace(short, n=3)])
    small.generate("some text", SamplingParams(max_tokens=12, stop=["e", "th"], prompt_logprobs=2, min_tokens=2))
    small.logprobs(prompts)
    small.logits(prompts[1])
    assert len(list(small.stream(prompts[0], greedy))) > 0
    abandoned = iter(small.stream(prompts[1], short))
    next(abandoned)
    small.generate(prompts[2], greedy)
    abandoned.close()
    assert tokens_of(small, prompts, greedy) == tokens
    assert small.compilations == compilations
