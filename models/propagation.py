"""A step whose later layers see fewer tokens of prompts (see `inferlib.ops.token_propagation`).

The step has P chunks of C tokens, each a segment of its prompt, and decode rows. Behind the selecting layer K tokens of
each chunk go on, and all decode rows do. So the later layers run a step of P chunks of K tokens: a second static shape.
Their cells are numbered without those that a row lacks, in the same pages, and rotated by the tokens' positions. What
is behind the last layer has the places of all tokens again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.attention_values import AttentionOptions
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.blocks import Block
from inferlib.models.config import AttentionSpec
from inferlib.models.layers.attention import Attention
from inferlib.models.stream import Residual
from inferlib.ops.token_propagation import chosen_tokens, saliency
from inferlib.sharding import axes


@dataclass(frozen=True)
class Propagated:
    """The part of a step that goes on.

    ctx: the step as the later layers see it. tokens: T, of the whole step. numbers [T']: which of them these are, T for
    padding; None: all.
    """

    ctx: StepContext
    tokens: int
    numbers: jax.Array | None = None

    def residual(self, residual: Residual) -> Residual:
        """The residual of the tokens that go on."""
        if self.numbers is None:
            return residual
        deferred = residual.deferred
        deferred = None if deferred is None else _taken(deferred, self.numbers)
        return replace(residual, x=_taken(residual.value, self.numbers), pending=None, deferred=deferred)

    def restored(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [T', D] at the places of all tokens, [T, D]; 0 for those that did not go on."""
        if self.numbers is None:
            return hidden
        return jnp.zeros((self.tokens, hidden.shape[1]), hidden.dtype).at[self.numbers].set(hidden, mode="drop")


def propagate(block: Block, residual: Residual, ctx: StepContext) -> Propagated:
    """What goes on behind the selecting layer. block: that layer, of attention to all positions. residual: the one
    before it, of which its queries and keys are made once more; XLA shares the products."""
    how, batch, rows = ctx.propagation, ctx.batch, ctx.batch.decode_lengths
    assert how is not None
    assert ctx.skipped is not None
    live = jnp.where(rows > 0, rows - ctx.skipped[: rows.size], rows)
    count, width = batch.chunk_tokens.shape
    if not count * width:
        return Propagated(_later(ctx, batch._replace(decode_lengths=live), ctx.positions), ctx.tokens)
    assert how.segment is not None
    chosen, counts = _chosen(block, residual, ctx)
    most = chosen.shape[1]
    numbers = jnp.where(chosen < width, chosen + width * jnp.arange(count, dtype=jnp.int32)[:, None], ctx.tokens)
    numbers = jnp.concatenate([numbers.reshape(-1), jnp.arange(count * width, ctx.tokens, dtype=jnp.int32)])
    later = batch._replace(
        chunk_tokens=jnp.take_along_axis(batch.chunk_tokens, chosen, axis=1, mode="clip"),
        chunk_starts=batch.chunk_starts // how.segment * how.count(how.segment),
        chunk_lengths=counts,
        decode_lengths=live,
    )
    run = None if ctx.run is None else math.gcd(ctx.run, how.count(how.segment), most)
    counted = None if ctx.counted is None else _taken(ctx.counted, numbers)
    ctx_of_later = _later(replace(ctx, run=run, counted=counted), later, _taken(ctx.positions, numbers))
    return Propagated(ctx_of_later, ctx.tokens, numbers)


def _later(ctx: StepContext, batch: StepBatch, positions: jax.Array) -> StepContext:
    """The step of a batch whose cells are numbered otherwise than its tokens' positions [T']."""
    ctx = replace(ctx, batch=batch)
    vars(ctx)["positions"] = positions
    return ctx


def _chosen(block: Block, residual: Residual, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
    """The places [P, K] of the tokens of each chunk that go on, see `chosen_tokens`, and how many [P] these are."""
    how, (count, width), spec = ctx.propagation, ctx.batch.chunk_tokens.shape, block.spec.attention
    assert how is not None
    assert isinstance(spec, AttentionSpec)
    lengths = ctx.batch.chunk_lengths
    with jax.named_scope("token_propagation"):
        y = block.pre_attn_norm.read(residual, ctx.shards)[1] if block.spec.pre_norm else residual.value
        q, (k, _) = block.attn.project(y, ctx)
        q, k = (x[: count * width].reshape(count, width, *x.shape[1:]) for x in (q, k))
        options, heads = AttentionOptions(spec.scale, softcap=spec.softcap), _heads(block.attn, ctx)
        scores = ctx.shards.sum(saliency(q, k, lengths, options, heads), axes.KV_HEADS)
        counts = how.count(lengths)
        return chosen_tokens(scores, lengths, counts, how.count(width)), counts


def _taken(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """x [T, ...] of these tokens; of tokens that are not there, any."""
    return jnp.take(x, numbers, axis=0, mode="clip")


def _heads(attention: Attention, ctx: StepContext) -> jax.Array | None:
    """Which of this device's heads [K, G] are the model's, where some of them pad the layout; else None."""
    there = np.array(attention.layout.source)[:, : attention.layout.queries] >= 0
    if there.all():
        return None
    count = len(there) // ctx.shards.size(axes.KV_HEADS)
    return lax.dynamic_slice_in_dim(jnp.array(there), ctx.shards.index(axes.KV_HEADS) * count, count)
