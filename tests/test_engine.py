"""The engine: scheduling against a scripted device, continuous batching, neighbours, compilations.

Most of the time is compilation: about a minute.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.compile.program_set import planned_keys
from inferlib.compile.programs import CHUNK_COLUMNS, Control, ProgramKey, StepOutput
from inferlib.config import Buckets, EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.scheduler import Scheduler
from inferlib.engine.sequence import Sequence, Status
from inferlib.models.abstract import abstract_model
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.sampling.params import SamplingParams

EOS = 2
MODES = ("greedy", "sample", "logprobs")

# ---- the engine over a scripted device


class HostArray(np.ndarray):
    def copy_to_host_async(self):
        pass


def host_array(values) -> HostArray:
    return np.asarray(values).view(HostArray)


@dataclass
class Script:
    """What the device says after a prompt, and what it must have been told of it."""

    prompt: list[int]
    tokens: list[int]
    mode: str
    max_tokens: int


@dataclass
class Row:
    prompt: list[int] = field(default_factory=list)
    script: Script | None = None
    active: bool = False
    generated: int = 0


class ScriptedDevice:
    """Stands for the compiled programs: treats rows as they do, follows scripts, and checks every call."""

    def __init__(self, config: EngineConfig, scripts: list[Script]):
        self.scripts = {tuple(s.prompt): s for s in scripts}
        self.planned = frozenset(planned_keys(config))
        self.rows = [Row() for _ in range(config.max_batch)]
        self.scheduler: Scheduler | None = None

    def get(self, key: ProgramKey):
        assert key in self.planned
        assert not (self.scheduler.waiting and self.scheduler._free), "a prompt waits beside a free row"
        return functools.partial(self.run, key)

    def run(self, key, weights, cache, state, control, chunk=None):
        control = Control.unpack(np.asarray(control))
        for row, stop in zip(self.rows, control.cancel, strict=True):
            row.active &= not stop
        if chunk is not None:
            tokens = [self.advance_rows(key)] if key.rows else np.zeros((1, 0), int)
            first, detail = self.prefill(key, chunk)
            detail = host_array(detail) if key.detail else None
            return cache, state, StepOutput(host_array(tokens), None, host_array(first), None, detail)
        tokens = np.full((key.steps, key.rows), -1)
        started = [row.active for row in self.rows[: key.rows]]
        for step in range(control.steps):
            active = [row.active for row in self.rows[: key.rows]]
            if not any(active) or (control.yield_early and active != started):
                break
            tokens[step] = self.advance_rows(key)
        return cache, state, StepOutput(host_array(tokens))

    def prefill(self, key, chunk):
        first, detail = np.full(key.chunks, -1), np.full((key.chunks, key.chunk, 1), -1)
        for i, (tokens, entry) in enumerate(zip(chunk.tokens, chunk.table, strict=True)):
            info = dict(zip(CHUNK_COLUMNS, entry.tolist(), strict=True))
            if info["row"] >= len(self.rows):
                assert not info["last"]
                continue
            if info["first"]:
                assert not self.rows[info["row"]].active, "the row still belongs to another sequence"
                self.rows[info["row"]] = Row()
            row, end = self.rows[info["row"]], info["start"] + info["length"]
            assert info["start"] == len(row.prompt)
            assert 0 < info["length"] <= key.chunk
            assert end <= key.limit
            row.prompt += tokens[: info["length"]].tolist()
            detail[i, : info["length"], 0] = tokens[: info["length"]]
            if info["last"]:
                row.script = self.scripts[tuple(row.prompt)]
                assert info["budget"] == row.script.max_tokens
                first[i] = self.advance(key, row) if row.script.max_tokens else EOS
        return first, detail

    def advance_rows(self, key) -> list[int]:
        return [self.advance(key, row) if row.active else -1 for row in self.rows[: key.rows]]

    def advance(self, key, row: Row) -> int:
        assert MODES.index(row.script.mode) <= MODES.index(key.mode)
        assert len(row.prompt) + row.generated <= key.limit
        token = row.script.tokens[row.generated]
        row.generated += 1
        row.active = token != EOS and row.generated < row.script.max_tokens
        return token


@functools.cache
def smallest_model():
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None)
    layer = LayerSpec(attention, MlpSpec(hidden=2))
    return abstract_model(ModelConfig("test", vocab=64, dim=2, layers=(layer,), context=64), "float32")


def scripted_engine(config: EngineConfig, scripts: list[Script]) -> Engine:
    engine = Engine(smallest_model(), (), config)
    engine.programs = ScriptedDevice(config, scripts)
    engine.programs.scheduler = engine.scheduler
    return engine


def sequence(script: Script, detail: str = "") -> Sequence:
    params = SamplingParams(temperature=0.0 if script.mode == "greedy" else 1.0)
    return Sequence(script.prompt, params, script.max_tokens, seed=0, eos_ids=(EOS,), detail=detail)


@st.composite
def traffic(draw):
    """A config, scripts with their arrival and cancellation (in rounds), and each round's bound on steps."""
    batch = draw(st.sampled_from([3, 2, 1]))
    config = EngineConfig(
        max_batch=batch,
        max_len=40,
        buckets=Buckets(
            prefill=draw(st.sampled_from([(4,), (2, 8)])),
            batch=tuple(range(1, batch + 1)) if draw(st.booleans()) else (batch,),
            cache=draw(st.sampled_from([(40,), (8, 16, 40)])),
        ),
        decode_steps=draw(st.sampled_from([4, 1, 3])),
        in_flight=draw(st.sampled_from([2, 1, 3])),
    )
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        scoring = draw(st.integers(0, 9)) == 9
        prompt = [8 + number, *(8 + i % 50 for i in range(draw(st.sampled_from([0, 1, 3, 7, 19]))))]
        budget = 0 if scoring else draw(st.integers(1, 20))
        ending = draw(st.integers(1, 20))
        tokens = [EOS if i + 1 == ending else 8 + i for i in range(20)]
        mode = "logprobs" if scoring else draw(st.sampled_from(["greedy", "sample"]))
        arrival = draw(st.sampled_from([0, 0, 1, 3, 6]))
        cancel = draw(st.sampled_from([None, None, None, 0, 1, 2, 5]))
        jobs.append((Script(prompt, tokens, mode, budget), arrival, cancel))
    return config, jobs, draw(st.lists(st.sampled_from([None, None, 1]), min_size=1, max_size=4))


