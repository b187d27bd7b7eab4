"""Times of requests are without compilation."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from inferlib import SamplingParams
from inferlib.cli.output import Summary
from inferlib.engine.clock import Clock
from inferlib.engine.sequence import Sequence
from inferlib.programs.program_set import ProgramSet
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
