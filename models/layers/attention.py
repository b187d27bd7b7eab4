"""Grouped-query attention over the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import AttentionSpec, NormSpec
from inferlib.models.layers.dealt_attention import attend_around_ring, attend_chunks, attend_rows, merge_shares
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import rms_norm, scale_norm
from inferlib.models.layers.param import param
from inferlib.models.layers.rope import apply_rope
from inferlib.models.layout import HeadLayout
from inferlib.ops.matmul import matmul
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class Attention(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads, without `o_bias`.

    One matrix holds, for each KV head, its G queries, its key and its value: one read of x and one
    launch, and a split over KV heads keeps every group whole. K and G are as laid out (see `HeadLayout`).
    """

    def __init__(self, spec: AttentionSpec, layout: HeadLayout, norm: NormSpec, dim: int, dtype):
        self.spec, self.layout, self.norm = spec, layout, norm
        k, g, h = layout.groups, layout.queries, spec.head_dim
        heads = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
        self.qkv = param((dim, k, g + 2, h), (axes.EMBED, *heads), dtype, contracting=(0,))
        outputs = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_OUT)
        self.o = param((k, g, h, dim), (*outputs, axes.EMBED), dtype, contracting=(0, 1, 2))
        if spec.qkv_bias:
            self.qkv_bias = param((k, g + 2, h), heads, dtype, "zeros")
        if spec.o_bias:
            self.o_bias = param((dim,), (axes.EMBED,), dtype, "zeros")
        neutral = "zeros" if norm.unit_offset else "ones"
        if spec.qk_norm == "head":
            self.q_norm = param((h,), (axes.HEAD_DIM,), dtype, neutral)
            self.k_norm = param((h,), (axes.HEAD_DIM,), dtype, neutral)
        elif spec.qk_norm == "full":
            self.q_norm = param((k, g, h), heads, dtype, neutral)
            self.k_norm = param((k, h), (axes.KV_HEADS, axes.HEAD_DIM), dtype, neutral)

    def __call__(self, x: jax.Array, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k, v = self.project(x, ctx)
        cache = cache.write(k, v, ctx.pages, ctx.positions, ctx.shards.stripe(axes.POSITIONS))
        return matmul(self.attend(q, cache, ctx), self.o[...], contract=3), cache

    def project(self, x: jax.Array, ctx: StepContext) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [T, K, G, h], k and v [T, K, h]: normed, rotated, scaled by the query temperature."""
        spec, g = self.spec, self.layout.queries
        qkv = ctx.shards.sum(matmul(x, self.qkv[...]), axes.EMBED)
        if spec.qkv_bias:
            qkv = qkv + self.qkv_bias[...]
        q, k, v = qkv[:, :, :g], qkv[:, :, g], qkv[:, :, g + 1]
        if spec.qk_norm and not spec.qk_norm_after_rope:
            q, k = self.qk_norm(q, k, ctx.shards)
        if spec.rope is not None:
            cos, sin = ctx.rope[spec.rope]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if spec.qk_norm and spec.qk_norm_after_rope:
            q, k = self.qk_norm(q, k, ctx.shards)
        if spec.temperature is not None:
            steps = jnp.maximum(ctx.positions, 0) // spec.temperature.context
            factor = 1.0 + spec.temperature.beta * jnp.log1p(steps)
            q = (q * factor[:, None, None, None]).astype(x.dtype)
        return q, k, v

    def qk_norm(self, q: jax.Array, k: jax.Array, shards: Shards) -> tuple[jax.Array, jax.Array]:
        spec, eps, offset = self.spec, self.norm.eps, self.norm.unit_offset
        q_weight, k_weight = self.q_norm[...], self.k_norm[...]
        if spec.qk_norm == "head":
            norm = partial(rms_norm, eps=eps, unit_offset=offset)
            return norm(q, q_weight), norm(k, k_weight)

        def over_all_heads(x: jax.Array, weight: jax.Array, count: int) -> jax.Array:
            y = x.astype(jnp.float32)
            squares = jnp.sum(y * y, axis=tuple(range(1, y.ndim)), keepdims=True)
            mean = shards.sum(squares, axes.KV_HEADS) / count
            return scale_norm(y, mean, weight, eps, offset).astype(x.dtype)

        q_count, k_count = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim * self.layout.copies
        return over_all_heads(q, q_weight, q_count), over_all_heads(k, k_weight, k_count)

    def attend(self, q: jax.Array, cache: LayerCache, ctx: StepContext) -> jax.Array:
        """The chunks' queries by the prefill contract, the rows' by the decode contract: [T, K, G, h], where the output
        projection takes in a share of h that share."""
        spec, batch, shards = self.spec, ctx.batch, ctx.shards
        options = dict(scale=spec.scale, window=spec.window, softcap=spec.softcap)
        split = math.prod(batch.chunk_tokens.shape)
        whole, shares = [], []
        if split:
            chunks = q[:split].reshape(*batch.chunk_tokens.shape, *q.shape[1:])
            if shards.size(axes.TOKENS) > 1:
                whole.append(attend_around_ring(chunks, cache, ctx, **options).reshape(split, *q.shape[1:]))
            else:
                stripe, ring = shards.stripe(axes.POSITIONS), cache.ring
                k, v = cache.read(cache.rows, ctx.limit and stripe.most(ctx.limit))
                out, lse = attend_chunks(chunks, k, v, batch.chunk_rows, ctx, stripe, ring=ring, **options)
                shares.append((out.reshape(split, *q.shape[1:]), lse.reshape(split, *q.shape[1:-1])))
        if split < q.shape[0]:
            shares.append(attend_rows(q[split:], cache, ctx, **options))
        if shares:
            out, lse = (_joined(parts) for parts in zip(*shares, strict=True))
            whole.append(merge_shares(out, lse, shards) if shards.size(axes.POSITIONS) > 1 else out)
        return _joined(whole)


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