@settings(max_examples=500, deadline=None)
@given(traffic())
def test_any_traffic_is_served_completely_and_in_order(case):
    config, jobs, bounds = case
    engine = scripted_engine(config, [script for script, _, _ in jobs])
    sequences = [sequence(script, "logits" if not script.max_tokens else "") for script, _, _ in jobs]
    for round_ in range(400):
        for s, (_, arrival, cancel) in zip(sequences, jobs, strict=True):
            if arrival == round_:
                engine.add(s)
            if cancel is not None and arrival + cancel == round_ and s.status is not Status.FINISHED:
                engine.cancel(s)
        engine.advance(max_steps=bounds[round_ % len(bounds)])
        owned = [s.row for s in engine.scheduler.running.values()]
        assert sorted([*owned, *engine.scheduler._free]) == list(range(config.max_batch))
        if round_ > 20 and not engine.busy:
            break
    assert not engine.busy
    for s, (script, _, cancel) in zip(sequences, jobs, strict=True):
        expected = script.tokens[: script.max_tokens]
        expected = expected[: expected.index(EOS) + 1] if EOS in expected else expected
        assert s.status is Status.FINISHED
        assert s.tokens == expected[: len(s.tokens)]
        if cancel is None:
            assert s.tokens == expected
            assert s.finish_reason == ("stop" if EOS in expected else "length")
        if not script.max_tokens and cancel is None:
            assert np.concatenate(s.prompt_details)[:, 0].tolist() == s.prompt


def test_rows_that_were_fully_scheduled_go_on_after_an_early_return():
    """A's last tokens are in flight when C ends and the device returns early: A still has tokens to come."""
    config = EngineConfig(3, 40, Buckets((2, 8), (3,), (40,)), decode_steps=4, in_flight=2)
    ends = {"A": None, "B": None, "C": 3, "D": None}
    budgets = {"A": 5, "B": 20, "C": 20, "D": 3}
    scripts = [
        Script([8 + i], [EOS if j + 1 == ends[name] else 8 + j for j in range(20)], "greedy", budgets[name])
        for i, name in enumerate(ends)
    ]
    engine = scripted_engine(config, scripts)
    sequences = [sequence(script) for script in scripts]
    for s in sequences:
        engine.add(s)
    for _ in range(50):
        engine.advance()
    assert [len(s.tokens) for s in sequences] == [5, 20, 3, 3]
    assert not engine.busy
