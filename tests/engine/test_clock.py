"""Times of requests are without compilation; deadlines."""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress

import pytest

from inferlib import SamplingParams
from inferlib.cli.output import Summary
from inferlib.engine.clock import Clock
from inferlib.engine.deadlines import Deadlines
from inferlib.engine.sequence import Sequence
from inferlib.programs.program_set import ProgramSet
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import new_engine, random_prompts

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time of the monotonic clock, which only the test changes."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_clock_stands_still_while_it_is_stopped(now):
    clock = Clock()
    assert clock.now() == 100
    now[0] = 101
    with clock.stopped():
        now[0] = 160
        assert clock.now() == 101
        assert Sequence([1], PARAMS, 1, 0, clock=clock).arrival == 101
    assert clock.now() == 101
    now[0] = 162
    assert clock.now() == 103
    with suppress(ValueError), clock.stopped():
        now[0] = 200
        raise ValueError
    assert clock.now() == 103


def test_compilation_is_in_no_time_of_a_request(small, now, monkeypatch, capsys):
    """A stand-in for the compiler takes an hour for each program; everything else takes no time."""
    small.generate(random_prompts([5]), PARAMS)
    programs, compiled = small.engine.programs, {}

    def get(key):
        now[0] += 3600
        programs.misses += 1
        compiled[key] = ProgramSet.ready(programs, key)
        return compiled[key]

    with new_engine(small):
        monkeypatch.setattr(programs, "misses", 0)
        monkeypatch.setattr(programs, "ready", compiled.get)
        monkeypatch.setattr(programs, "get", get)
        summary = Summary(small)
        (output,) = small.generate(random_prompts([5]), PARAMS)
        assert len(compiled) > 1
        metrics = output.metrics
        assert (metrics.ttft, metrics.itl) == (0, 0)
        assert metrics.arrival_time == metrics.finished_time == 100
        summary.add(output)
        summary.show()
    shown = capsys.readouterr().err
    assert "TTFT 0.00 s, ITL 0.0 ms" in shown
    assert f"s to compile {len(compiled)} programs" in shown


# ---- deadlines


def test_a_deadline_ends_what_runs_and_what_waits(small, now):
    """Two rows: the first request generates for two seconds, the others wait; nothing else changes."""
    prompts = random_prompts([5, 9, 3, 12])
    expected = [output.outputs[0].token_ids for output in small.generate(prompts, PARAMS)]
    late = dataclasses.replace(PARAMS, deadline=2)
    waits = dataclasses.replace(late, prompt_logprobs=1)
    requests = [
        small.prepare(prompt, params) for prompt, params in zip(prompts, (late, PARAMS, waits, PARAMS), strict=True)
    ]
    running = small.run(requests)

    def advance(original=small.engine._oldest):
        now[0] += 0.75
        return original()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small.engine, "_oldest", advance)
        outputs = sorted(running, key=lambda output: output.request_id)
    first, second, third, fourth = (output.outputs[0] for output in outputs)
    assert [x.finish_reason for x in (first, second, third, fourth)] == ["deadline", "length", "deadline", "length"]
    assert 0 < len(first.token_ids) < 8
    assert first.token_ids == expected[0][: len(first.token_ids)]
    assert first.text == small.tokenizer.decode(first.token_ids)
    assert (third.token_ids, third.text, outputs[2].prompt_logprobs) == ([], "", None)
    assert outputs[2].metrics.ttft is None
    assert (second.token_ids, fourth.token_ids) == (expected[1], expected[3])
    assert small.engine.scheduler.idle
    assert_accounted(small.engine)


def test_deadlines_are_forgotten_with_their_sequences(now):
    deadlines, params = Deadlines(), dataclasses.replace(PARAMS, deadline=5.0)
    sequences = [Sequence([1], params, 1, 0) for _ in range(1000)]
    for s in sequences:
        deadlines.add(s)
        s.finish("stop")
    assert len(deadlines._heap) <= 64
    last = Sequence([1], params, 1, 0)
    deadlines.add(last)
    assert deadlines.passed() == []
    now[0] += 5
    assert deadlines.passed() == [last]
    assert deadlines.passed() == []
