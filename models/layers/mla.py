"""Multi-head latent attention (MLA; DeepSeek-AI 2024, "DeepSeek-V2")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.config import MlaSpec
from inferlib.models.layers.attention import scale_by_temperature
from inferlib.models.layers.kv_cache import LayerCache, widened
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.param import OfStack, param
from inferlib.models.layers.rope import apply_rope
from inferlib.models.layers.step_attention import (
    Arrays,
    Attended,
    ChunkPlaces,
    RowQueries,
    StepPlan,
    attend,
    limit_of,
)
from inferlib.models.layout import HeadLayout
from inferlib.ops import mla_decode_attention as mla_decode
from inferlib.ops import mla_prefill_attention as mla_prefill
from inferlib.ops import mla_queries as mla_queries_op
from inferlib.ops.choice import Choice
from inferlib.ops.kv_cache import NewCells
from inferlib.ops.matmul import Activations
from inferlib.ops.mla_prefill_attention import Expansion
from inferlib.ops.mla_queries import mla_queries
from inferlib.ops.precision import precision_of
from inferlib.sharding import axes
from inferlib.sharding.stripe import Stripe


class Mla(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads, without `o_bias`.

    The cache stores each token's latent [R], normed, and its rotary key [r]. All heads share both; zeros pad them where
    the cache's plan has larger cells. Prefill expands them to the keys [n + r] and values [v] of each head. Decoding
    takes the queries to the latents' space instead, and the output back, so that it reads each latent once for all
    heads. H heads as laid out (see `HeadLayout`).
    """

    def __init__(self, spec: MlaSpec, layout: HeadLayout, dim: int, dtype):
        self.spec = spec
        heads, rank, n, v = layout.groups, spec.kv_rank, spec.nope_dim, spec.value_dim
        # One matrix for the latent of queries, the latent of keys and values, and the rotary key: one launch reads x
        # once.
        self.down = param((dim, spec.latent_dim), (axes.EMBED, axes.LATENT), dtype, contracting=(0,))
        if spec.latent_bias:
            self.down_bias = param((spec.latent_dim,), (axes.LATENT,), dtype, "zeros")
        if spec.q_rank:
            self.q_norm = param((spec.q_rank,), (axes.LATENT,), dtype, "ones")
        source = (spec.q_rank, axes.LATENT) if spec.q_rank else (dim, axes.EMBED)
        names = (source[1], axes.KV_HEADS, axes.HEAD_DIM)
        self.q = param((source[0], heads, n + spec.rope.dim), names, dtype, contracting=(0,))
        self.kv_norm = param((rank,), (axes.LATENT,), dtype, "ones")
        self.k = param((heads, n, rank), (axes.KV_HEADS, axes.HEAD_DIM, axes.LATENT), dtype)
        self.v = param((heads, rank, v), (axes.KV_HEADS, axes.LATENT, axes.HEAD_DIM), dtype)
        self.o = param((heads, v, dim), (axes.KV_HEADS, axes.HEAD_OUT, axes.EMBED), dtype, contracting=(0, 1))
        if spec.o_bias:
            self.o_bias = param((dim,), (axes.EMBED,), dtype, "zeros")

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, down = self.project(x, ctx)
        if self.fuses(q, ctx, cache):
            angles = ctx.rope[self.spec.rope]
            *absorbed, latent, key = mla_queries(q, down, self.kv_norm[...], self.k[...], *angles, self.spec.eps)
            out, cache = self.attend(q, (latent, key), cache, ctx, absorbed)
        else:
            q, latent, key = self.rotated(q, down, ctx)
            out, cache = self.attend(q, (latent[:, None], key[:, None]), cache, ctx)
        return ctx.matmul(out[:, :, 0], self.o[...], contract=2), cache

    def fuses(self, q: jax.Array, ctx: StepContext, cache: LayerCache) -> bool:
        """True if one kernel makes the step's decode queries and new cells from their projections."""
        spec = self.spec
        if not spec.rotates or spec.temperature is not None or spec.latent_scale != 1.0 or not _alone(ctx):
            return False
        backend = choose_decode(spec, ctx, cache).name
        if backend not in mla_decode.WRITING:
            return False
        return mla_queries_op.choose(q, self.k[...], ctx.rope[spec.rope][0], backend).name == backend

    def project(self, x: Activations, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        """Queries [T, H, n + r], not rotated, and the projection to latents and rotary key [T, `spec.latent_dim`]."""
        spec, rank = self.spec, self.spec.q_rank
        down = ctx.shards.sum(ctx.matmul(x, self.down[...]), axes.EMBED)
        if spec.latent_bias:
            down = down + self.down_bias[...]
        if rank:
            return ctx.matmul(rms_norm(down[:, :rank], self.q_norm[...], spec.eps), self.q[...]), down
        return ctx.shards.sum(ctx.matmul(x, self.q[...]), axes.EMBED), down

    def rotated(self, q: jax.Array, down: jax.Array, ctx: StepContext) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [T, H, n + r], the normed latent [T, R], and the rotary key [T, r], from the results of `project`;
        rotated, if the layer has positions."""
        spec, n, rank = self.spec, self.spec.nope_dim, self.spec.q_rank or 0
        latent, key = down[:, rank : rank + spec.kv_rank], down[:, rank + spec.kv_rank :]
        if spec.rotates:
            angles = ctx.rope[spec.rope]
            q = jnp.concatenate([q[..., :n], apply_rope(q[..., n:], *angles)], axis=-1)
            key = apply_rope(key, *angles)
        latent = rms_norm(latent, self.kv_norm[...], spec.eps)
        latent = latent if spec.latent_scale == 1.0 else latent * jnp.asarray(spec.latent_scale, latent.dtype)
        return scale_by_temperature(q, spec.temperature, ctx), latent, key

    def attend(
        self,
        q: jax.Array,
        new: Sequence[jax.Array],
        cache: LayerCache,
        ctx: StepContext,
        absorbed: Sequence[jax.Array] | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """The attention of all tokens [T, H, 1, v], and the cache with their cells, latents [T, 1, R] and rotary keys
        [T, 1, r]. Where the inputs of the output projection are split over devices, it is this device's part of v.

        absorbed: the results of `LatentStep.absorb` for a step of decode rows alone, if they are known.
        """
        step = LatentStep(self.spec, ctx, q, self.k, self.v, absorbed)
        return attend(step, step.plan(cache), new, cache)


def _alone(ctx: StepContext) -> bool:
    """True if a step is of decode rows of one token each."""
    return not ctx.batch.chunk_tokens.size and ctx.batch.decode_tokens.shape[1] == 1


def choose_decode(spec: MlaSpec, ctx: StepContext, cache: LayerCache) -> Choice:
    backend = ctx.backend.decode_attention
    return mla_decode.choose(spec.kv_rank, spec.rope.dim, backend, scaled=cache.scaled)


@dataclass(frozen=True)
class LatentStep:
    """Latent attention in one step. queries [T, H, n + r]; k, v: the layer's parameters that expand latents; absorbed:
    the queries of decode rows in the latents' space, if they are known."""

    spec: MlaSpec
    ctx: StepContext
    queries: jax.Array
    k: nnx.Param
    v: nnx.Param
    absorbed: Sequence[jax.Array] | None

    @cached_property
    def stripe(self) -> Stripe:
        """This device's positions."""
        return self.ctx.shards.stripe(axes.POSITIONS)

    @property
    def decoded(self) -> tuple[int, int]:
        """Decode rows, and tokens of each."""
        rows, count = self.ctx.batch.decode_tokens.shape
        return rows, count

    def choose_prefill(self, cache: LayerCache) -> Choice:
        spec, backend = self.spec, self.ctx.backend.prefill_attention
        return mla_prefill.choose(spec.kv_rank, spec.rope.dim, backend, scaled=cache.scaled)

    def plan(self, cache: LayerCache) -> StepPlan:
        alone = cache.layer is None and self.ctx.shards.size(axes.POSITIONS) == 1
        alone = alone and self.decoded[1] == 1
        return StepPlan(
            self.stripe,
            rows_write=alone and self.choose_decode(cache).name in mla_decode.WRITING,
            chunks_in_place=self.choose_prefill(cache).name in mla_prefill.IN_PLACE,
        )

    def choose_decode(self, cache: LayerCache) -> Choice:
        """The implementation for the step's decode rows."""
        of_rows, choice = self.row_queries(cache), choose_decode(self.spec, self.ctx, cache)
        if len(of_rows.shape) == 1 or choice.name == "xla":  # for one token, `program_set` has asked what follows
            return choice
        q, cells = (*of_rows.shape, self.queries.shape[1], sum(cache.sizes)), cache.latents(pages=of_rows.pages)
        return mla_decode.choose_for(jax.ShapeDtypeStruct(q, self.queries.dtype), cells, choice.name)

    def row_queries(self, cache: LayerCache) -> RowQueries:
        """The queries of decode rows."""
        table, (rows, _) = cache.table_of(self.ctx.table, limit_of(self.ctx, self.stripe)), self.decoded
        return RowQueries.of(self.ctx, self.stripe, None if table is None else table[:rows])

    def chunks(self, cache: LayerCache, arrays: Arrays, places: ChunkPlaces, stripe: Stripe, which: slice) -> Attended:
        """See `step_attention.LayerStep`."""
        ctx, backend = self.ctx, self.choose_prefill(cache).name
        shape = ctx.batch.chunk_tokens.shape
        queries = widened(self.queries[: math.prod(shape)], self.spec.nope_dim + cache.sizes[1])
        queries = queries.reshape(*shape, *queries.shape[1:])[which]
        expansion = Expansion(self.k[...], self.v[...])
        if backend in mla_prefill.IN_PLACE and isinstance(stacked := self.k.get_value(), OfStack):
            expansion = Expansion(stacked.stack, self.v.get_value().stack, stacked.layer)
        numbers = stripe.number(ctx.chunk_positions[which])
        cells = cache.latents(arrays, limit_of(ctx, stripe), places.table)
        out, lse = mla_prefill.mla_prefill_attention(
            queries, expansion, cells, places.rows, numbers, scale=self.spec.scale, backend=backend
        )
        return out[:, :, :, None], lse[..., None]

    def rows(self, cache: LayerCache, new: Sequence[jax.Array] | None) -> tuple[Attended, LayerCache]:
        """See `step_attention.LayerStep`."""
        ctx, (shape, lengths, pages), limit = self.ctx, self.row_queries(cache), limit_of(self.ctx, self.stripe)
        backend = self.choose_decode(cache).name
        in_place = backend in mla_decode.IN_PLACE or cache.table_of(ctx.table, limit) is not None
        arrays = cache.arrays if in_place else cache.read(self.decoded[0], limit)
        queries = self.absorbed or self.absorb(self.queries[math.prod(ctx.batch.chunk_tokens.shape) :])
        q, rotary = (widened(part, size) for part, size in zip(queries, cache.sizes, strict=True))
        q, rotary = (x.reshape(*shape, *x.shape[1:]) for x in (q, rotary))
        cells, writes = cache.latents(arrays, limit, pages), None if new is None else NewCells(new)
        out, lse, cells = mla_decode.mla_decode_attention(
            q, rotary, cells, lengths, scale=self.spec.scale, new=writes, backend=backend
        )
        out, lse = (x.reshape(-1, *x.shape[len(shape) :]) for x in (out, lse))
        attended = self.values(out[..., : self.spec.kv_rank])[:, :, None], lse[..., None]
        return attended, cache if new is None else replace(cache, arrays=cells.arrays)

    def absorb(self, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [B, H, n + r] -> [B, H, R] and [B, H, r]. The products of these two with a latent and with its rotary
        key add up to the product of the query with the expanded key."""
        n = self.spec.nope_dim
        return jnp.moveaxis(_dot(q[..., :n], self.k[...], ((2,), (1,)), ((1,), (0,))), 0, 1), q[..., n:]

    def values(self, out: jax.Array) -> jax.Array:
        """Attention's output in the latents' space [B, H, R] -> [B, H, v]. This is linear, so the parts of striped
        positions may be merged after it."""
        return jnp.moveaxis(_dot(out, self.v[...], ((2,), (1,)), ((1,), (0,))), 0, 1)


def _dot(x: jax.Array, w: jax.Array, contract, batch=((), ())) -> jax.Array:
    return lax.dot_general(x, w, (contract, batch), precision_of(x.dtype), preferred_element_type=x.dtype)
