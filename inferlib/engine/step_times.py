"""How long steps take, measured before the first request: for a target of the time between tokens.

What is measured are steps with full rows: every row decodes, and rows and prompts have as many positions in the cache
as it has room for, shared out evenly.

Shapes: R rows of each replica; P chunks of C tokens, see `ProgramKey`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.programs.arguments import CHUNK_COLUMNS, ChunkInput
from inferlib.programs.keys import Mode, ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.programs.row_state import STATE_AXES, RowState
from inferlib.sampling.sampler import pack
from inferlib.sharding import axes

Shape = tuple[int, int]  # (P, C)

_RUNS = 3  # of which the fastest counts


class StepTimes(NamedTuple):
    """Seconds of a step: of decoding, and by (P, C) of prefilling beside all rows."""

    decode: float
    mixed: dict[Shape, float]


def step_keys(config: EngineConfig, mode: Mode) -> tuple[ProgramKey, dict[Shape, ProgramKey]]:
    """The programs that `StepTimes` are of."""
    limit = config.limits[-1]
    shapes = config.prefill_shapes()
    mixed = {(p, c): ProgramKey(mode, config.rows, limit, chunks=p, chunk=c) for p, c in shapes}
    return ProgramKey(mode, config.rows, limit, config.decode_steps), mixed


def full_length(config: EngineConfig, plan: CachePlan) -> int:
    """Positions of each row if rows share out the cache."""
    each = plan.pages // config.shards.replicas * plan.page // config.rows
    most = config.limits[-1] if config.compacted is None else config.compacted.compacts_at
    return max(1, min(each, most) - config.decode_steps - 1)


def full_chunks(config: EngineConfig, shape: Shape, length: int) -> list[tuple[int, int, int]]:
    """(row, position of the first token, tokens) of each chunk of a step whose prompts have `length` tokens, or one
    chunk if that is more."""
    chunks, width = shape
    whole = max(min(chunks * width, length, config.row_tokens) // width * width, width)
    most = min(width, config.limits[-1])
    return [(i * width // whole % config.rows, i * width % whole, most) for i in range(chunks)]


class Rehearsal:
    """Runs programs on rows that no request has. The engine must be idle: it writes to the whole cache."""

    def __init__(self, programs: ProgramSet):
        self.programs, self.config, self.plan = programs, programs.config, programs.plan

    def times(
        self, mode: Mode, weights: Sequence[jax.Array], cache: Any, state: RowState
    ) -> tuple[Any, RowState, StepTimes]:
        """The cache and the state of rows, which are donated, and times of a mode whose programs are compiled."""
        decode, mixed = step_keys(self.config, mode)
        carry, seconds = (cache, state), {}
        for key in (decode, *mixed.values()):
            *carry, seconds[key] = self._seconds(key, weights, *carry)
        times = StepTimes(seconds[decode] / decode.steps, {shape: seconds[key] for shape, key in mixed.items()})
        cache, state = carry
        return cache, self._rows(state, active=False), times

    def _seconds(self, key: ProgramKey, weights, cache, state: RowState) -> tuple[Any, RowState, float]:
        program, best = self.programs.ready(key), float("inf")
        assert program is not None
        inputs = (self._control(), *([self._chunk(key)] if key.chunks else []))
        for _ in range(_RUNS):
            state = jax.block_until_ready(self._rows(state, active=True))
            start = time.perf_counter()
            cache, state, output = program(weights, cache, state, *inputs)
            jax.block_until_ready((output, state))
            best = min(best, time.perf_counter() - start)
        return cache, state, best

    def _rows(self, state: RowState, *, active: bool) -> RowState:
        """The state with all rows active, or none."""
        total = self.config.max_batch
        new = {
            "token": np.zeros(total, np.int32),
            "length": np.full(total, full_length(self.config, self.plan), np.int32),
            "active": np.full(total, active),
            "budget": np.full(total, self.config.decode_steps + 1, np.int32),
            "pages": np.concatenate([self._pages(i) for i in range(len(self.plan.level_columns))], axis=1),
        }
        if state.ahead is not None:
            least, *more = self.config.bounds
            new["ahead"] = np.tile(np.array(more, np.int32) - least, (total, 1))
        place = self.config.shards.place
        return state._replace(**{name: place(x, getattr(STATE_AXES, name)) for name, x in new.items()})

    def _pages(self, level: int) -> np.ndarray:
        """Pages of a level for the rows of all replicas, [R, M]."""
        plan, config = self.plan, self.config
        pages = plan.pages_of(level, config.shards.replicas) // config.shards.replicas
        first = np.arange(config.max_batch)[:, None] % config.rows * max(1, pages // config.rows)
        return ((first + np.arange(plan.columns_of(level))) % pages).astype(np.int32)

    def _control(self) -> jax.Array:
        shards = self.config.shards
        return shards.place(np.zeros((shards.replicas, self.config.rows + 1), np.int32), (axes.ROWS, None))

    def _chunk(self, key: ProgramKey) -> ChunkInput:
        """Prompts that go on after the step: nothing is sampled for them."""
        length, replicas = full_length(self.config, self.plan), self.config.shards.replicas
        table = np.zeros((key.chunks, len(CHUNK_COLUMNS)), np.int32)
        table[:, :3] = full_chunks(self.config, (key.chunks, key.chunk), length)
        table[:, CHUNK_COLUMNS.index("next")] = -1
        table[:, CHUNK_COLUMNS.index("generated")] = key.limit
        tokens = np.zeros((key.chunks, key.chunk), np.int32)
        arrays = [np.tile(x, (replicas, 1)) for x in (tokens, table, *pack([None] * key.chunks))]
        return ChunkInput(*(self.config.shards.place(x, (axes.ROWS, None)) for x in arrays))
