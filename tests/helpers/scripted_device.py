"""A device that follows scripts in place of compiled programs, and checks every call; and random traffic for it."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import Mock

import numpy as np
from hypothesis import strategies as st

from inferlib.buckets import Buckets
from inferlib.config import EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.scheduler import Scheduler
from inferlib.engine.sequence import Sequence, Status
from inferlib.programs.arguments import CHUNK_COLUMNS, Control, Logits, StepOutput
from inferlib.programs.keys import MODES, ProgramKey
from inferlib.programs.program_set import planned_keys
from inferlib.sampling.params import SamplingParams
from inferlib.speculation.settings import Speculation
from tests.helpers.engines import Replicas, smallest_model

EOS = 2


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
        assert key == forward.choosing(key.mode)
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
        padded = [of_row + [-1] * (key.most_tokens - len(of_row)) for of_row in tokens]
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


def sequences_of(case: tuple) -> list[Sequence]:
    return [sequence(script, "logits" if not script.max_tokens else "") for script, _, _ in case[1]]


def serve(engine: Engine, sequences: list[Sequence], case: tuple, check: Callable[[Engine], None]) -> None:
    """Run the traffic to its end; `check` the engine after each step."""
    for round_ in range(800):
        go_on(engine, sequences, case, round_)
        check(engine)
        if round_ > 20 and not engine.busy:
            break
    assert not engine.busy


def assert_served(sequences: list[Sequence], case: tuple) -> None:
    """All of its script, or, of what was cancelled, its beginning."""
    for s, (script, _, cancel) in zip(sequences, case[1], strict=True):
        expected = script.tokens[: script.max_tokens]
        expected = expected[: expected.index(EOS) + 1] if EOS in expected else expected
        assert s.status is Status.FINISHED
        assert s.tokens == (expected if cancel is None else expected[: len(s.tokens)])
        if cancel is None:
            assert s.finish_reason == ("stop" if EOS in expected else "length")
        if not script.max_tokens and cancel is None:
            assert np.concatenate(s.prompt_details)[:, 0].tolist() == s.prompt
