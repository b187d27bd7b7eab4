"""Rings and states against a scripted device that knows what each holds: whatever is saved, evicted and restored, a row
reads its own tokens."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.cache.plan import BlockCache, BlockState, CacheArray, CachePlan
from inferlib.cache.prefix_tree import PrefixTree, encoded
from inferlib.cache.snapshots import Snapshot, Snapshots
from inferlib.engine.engine import Engine
from inferlib.programs.program_set import ProgramSet
from inferlib.programs.row_changes import Save
from inferlib.sharding import axes
from tests.helpers.engines import assert_accounted, smallest_model
from tests.helpers.scripted_device import (
    ScriptedDevice,
    assert_served,
    choose_by_length,
    sequences_of,
    serve,
    traffic,
)

REACH = 3  # positions that a window sees


def test_a_ring_goes_back_no_farther_than_what_it_was_restored_from():
    """And no farther than its slack, which is two units."""
    tree, snapshots, tokens = PrefixTree(4, 4), Snapshots(3, 4, 4, 8), encoded(range(24))
    tree.on_removal, parent = snapshots.removed, tree.root(None)
    for page in range(5):
        parent = tree.insert(parent, tokens[page * len(tokens) // 6 : (page + 1) * len(tokens) // 6], page)
    whole = tree.match(None, tokens, 24)
    assert snapshots.save(Snapshot(20, 20), (0, 18, 19), whole) is not None
    first = snapshots.resume(whole).snapshot
    assert (first.first, first.last) == (12, 16)
    short = tree.match(None, tokens, 13)
    assert snapshots.resume(short).tokens == 12
    assert snapshots.save(Snapshot(12, 12), (first.first, 12, 12), short) is not None
    assert snapshots.resume(tree.match(None, tokens, 11)).tokens == 0  # it would be 8 of a row that was not restored
    tree.release(whole.nodes)
    while tree.idle:
        tree.evict()
    assert snapshots.saved == 0


class Ring:
    """What a row has of the last tokens: in each slot a position, and what stands there."""

    def __init__(self, slots: int):
        self.cells = [(-1, -1)] * slots

    def copy(self) -> Ring:
        ring = Ring(len(self.cells))
        ring.cells = list(self.cells)
        return ring

    def write(self, position: int, token: int) -> None:
        self.cells[position % len(self.cells)] = position, token

    def check(self, tokens: list[int]) -> None:
        """What a query behind these tokens sees."""
        for position in range(max(len(tokens) - REACH + 1, 0), len(tokens)):
            assert self.cells[position % len(self.cells)] == (position, tokens[position]), "a ring of other tokens"


class State:
    """All tokens that a row has had."""

    def __init__(self):
        self.tokens: list[int] = []

    def copy(self) -> State:
        state = State()
        state.tokens = list(self.tokens)
        return state

    def write(self, position: int, token: int) -> None:
        self.tokens = self.tokens if position else []
        assert len(self.tokens) == position, "a state of another length"
        self.tokens.append(token)

    def check(self, tokens: list[int]) -> None:
        assert self.tokens == tokens, "a state of other tokens"


class Device(ScriptedDevice):
    """A scripted device whose rows have rings or states beside pages."""

    def __init__(self, config, scripts, plan: CachePlan):
        super().__init__(config, scripts, plan.page)
        slots = REACH + config.row_tokens
        self.beside = [State() if plan.exact_snapshots else Ring(slots) for _ in range(config.max_batch)]
        self.store = {}

    def ready(self, key):
        """Without the check that no prompt waits which could run: one may need fewer pages once a snapshot is saved."""
        assert key in self.planned
        return functools.partial(self.choose if key.part == "choose" else self.forward if key.part else self.run, key)

    def change_rows(self, cache, state, changes):
        for source, target in changes.moves:
            self.beside[target] = self.beside[source].copy()
        return super().change_rows(cache, state, changes)

    def change_snapshots(self, cache, snapshots, changes):
        for change in changes.snapshots:
            place = change.row // self.places, change.number
            if isinstance(change, Save):
                self.store[place] = self.beside[change.row].copy()
            else:
                self.beside[change.row] = self.store[place].copy()
        return cache, snapshots

    def write(self, number, position, token):
        row = self.rows[number]
        if position and not (row.generated and position >= len(row.prompt) + row.generated):  # else it is a draft
            self.beside[number].check(self.cells_of(number, position))
        super().write(number, position, token)
        self.beside[number].write(position, token)


def engine_of(config, scripts, snapshots: int, *, exact: bool) -> Engine:
    """An engine of a model with a state, or a window, beside attention."""
    programs = ProgramSet.make(smallest_model(), config)
    rows, value = config.max_batch, np.dtype(np.float32)
    block = BlockCache(((rows, 1, REACH + config.row_tokens, 2),) * 2, ring=True, dtype=value)
    if exact:
        block = BlockState((CacheArray((rows, 2), (axes.PAGES, None), value),), ("state",))
    plan = programs.plan
    plan = dataclasses.replace(plan, blocks=(*plan.blocks, block), snapshots=snapshots * config.shards.replicas)
    programs = ProgramSet(programs.model, plan, config, choices=programs.choices)
    engine = Engine(programs.model, (), config, programs=programs)
    engine.programs = Device(config, scripts, plan)
    engine.programs.scheduler = engine.scheduler
    return engine


@st.composite
def branching_traffic(draw):
    """Traffic of prompts that part once or twice."""
    config, jobs, bounds = draw(traffic())
    for script, *_ in jobs:
        trunk, branch = draw(st.sampled_from([0, 4, 8, 11])), draw(st.sampled_from([0, 1, 4, 5, 8]))
        first = draw(st.sampled_from([30, 40]))
        script.prompt[:] = [*range(20, 20 + trunk), *range(first, first + branch), script.prompt[-1]]
    return config, jobs, bounds


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False], ids=["states", "rings"])
@settings(max_examples=30)
@given(branching_traffic(), st.integers(1, 4))
def test_rows_read_what_is_theirs(exact, case, snapshots):
    config, jobs, _ = case
    if exact:  # no state is taken back
        config = dataclasses.replace(config, speculation=None)
    engine = engine_of(config, [script for script, _, _ in jobs], snapshots, exact=exact)
    choose_by_length(engine)
    sequences = sequences_of(case)
    serve(engine, sequences, case, assert_accounted)
    assert_served(sequences, case)
