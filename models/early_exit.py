"""Tokens that leave a loop's core before its last step, as it hardly changes them any more (Geiping et al. 2025,
section 6).

A token leaves after the step that changes its state by less than its threshold, as a rule measures that (see
`inferlib.models.exit_rules`), or after as many steps as its row takes at most. Then its state stays as it is, and so do
its cells: tokens behind it that go on attend, at later steps, to those of its last one ("latest" in that code). Each
token of a prompt and of the output leaves by itself. As that depends on tokens before it alone, results depend on
neither the batch, nor how a prompt is cut.

A pass runs steps until all its tokens have left. Then the cells of further steps are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.depth import Taken
from inferlib.models.exit_rules import Rule
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.step_attention import StepPlan, write_cells
from inferlib.ops.loops import most_trips
from inferlib.sharding import axes


class Carry(NamedTuple):
    """number: steps that were run. state [T, D]; caches: of the core's blocks, with the cells of the last step. left
    [T] bool: tokens that take no more steps; taken [T]: how many each took."""

    number: jax.Array
    state: jax.Array
    caches: tuple[LayerCache, ...]
    left: jax.Array
    taken: jax.Array


class Left(NamedTuple):
    """What a core leaves behind."""

    state: jax.Array
    caches: tuple[LayerCache, ...]
    taken: Taken


@dataclass(frozen=True)
class EarlyExit:
    """step: (number, state, caches) -> (state, caches), a step of the core. depths [T]: most steps of each token;
    thresholds [T] float32: 0 where a token takes all of these. rule: what they are compared with."""

    step: Callable[..., tuple[jax.Array, tuple[LayerCache, ...]]]
    depths: jax.Array
    thresholds: jax.Array
    rule: Rule
    ctx: StepContext

    def __call__(self, state: jax.Array, caches: Sequence[LayerCache], most: jax.Array | int, steps: int) -> Left:
        """Run the core. most: as many steps as any row takes, of `steps`."""
        absent = self.ctx.written < 0
        begun = Carry(jnp.int32(0), state, tuple(caches), absent, jnp.zeros(absent.shape, jnp.int32))
        shapes = jax.eval_shape(self.after_step, begun).caches
        with_cells = tuple(
            replace(cache, former=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape.former))
            for cache, shape in zip(caches, shapes, strict=True)
        )
        with most_trips(steps):
            ended = lax.while_loop(self.goes_on, self.after_step, begun._replace(caches=with_cells))
        filled = lax.fori_loop(ended.number, most, self.filled, ended.caches)
        caches = tuple(replace(cache, former=None) for cache in filled)
        return Left(ended.state, caches, Taken(self.counts(ended), ended.taken))

    def counts(self, ended: Carry) -> jax.Array:
        """See `Taken`. Devices that prompts are dealt out to have the same decode rows."""
        ctx, first = self.ctx, self.ctx.shards.index(axes.TOKENS) == 0
        there = (ctx.written >= 0) & ((jnp.arange(ctx.tokens) < ctx.batch.chunk_tokens.size) | first)
        passes = jnp.where(first, jnp.stack([jnp.int32(1), ended.number]), 0)
        tokens = jnp.stack([there.sum(dtype=jnp.int32), jnp.where(there, ended.taken, 0).sum(dtype=jnp.int32)])
        return jnp.concatenate([passes, tokens])

    def goes_on(self, carry: Carry) -> jax.Array:
        """Whether any token of any device takes another step; the devices stay in step."""
        more, shards = jnp.any(~carry.left).astype(jnp.int32), self.ctx.shards
        return shards.max(shards.max(more, axes.ROWS), axes.TOKENS) > 0

    def after_step(self, carry: Carry) -> Carry:
        number, state, caches, left, taken = carry
        new, caches = self.step(number, state, tuple(replace(cache, left=left) for cache in caches))
        leaves = (self.rule(state, new) < self.thresholds) | (number + 1 >= self.depths)
        state = jnp.where(left[:, None], state, new)
        caches = tuple(replace(cache, left=None) for cache in caches)
        return Carry(number + 1, state, caches, left | leaves, taken + ~left)

    def filled(self, number: jax.Array, caches: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        """The caches whose step `number` has the cells of the last step."""
        return tuple(replace(self.written(replace(cache, layer=number)), layer=None) for cache in caches)

    def written(self, cache: LayerCache) -> LayerCache:
        """The cache whose current layer has the former cells: of chunks, written as attention writes them, and rows."""
        ctx, former, stripe = self.ctx, cache.former, self.ctx.shards.stripe(axes.POSITIONS)
        assert former is not None
        count = ctx.batch.chunk_tokens.size
        plan = StepPlan(stripe, rows_write=False, chunks_in_place=False, run=former.run, chunk_writer=former.writer)
        cache = write_cells([x[:count] for x in former.cells], cache, ctx, plan)
        if count == ctx.tokens:
            return cache
        rows = [x[count:] for x in former.cells]
        return cache.write(rows, ctx.rows[count:], ctx.written[count:], stripe, ctx.table)
