"""All programs of an engine: which exist, compiling them ahead of time, and finding one at run time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp

from inferlib.cache.plan import CachePlan
from inferlib.compile.programs import CHUNK_COLUMNS, MODES, ChunkInput, Mode, ProgramKey, build
from inferlib.compile.state import RowState
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.sharding import axes

log = logging.getLogger(__name__)


class UnplannedProgramError(RuntimeError):
    """A program outside the buckets, or one not compiled in strict mode, was asked for."""


class ProgramSet:
    """Programs by key, compiled at first use or by `compile_all`; in strict mode never at run time."""

    def __init__(self, model: AbstractModel, plan: CachePlan, config: EngineConfig):
        self.model, self.plan, self.config = model, plan, config
        self.strict = False
        self._compiled: dict[ProgramKey, Callable] = {}
        self._planned = frozenset(planned_keys(config))
        self._lock = threading.Lock()

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def require(self, mode: Mode) -> None:
        """In strict mode, raise UnplannedProgramError unless all programs of a sampling mode are compiled."""
        if self.strict and not all(key in self._compiled for key in self._planned if key.mode == mode):
            raise UnplannedProgramError(
                f"sampling mode {mode!r} was not compiled by warmup; add it to warmup(modes=...)"
            )

    def get(self, key: ProgramKey) -> Callable:
        """The compiled program of a key."""
        program = self._compiled.get(key)
        if program is not None:
            return program
        if key not in self._planned:
            raise UnplannedProgramError(f"no bucket holds '{key}'; buckets are {self.config.buckets}")
        if self.strict:
            raise UnplannedProgramError(f"'{key}' was not compiled by warmup")
        return self._compile(key)

    def compile_all(self, keys: Iterable[ProgramKey], done: Callable[[ProgramKey], None], threads: int = 2) -> None:
        """Compile the keys that are missing, side by side; `done` is called after each."""
        missing = [key for key in keys if key not in self._compiled]
        with ThreadPoolExecutor(threads) as pool:
            for key, _ in zip(missing, pool.map(self._compile, missing), strict=True):
                done(key)

    def _compile(self, key: ProgramKey) -> Callable:
        start = time.perf_counter()
        program = self.lower(key).compile()
        log.info("compiled '%s' in %.1f s", key, time.perf_counter() - start)
        with self._lock:
            return self._compiled.setdefault(key, program)

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Trace a key's program from shapes alone; cache and row state are donated."""
        function = jax.jit(build(self.model, self.plan, self.config, key), donate_argnums=(1, 2))
        return function.lower(*self.inputs(key))

    def inputs(self, key: ProgramKey) -> tuple:
        """Abstract arguments of a key's program."""
        config, shards = self.config, self.config.shards

        def struct(shape: tuple[int, ...], dtype, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=shards.sharding(names))

        weights = tuple(struct(spec.shape, spec.dtype, spec.axes) for spec in self.model.specs)
        cache = tuple(struct(b.shape, self.plan.dtype, b.axes) for b in self.plan.blocks for _ in "kv")
        state = jax.eval_shape(partial(RowState.zeros, config.max_batch, self.model.layout.vocab))
        state = RowState(*(struct(x.shape, x.dtype, n) for x, n in zip(state, RowState.AXES, strict=True)))
        by_row = (axes.ROWS, None)
        control = struct((shards.replicas, config.rows + 2), jnp.int32, by_row)
        if not key.chunks:
            return weights, cache, state, control
        p = key.chunks * shards.replicas
        chunk = ChunkInput(
            tokens=struct((p, key.chunk), jnp.int32, by_row),
            table=struct((p, len(CHUNK_COLUMNS)), jnp.int32, by_row),
            ints=struct((p, state.ints.shape[1]), jnp.int32, by_row),
            floats=struct((p, state.floats.shape[1]), jnp.float32, by_row),
        )
        return weights, cache, state, control, chunk


def planned_keys(config: EngineConfig, modes: Sequence[Mode] = MODES) -> list[ProgramKey]:
    """Every program the buckets allow, for these sampling modes.

    A prompt's log-probabilities come with the mode "logprobs", its logits with "greedy".
    """
    unknown = sorted(set(modes) - set(MODES))
    if unknown:
        raise ValueError(f"no sampling modes {unknown}; known: {', '.join(MODES)}")
    buckets, keys = config.buckets, []
    for mode in modes:
        for limit in buckets.cache:
            for rows in config.row_buckets:
                keys += [ProgramKey(mode, rows, limit, steps) for steps in {1, config.decode_steps}]
            for chunks, chunk in config.prefill_shapes():
                keys += [ProgramKey(mode, rows, limit, chunks=chunks, chunk=chunk) for rows in (0, config.rows)]
            detail = {"greedy": "logits", "logprobs": "logprobs"}.get(mode)
            if detail:
                keys += [ProgramKey(mode, 0, limit, chunks=1, chunk=chunk, detail=detail) for chunk in buckets.prefill]
    return keys
