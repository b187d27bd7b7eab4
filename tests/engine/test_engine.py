"""The engine: scheduling against a scripted device, continuous batching, neighbours, compilations.

Most of the time is compilation: about a minute.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib import LLM
from inferlib.config import Buckets, EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.scheduler import Scheduler
from inferlib.engine.sequence import Sequence, Status
from inferlib.engine.step_times import StepTimes
from inferlib.programs.program import CHUNK_COLUMNS, MODES, Control, Logits, ProgramKey, StepOutput
from inferlib.programs.program_set import ProgramSet, UnplannedProgramError, planned_keys
from inferlib.sampling.params import SamplingParams
from inferlib.speculation.settings import Speculation
from tests.helpers.engines import Replicas, assert_accounted, smallest_model
from tests.helpers.llms import MAX_LEN, assert_greedy, new_engine, random_prompts

EOS = 2

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
    priority: int = 0


@dataclass
class Row:
    prompt: list[int] = field(default_factory=list)
    script: Script | None = None
    active: bool = False
    generated: int = 0
    pages: dict[int, int] = field(default_factory=dict)
    filling: bool = False
    history: dict[int, int] = field(default_factory=dict)


class ScriptedDevice:
    """Stands for the compiled programs: treats rows as they do, follows scripts, and checks every call. A cell of its
    cache is the token that stands there."""

    misses = 0
    allocate_state = Mock()

    def __init__(self, config: EngineConfig, scripts: list[Script], page: int):
        self.scripts, self.page = {tuple(s.prompt): s for s in scripts}, page
        self.planned, self.speculates = frozenset(planned_keys(config, MODES)), config.speculation is not None
        self.rows = [Row() for _ in range(config.max_batch)]
        self.replicas, self.places = config.shards.replicas, config.rows
        self.cells = defaultdict(lambda: [None] * page)  # of each page of each replica
        self.scheduler: Scheduler | None = None
        self.begun: tuple | None = None  # the key and the control of a step whose tokens are not chosen

    def ready(self, key: ProgramKey):
        assert key in self.planned
        scheduler, first = self.scheduler, next(iter(self.scheduler.waiting), None)
        if key.part == "choose":
            return functools.partial(self.choose, key)
        if first and not first.ready and first.waits_for is None:  # it was not preempted
            assert scheduler._place_for(first) is None, "a prompt waits beside a free row and free pages"
        return functools.partial(self.forward if key.part else self.run, key)

    def forward(self, key, weights, cache, state, control, chunk=None):
        self.begun = key, control
        logits = (host_array(np.zeros((rows * self.replicas, 64), np.float32)) for rows in (key.chunks, key.rows))
        return cache, state, StepOutput(host_array(np.zeros((1, 0), int)), logits=Logits(*logits))

    def choose(self, key, state, logits, masks, chunk=None):
        (forward, control), self.begun = self.begun, None
        assert key == forward.following(key.mode)
        _, state, output = self.run(dataclasses.replace(forward, detail=""), None, None, state, control, chunk)
        return state, output

    def change_rows(self, cache, state, changes):
        for source, target in changes.moves:
            assert source // self.places == target // self.places
            assert not self.rows[target].active, "the row still belongs to another sequence"
            self.rows[target], self.rows[source] = self.rows[source], Row()
        pages = self.scheduler.pages[0].pool.count
        for target, source in changes.copies.items():
            assert source // pages == target // pages
            self.cells[divmod(target, pages)] = list(self.cells[divmod(source, pages)])
        for row, column, page in changes.grants:
            self.rows[row].pages[column] = page
        assert self.speculates or not changes.past
        for row, position, token in changes.past:
            self.rows[row].history[position] = token
        return cache, state

    def cells_of(self, number: int, end: int) -> list[int]:
        """What the cells of a row's positions below `end` hold."""
        replica, pages, columns = number // self.places, self.rows[number].pages, range(-(-end // self.page))
        return [token for column in columns for token in self.cells[replica, pages[column]]][:end]

    def write(self, number: int, position: int, token: int) -> None:
        row = self.rows[number]
        column, slot = divmod(position, self.page)
        self.cells[number // self.places, row.pages[column]][slot] = token

    def check(self, number: int, tokens: list[int]) -> None:
        """The row's cells hold these tokens."""
        assert self.cells_of(number, len(tokens)) == tokens, "another sequence wrote to the row's pages"

    def run(self, key, weights, cache, state, control, chunk=None):
        assert self.begun is None, "a step waits for its tokens to be chosen"
        controls = [Control.unpack(part[None]) for part in np.asarray(control)]
        for row, stop in zip(self.rows, np.concatenate([c.cancel for c in controls]), strict=True):
            row.active &= not stop
            row.filling &= not stop
        if chunk is not None:
            tokens = [self.advance_rows(key)] if key.rows else np.zeros((1, 0), int)
            first, detail = self.prefill(key, chunk)
            detail = host_array(detail) if key.detail else None
            return cache, state, StepOutput(host_array(tokens), None, host_array(first), None, detail)
        rows = self.rows_of(key)
        tokens = [[] for _ in rows]
        started = [row.active for row in rows]
        for _ in range(key.steps):
            active = [row.active for row in rows]
            if not any(active) or (controls[0].yield_early and active != started):
                break
            for of_row, number in zip(tokens, self.numbers_of(key), strict=True):
                if self.rows[number].active:
                    of_row += self.verify(key, number) if key.drafts else [self.advance(key, number)]
        padded = [of_row + [-1] * (key.most - len(of_row)) for of_row in tokens]
        return cache, state, StepOutput(host_array(np.transpose(padded)))

    def verify(self, key, number: int) -> list[int]:
        """The tokens of a step with drafts, of which some stand; the cells of all are written."""
        row = self.rows[number]
        length, left = len(row.prompt) + row.generated, row.script.max_tokens - row.generated
        for draft in range(1, min(1 + key.drafts, left)):
            assert length - 1 + draft < key.limit
            self.write(number, length - 1 + draft, -number)
        tokens = []
        for _ in range(1 + (length * 7 + number) % (1 + key.drafts)):
            tokens.append(self.advance(key, number))
            if not row.active:
                break
        return tokens

    def prefill(self, key, chunk):
        assert len(chunk.tokens) == key.chunks * self.replicas
        first, detail = np.full(len(chunk.tokens), -1), np.full((*chunk.tokens.shape, 1, 1), -1)
        for i, (tokens, entry) in enumerate(zip(chunk.tokens, chunk.table, strict=True)):
            info = dict(zip(CHUNK_COLUMNS, entry.tolist(), strict=True))
            if info["row"] >= self.places:
                assert not info["last"]
                continue
            number = i // key.chunks * self.places + info["row"]
            if not self.rows[number].filling:
                assert not self.rows[number].active, "the row still belongs to another sequence"
                assert info["first"] == (info["start"] == 0)
                cached = self.cells_of(number, info["start"])
                before = self.rows[number]
                self.rows[number] = Row(cached, pages=before.pages, filling=True, history=before.history)
            row, end = self.rows[number], info["start"] + info["length"]
            assert info["start"] == len(row.prompt)
            for position, token in enumerate(tokens[: info["length"]].tolist(), info["start"]):
                self.write(number, position, token)
            assert 0 < info["length"] <= key.chunk
            assert end <= key.limit
            row.prompt += tokens[: info["length"]].tolist()
            row.history |= enumerate(row.prompt[info["start"] :], info["start"])
            self.check(number, row.prompt)
            detail[i, : info["length"], 0, 0] = tokens[: info["length"]]
            if info["last"]:
                row.filling = False
                row.script = self.scripts[tuple(row.prompt[: info["generated"]])]
                row.generated = len(row.prompt) - info["generated"]
                assert row.prompt[info["generated"] :] == row.script.tokens[: row.generated]
                row.prompt = row.prompt[: info["generated"]]
                assert info["budget"] == row.script.max_tokens - row.generated
                first[i] = self.advance(key, number, written=True) if row.script.max_tokens else EOS
        return first, detail

    def numbers_of(self, key) -> list[int]:
        """The rows that a program advances: the first ones of each replica."""
        return [i for i in range(len(self.rows)) if i % self.places < key.rows]

    def rows_of(self, key) -> list[Row]:
        return [self.rows[i] for i in self.numbers_of(key)]

    def advance_rows(self, key) -> list[int]:
        return [self.advance(key, i) if self.rows[i].active else -1 for i in self.numbers_of(key)]

    def advance(self, key, number: int, *, written: bool = False) -> int:
        row = self.rows[number]
        if not written:  # the last token's cell
            tokens = row.prompt + row.script.tokens[: row.generated]
            self.write(number, len(tokens) - 1, tokens[-1])
            self.check(number, tokens)
            assert not self.speculates or tokens == [row.history[i] for i in range(len(tokens))]
        assert MODES.index(row.script.mode) <= MODES.index(key.mode)
        assert len(row.prompt) + row.generated <= key.limit
        token = row.script.tokens[row.generated]
        row.history[len(row.prompt) + row.generated] = token
        row.generated += 1
        row.active = token != EOS and row.generated < row.script.max_tokens
        return token


def scripted_engine(config: EngineConfig, scripts: list[Script]) -> Engine:
    engine = Engine(smallest_model(), (), config)
    engine.programs = ScriptedDevice(config, scripts, engine.plan.page)
    engine.programs.scheduler = engine.scheduler
    return engine


def sequence(script: Script, detail: str = "") -> Sequence:
    functions = [lambda token_ids, logits: logits] if script.mode == "processed" else None
    params = SamplingParams(temperature=0.0 if script.mode == "greedy" else 1.0, logits_processors=functions)
    options = dict(eos_ids=(EOS,), detail=detail, priority=script.priority)
    return Sequence(script.prompt, params, script.max_tokens, seed=0, **options)


@st.composite
def traffic(draw):
    """A config, scripts with their arrival and cancellation (in rounds), and each round's bound on steps."""
    replicas, places = draw(st.sampled_from([(1, 3), (1, 2), (1, 1), (2, 2), (3, 1)]))
    batch = replicas * places
    prefill, tile = draw(st.sampled_from([((4,), None), ((2, 8), None), ((4, 16), 4), ((2, 4, 12), 4)]))
    config = EngineConfig(
        max_batch=batch,
        max_len=40,
        buckets=Buckets(
            prefill=prefill,
            batch=tuple(range(1, batch + 1)) if draw(st.booleans()) else (batch,),
            cache=draw(st.sampled_from([(40,), (8, 16, 40)])),
            tile=tile,
        ),
        row_limit=draw(st.sampled_from([None, tile])),
        decode_steps=draw(st.sampled_from([4, 1, 3])),
        in_flight=draw(st.sampled_from([2, 1, 3])),
        shards=Replicas(replicas),
        page_size=(page := draw(st.sampled_from([64, 4, 8]))),
        # A cell of the smallest model takes 16 bytes, and its layout knows no replicas.
        cache_memory=16 * replicas * page * draw(st.sampled_from([-(-40 // page), -(-60 // page), 100])),
        speculation=draw(st.sampled_from([None, Speculation(tokens=3), Speculation(tokens=2)])),
    )
    if draw(st.booleans()):
        vars(config)["one_step_buckets"] = config.row_buckets[:1]  # as on GPUs
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        scoring = draw(st.integers(0, 9)) == 9
        length, family = draw(st.sampled_from([0, 1, 3, 7, 8, 19])), draw(st.integers(0, 2))
        prompt = [*(20 + (family + i) % 40 for i in range(length)), 8 + number]
        budget = 0 if scoring else draw(st.integers(1, 20))
        ending = draw(st.integers(1, 20))
        tokens = [EOS if i + 1 == ending else 8 + i for i in range(20)]
        mode = "greedy" if scoring else draw(st.sampled_from(["greedy", "sample", "sample", "processed"]))
        arrival = draw(st.sampled_from([0, 0, 1, 3, 6]))
        cancel = draw(st.sampled_from([None, None, None, 0, 1, 2, 5]))
        script = Script(prompt, tokens, mode, budget, draw(st.sampled_from([0, 0, 0, 1, -1])))
        if jobs and draw(st.integers(0, 4)) == 4:
            script = jobs[0][0]  # the same prompt again
        jobs.append((script, arrival, cancel))
    return config, jobs, draw(st.lists(st.sampled_from([None, None, 1]), min_size=1, max_size=4))


def choose_by_length(engine: Engine) -> None:
    """Let an engine that speculates choose how many tokens to draft by what a run repeats: not by time."""
    if (profit := engine.scheduler.profit) is not None:
        profit.choose = lambda sequences, mode, rows: profit.counts[sum(s.least for s in sequences) % 3 - 1]


def go_on(engine: Engine, sequences: list[Sequence], case: tuple, round_: int) -> None:
    """What comes and what is cancelled in a round, then a step of the engine."""
    _, jobs, bounds = case
    for s, (_, arrival, cancel) in zip(sequences, jobs, strict=True):
        if arrival == round_:
            engine.add(s)
        if cancel is not None and arrival + cancel == round_ and s.status is not Status.FINISHED:
            engine.cancel(s)
    engine.advance(max_steps=bounds[round_ % len(bounds)])


@settings(max_examples=500)
@given(traffic())
def test_any_traffic_is_served_completely_and_in_order(case):
    config, jobs, _ = case
    engine = scripted_engine(config, [script for script, _, _ in jobs])
    choose_by_length(engine)
    sequences = [sequence(script, "logits" if not script.max_tokens else "") for script, _, _ in jobs]
    for round_ in range(400):
        go_on(engine, sequences, case, round_)
        assert_accounted(engine)
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


@settings(max_examples=200)
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
    sequences = [sequence(script, "logits" if not script.max_tokens else "") for script, _, _ in jobs]
    for round_ in range(800):
        go_on(engine, sequences, case, round_)
        if round_ > 20 and not engine.busy:
            break
    assert not engine.busy
    sizes = [math.prod(shape) for shape in config.prefill_shapes()]
    most = max(fit, min(size for size in sizes if size >= config.prefill_unit))
    assert all(key.chunks * key.chunk <= most for key in steps if key.rows and key.chunks)
    for s, (script, _, cancel) in zip(sequences, jobs, strict=True):
        expected = script.tokens[: script.max_tokens]
        expected = expected[: expected.index(EOS) + 1] if EOS in expected else expected
        assert s.tokens == (expected if cancel is None else expected[: len(s.tokens)])


@settings(max_examples=150)
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


def test_thousands_of_requests(llama, checkpoint):
    """2000 prompts out of 30, each with its own number of tokens: every result is that of its prompt."""
    rng = np.random.default_rng(21)
    pool = random_prompts(rng.integers(1, 10, 30).tolist(), seed=22)
    longest = tokens_of(llama, pool, dataclasses.replace(GREEDY, max_tokens=6))
    for prompt, tokens in zip(pool[:5], longest, strict=False):
        assert_greedy(checkpoint("llama"), prompt, tokens)
    which, counts = rng.integers(0, 30, 2000), rng.integers(1, 7, 2000).tolist()
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


def test_nothing_compiles_after_warmup(small):
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
