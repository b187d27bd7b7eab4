"""Rows at different steps of a loop's core in one batch: continuous depth-wise batching (Bae et al. 2024, "Relaxed
Recursive Transformers"; Bae et al. 2025, "Mixture-of-Recursions").

Every step of the core has the same weights, so rows share a pass over them wherever each of them is. Only the cells
differ: a row at step n writes and reads those of step n. Seen as one pool, [L * N, ...] for [L, N, ...], they lie n * N
pages further, so a row's number is added to its pages, and neither attention nor kernels know of it.

`inferlib.models.early_exit` says when tokens leave the core, and what the cells of the steps are that they leave out.

Shapes: B rows; L steps; N pages; D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepContext
from inferlib.models.blocks import Block
from inferlib.models.decoder import Decoder
from inferlib.models.exit_rules import Rule, rule_of
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.run_segment import run_segment
from inferlib.models.segments import Segment
from inferlib.models.stream import Residual
from inferlib.ops.cache_write import cache_write
from inferlib.sharding import axes

Caches = tuple[LayerCache, ...]


class StageCaches(NamedTuple):
    """The caches of the blocks of each part of a looped model. core: with the pages of all steps in one pool."""

    prelude: Caches
    core: Caches
    coda: Caches


class Inside(NamedTuple):
    """What rows have within the core, [B, D] each: the state, and what every step injects."""

    state: jax.Array
    injected: jax.Array


@dataclass(frozen=True)
class Stages:
    """The parts of a looped model, each run by itself, for decode rows of one token each.

    Contexts are of all B rows; those that a part is not run for are inactive in them. core: its blocks as its steps
    read them, see `Loop.core_blocks`; None: as they are.
    """

    decoder: Decoder
    core: Sequence[Block] | None = None

    def with_core(self, ctx: StepContext) -> Stages:
        """These stages, whose core runs steps of such a context."""
        return replace(self, core=self.decoder.loop.core_blocks(self._part(1)[1], ctx))

    @property
    def steps(self) -> int:
        """L."""
        return self.decoder.loop.spec.steps

    def split(self, caches: Caches) -> StageCaches:
        """The caches of the model's blocks by parts."""
        first, last = self._core
        core = tuple(_with_arrays(cache, [_pooled(x) for x in cache.arrays]) for cache in caches[first:last])
        return StageCaches(caches[:first], core, caches[last:])

    def joined(self, caches: StageCaches) -> Caches:
        """The caches of all blocks in order, as `split` takes them."""
        apart = [x.reshape(self.steps, -1, *x.shape[1:]) for cache in caches.core for x in cache.arrays]
        arrays = iter(apart)
        core = tuple(_with_arrays(cache, [next(arrays) for _ in cache.arrays]) for cache in caches.core)
        return caches.prelude + core + caches.coda

    def prelude(self, ctx: StepContext, caches: StageCaches) -> tuple[Inside, StageCaches]:
        """What the core begins with."""
        self.decoder.compute_shared(ctx)
        x, _ = self.decoder.inputs(ctx)
        (segments, blocks), loop = self._part(0), self.decoder.loop
        x, new = _through(segments, blocks, x, ctx, caches.prelude)
        return Inside(loop.first_state(ctx), loop.injected(x, ctx)), caches._replace(prelude=new)

    def step(
        self, ctx: StepContext, caches: StageCaches, inside: Inside, numbers: jax.Array
    ) -> tuple[jax.Array, StageCaches]:
        """The states [B, D] after a step of the core, of which each row takes its own. numbers [B]: how many steps each
        row has taken."""
        ctx = self._at_steps(ctx, caches, numbers)
        self.decoder.compute_shared(ctx)
        with jax.named_scope("injection"):
            x = self.decoder.loop.injection(inside.state, inside.injected, ctx)
        x, new = _through(*self._part(1), x, ctx, caches.core)
        return self.decoder.loop.state(x, ctx), caches._replace(core=new)

    def coda(self, ctx: StepContext, caches: StageCaches, state: jax.Array) -> tuple[jax.Array, StageCaches]:
        """Hidden states [B, D], as `Decoder` gives them, of the states [B, D] after the core."""
        self.decoder.compute_shared(ctx)
        x, new = _through(*self._part(2), self.decoder.loop.outputs(state, ctx), ctx, caches.coda)
        return self.decoder.outputs(Residual(x), ctx), caches._replace(coda=new)

    def filled(self, ctx: StepContext, caches: StageCaches, taken: jax.Array, most: jax.Array) -> StageCaches:
        """The caches in which each row's token has the cells of its last step in all steps from `taken` [B] to `most`
        [B] too. They are copied as they are stored."""
        core = []
        for cache in caches.core:
            each, slots = cache.pages // self.steps, cache.slots
            pages, at = cache.places(ctx.rows, ctx.written, ctx.shards.stripe(axes.POSITIONS), ctx.table)
            last = jnp.minimum(at, slots - 1)[:, None]
            source = (pages + (taken - 1) * each)[:, None]
            number = jnp.arange(self.steps, dtype=jnp.int32)[:, None]
            there = (number >= taken) & (number < most) & (at < slots)  # [L, B]
            none = slots + jnp.arange(there.size, dtype=jnp.int32)  # slots that do not exist differ, as indices must
            to = (pages + number * each).reshape(-1), jnp.where(there, at, none.reshape(there.shape)).reshape(-1)
            arrays = []
            for x in cache.arrays:
                cells = x[source, jnp.arange(x.shape[1], dtype=jnp.int32), last]
                every = jnp.broadcast_to(cells, (self.steps, *cells.shape)).reshape(-1, *cells.shape[1:])
                arrays.append(cache_write(x, every, *to))
            core.append(_with_arrays(cache, arrays))
        return caches._replace(core=tuple(core))

    def rule(self, ctx: StepContext) -> Rule:
        """The rule by which tokens leave the core."""
        loop = self.decoder.loop
        return rule_of(loop.spec.early_exit, partial(loop.outputs, ctx=ctx), self.decoder.logits_in(ctx), ctx.shards)

    def _at_steps(self, ctx: StepContext, caches: StageCaches, numbers: jax.Array) -> StepContext:
        """The context in which each row has the pages of its own step."""
        assert ctx.table is not None
        each = caches.core[0].pages // self.steps
        return replace(ctx, table=ctx.table[: numbers.size] + numbers[:, None] * each)

    @property
    def _core(self) -> tuple[int, int]:
        """The numbers of the core's first block, and of the first behind it."""
        at = 0
        for segment in self.decoder.segments:
            if segment.looped:
                return at, at + len(segment.pattern)
            at += len(segment.pattern)
        raise ValueError("a model without a loop has no parts")

    def _part(self, number: int) -> tuple[Sequence[Segment], Sequence[Block]]:
        """The segments and the blocks of the prelude, the core or the coda."""
        segments, blocks, (first, last) = self.decoder.segments, list(self.decoder.blocks), self._core
        at = next(i for i, segment in enumerate(segments) if segment.looped)
        return (
            (segments[:at], segments[at : at + 1], segments[at + 1 :])[number],
            (blocks[:first], self.core or blocks[first:last], blocks[last:])[number],
        )


def _through(
    segments: Sequence[Segment], blocks: Sequence[Block], x: jax.Array, ctx: StepContext, caches: Caches
) -> tuple[jax.Array, Caches]:
    """The residual behind these segments, and their caches."""
    residual, new, at, traced = Residual(x), [], 0, {}
    for segment in segments:
        end = at + len(segment.pattern)
        ran = run_segment(segment, blocks[at:end], residual, ctx, caches[at:end], None, traced)
        residual, at = ran.residual, end
        new += ran.caches
    return residual.x, tuple(new)


def _with_arrays(cache: LayerCache, arrays: Sequence[jax.Array]) -> LayerCache:
    return replace(cache, arrays=tuple(arrays))


def _pooled(x: jax.Array) -> jax.Array:
    """[L, N, ...] -> [L * N, ...]."""
    return x.reshape(-1, *x.shape[2:])
