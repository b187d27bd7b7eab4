"""The core of a looped model: layers that run several times with the same weights (see `LoopSpec`).

Before each step, the prelude's output e is injected into the state h. What an injection makes of e alone is the same at
every step, so it is computed once. The first state of a position is always the same, drawn from the position's number:
results depend on neither the batch, nor how a prompt is cut, nor what is cached of it. Rows may take fewer steps than
others: their states stay as they are after these, and what the core makes of them then is not read. Tokens may leave
earlier than others of their row, see `inferlib.models.early_exit`.

Shapes: T tokens; D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.blocks import Block
from inferlib.models.config import LoopSpec, ModelConfig
from inferlib.models.depth import Taken
from inferlib.models.early_exit import EarlyExit
from inferlib.models.exit_rules import rule_of
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.run_segment import Ran, run_segment
from inferlib.models.segments import Segment
from inferlib.models.stream import Residual
from inferlib.ops import on_chip
from inferlib.ops.loops import most_trips
from inferlib.sharding import axes

# The beginnings of names of weights that every step reads, beside those of the core.
EACH_STEP = ("loop.injection.", "loop.state_norm.")
MATRICES = ("loop.input", "loop.injection.state", "loop.exit")  # names of the matrices around the core


class Loop(nnx.Module):
    """The core's steps, from the prelude's output to the coda's input. final_norm: that of the model, which has its
    weights."""

    def __init__(self, spec: LoopSpec, config: ModelConfig, final_norm: Norm, dtype):
        self.spec, self.dim, self.dtype = spec, config.dim, dtype
        # Errors of these weights would add up over the steps, so they are not quantised.
        shape, names = (config.dim, config.dim), (axes.STREAMS, axes.EMBED)
        if spec.entry_norm:
            self.entry_norm = Norm(config.norm, config.dim, dtype)
        if spec.injection != "add":
            self.input = param(shape, names, dtype)
        self.injection = _INJECTIONS[spec.injection](config.dim, dtype)
        if spec.state_norm:
            self.state_norm = Norm(config.norm, config.dim, dtype)
        self.exit = param(shape, names, dtype) if spec.exit == "linear" else final_norm

    def __call__(
        self,
        segment: Segment,
        blocks: Sequence[Block],
        residual: Residual,
        ctx: StepContext,
        caches: Sequence[LayerCache],
        inputs: jax.Array | None,
        traced: dict,
        *,
        logits: Callable[[jax.Array], jax.Array],
    ) -> Ran:
        """Run the core; see `run_segment`. The caches hold the cells of each step, as those of stacked layers do.

        logits: [T, V] float32 of hidden states [T, D], see `Divergence`.
        """
        injected, once = self.injected(residual.x, ctx), self.spec.steps == 1
        blocks = blocks if once else self.core_blocks(blocks, ctx)

        def step(number, state, caches):
            at = [replace(cache, layer=None if once else number) for cache in caches]
            with jax.named_scope("injection"):
                x = self.injection(state, injected, ctx)
            ran = run_segment(segment, blocks, replace(residual, x=x), ctx, at, inputs, {})
            return self.state(ran.residual.x, ctx), tuple(ran.caches)

        state, caches, taken = self.repeated(step, ctx, caches, logits)
        return Ran(replace(residual, x=self.outputs(state, ctx)), list(caches), [], {}, taken)

    def core_blocks(self, blocks: Sequence[Block], ctx: StepContext) -> list[Block]:
        """The core's blocks, whose weights the steps read where it takes least time."""
        graphs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
        states = on_chip.loop_weights(states, ctx.tokens, ctx.backend)
        return [nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True)]

    def repeated(
        self, step: Callable, ctx: StepContext, caches: Sequence[LayerCache], logits: Callable
    ) -> tuple[jax.Array, tuple[LayerCache, ...], Taken | None]:
        """The states after each token's last step, the caches, and what tokens took if they may leave. step: see
        `EarlyExit`."""
        state, most, steps, depths = self.first_state(ctx), self.steps(ctx), self.spec.steps, ctx.depths
        if depths is not None and depths.thresholds is not None and ctx.config.exits_early:
            rule = rule_of(self.spec.early_exit, partial(self.outputs, ctx=ctx), logits, ctx.shards)
            leaving = EarlyExit(step, depths.of(ctx.rows, steps), depths.thresholds_of(ctx.rows), rule, ctx)
            return leaving(state, caches, most, steps)
        taken = None if depths is None else depths.of(ctx.rows, steps)[:, None]

        def frozen(number, carry):
            state, caches = carry
            new, caches = step(number, state, caches)
            return new if taken is None else jnp.where(number < taken, new, state), caches

        # The cache is carried: as an input and output of the loop it would exist twice.
        with most_trips(steps):
            return *lax.fori_loop(0, most, frozen, (state, tuple(caches))), None

    def steps(self, ctx: StepContext) -> jax.Array | int:
        """How many steps a pass runs: as many as any of its rows takes, on whatever replica."""
        batch, depths = ctx.batch, ctx.depths
        if depths is None or depths.whole:
            return self.spec.steps
        rows = jnp.concatenate([batch.chunk_rows, jnp.arange(batch.decode_lengths.size, dtype=jnp.int32)])
        there = jnp.concatenate([batch.chunk_lengths, batch.decode_lengths]) > 0
        most = jnp.max(jnp.where(there, depths.of(rows, self.spec.steps), 0), initial=0)
        return ctx.shards.max(most, axes.ROWS)

    def injected(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        """What every step injects of the prelude's output [T, D]."""
        with jax.named_scope("injection"):
            e = self.entry_norm(x, ctx.shards) if self.spec.entry_norm else x
            return e if self.spec.injection == "add" else ctx.matmul(e, self.input[...])

    def first_state(self, ctx: StepContext) -> jax.Array:
        """[T, D] before the first step: numbers within three standard deviations, by the positions of the tokens."""
        if not self.spec.state_std:
            return jnp.zeros((ctx.tokens, self.dim), self.dtype)
        seed = jax.random.key(0, impl="threefry2x32")

        def draw(position: jax.Array) -> jax.Array:
            return jax.random.truncated_normal(jax.random.fold_in(seed, position), -3.0, 3.0, (self.dim,))

        return (self.spec.state_std * jax.vmap(draw)(jnp.maximum(ctx.positions, 0))).astype(self.dtype)

    def state(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        """The state [T, D] after a step, of the core's output."""
        return self.state_norm(x, ctx.shards) if self.spec.state_norm else x

    def outputs(self, state: jax.Array, ctx: StepContext) -> jax.Array:
        """The coda's input [T, D], of the state after the last step."""
        if isinstance(self.exit, Norm):
            return self.exit(state, ctx.shards)
        return ctx.matmul(state, self.exit[...])


class DiagonalInjection(nnx.Module):
    """exp(-d exp(A)) h + d (B e) with d = softplus(b): each channel of h fades, whatever its weights are, so that the
    state stays bounded (Prairie et al. 2026, "Parcae"). Computed in float32, as a fading multiplies at every step."""

    def __init__(self, dim: int, dtype):
        self.decay = param((dim,), (axes.EMBED,), dtype, "zeros")  # A
        self.step = param((dim,), (axes.EMBED,), dtype, "zeros")  # b

    def __call__(self, h: jax.Array, injected: jax.Array, ctx: StepContext) -> jax.Array:
        step = jax.nn.softplus(self.step[...].astype(jnp.float32))
        fading = jnp.exp(-step * jnp.exp(self.decay[...].astype(jnp.float32)))
        return (fading * h + step * injected).astype(h.dtype)


class LinearInjection(nnx.Module):
    """W [h, e], of which W's second half has been multiplied by e."""

    def __init__(self, dim: int, dtype):
        self.state = param((dim, dim), (axes.STREAMS, axes.EMBED), dtype)

    def __call__(self, h: jax.Array, injected: jax.Array, ctx: StepContext) -> jax.Array:
        return ctx.matmul(h, self.state[...]) + injected


class AdditiveInjection(nnx.Module):
    """h + e."""

    def __init__(self, dim: int, dtype):
        pass

    def __call__(self, h: jax.Array, injected: jax.Array, ctx: StepContext) -> jax.Array:
        return h + injected


_INJECTIONS = {"diagonal": DiagonalInjection, "linear": LinearInjection, "add": AdditiveInjection}
