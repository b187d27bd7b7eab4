"""Grouped-query attention over the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from inferlib.models.batch import StepContext, kernel_lacks
from inferlib.models.config import AttentionSpec, NormSpec, QueryTemperature
from inferlib.models.layers.kv_cache import LayerCache, widened
from inferlib.models.layers.norm import rms_norm, scale_norm
from inferlib.models.layers.param import param
from inferlib.models.layers.rope import apply_rope
from inferlib.models.layers.step_attention import Attended, Share, attend, limit_of
from inferlib.models.layout import HeadLayout
from inferlib.ops.add_norm import Unscaled
from inferlib.ops.decode_attention import decode_attention
from inferlib.ops.matmul import Normed, gives_shares, matmul, product_shares
from inferlib.ops.prefill_attention import prefill_attention
from inferlib.ops.qkv_attention import qkv_attention
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.sharding.stripe import Stripe


def warmed(q: jax.Array, temperature: QueryTemperature | None, ctx: StepContext) -> jax.Array:
    """Queries [T, ...] scaled by the temperature of their positions."""
    if temperature is None:
        return q
    positions = jnp.maximum(ctx.positions, 0) + temperature.first
    factor = 1.0 + temperature.beta * jnp.log1p(positions // temperature.context)
    return (q * factor.reshape(-1, *(1,) * (q.ndim - 1))).astype(q.dtype)


class Attention(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads, without `o_bias`.

    One matrix holds, for each KV head, its G queries, its key and, where it has their size, its value: one read of x
    and one launch, and a split over KV heads keeps every group whole. K and G are as laid out (see `HeadLayout`).
    Where the cache is another layer's, there are queries alone.
    """

    def __init__(self, spec: AttentionSpec, layout: HeadLayout, norm: NormSpec, dim: int, dtype):
        self.spec, self.layout, self.norm = spec, layout, norm
        k, g, h, value = layout.groups, layout.queries, spec.head_dim, spec.value_dim
        heads = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
        slots = g + spec.fused_heads
        self.qkv = param((dim, k, slots, h), (axes.EMBED, *heads), dtype, contracting=(0,))
        outputs = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_OUT)
        self.o = param((k, g, value, dim), (*outputs, axes.EMBED), dtype, contracting=(0, 1, 2))
        if spec.own_values:
            self.v = param((dim, k, value), (axes.EMBED, axes.KV_HEADS, axes.HEAD_DIM), dtype, contracting=(0,))
        if spec.qkv_bias:
            self.qkv_bias = param((k, slots, h), heads, dtype, "zeros")
            if spec.own_values:
                self.v_bias = param((k, value), (axes.KV_HEADS, axes.HEAD_DIM), dtype, "zeros")
        if spec.gate is not None:
            size, names, sums = ((), (), ()) if spec.gate.per_head else ((value,), (axes.HEAD_OUT,), (0,))
            names = (axes.EMBED, axes.KV_HEADS, axes.QUERIES, *names)
            self.gate = param((dim, k, g, *size), names, dtype, contracting=sums)
        if spec.sinks:
            self.sinks = param((k, g), (axes.KV_HEADS, axes.QUERIES), dtype, "zeros")
        if spec.o_bias:
            self.o_bias = param((dim,), (axes.EMBED,), dtype, "zeros")
        neutral = "zeros" if norm.unit_offset else "ones"
        if spec.qk_norm == "head":
            self.q_norm = param((h,), (axes.HEAD_DIM,), dtype, neutral)
            if spec.cache_of is None:
                self.k_norm = param((h,), (axes.HEAD_DIM,), dtype, neutral)
        elif spec.qk_norm == "full":
            self.q_norm = param((k, g, h), heads, dtype, neutral)
            if spec.cache_of is None:
                self.k_norm = param((k, h), (axes.KV_HEADS, axes.HEAD_DIM), dtype, neutral)

    def __call__(
        self, x: jax.Array | Normed | Unscaled, ctx: StepContext, cache: LayerCache, *, shares: bool = False
    ) -> tuple[jax.Array, LayerCache]:
        """shares: the last product's, [S, T, D]."""
        spec = self.spec
        if self.in_one(ctx, cache):
            out, cache = self.step(x, cache, ctx)
        else:
            q, new = self.project(x, ctx)
            out, cache = self.attend(q, new, cache, ctx)
        if spec.gate is not None:
            out = self.gated(out, x, ctx.shards)
        return (product_shares if shares else matmul)(out, self.o[...], contract=3), cache

    def in_one(self, ctx: StepContext, cache: LayerCache) -> bool:
        """Whether one kernel takes decode rows from their products on."""
        spec, chunks = self.spec, math.prod(ctx.batch.chunk_tokens.shape)
        if ctx.backend.qkv_attention == "xla" or chunks or ctx.shards.size(axes.POSITIONS) > 1:
            return False
        plain = spec.temperature is None and not spec.value_norm and spec.value_scale == 1.0 and spec.chunk is None
        normed = spec.qk_norm in (None, "head") and not spec.qk_norm_after_rope
        apart = cache.layer is None and len(cache.arrays) == 2 and not cache.scaled
        return plain and normed and apart and spec.fused_heads == 2

    def step(
        self, x: jax.Array | Normed | Unscaled, cache: LayerCache, ctx: StepContext
    ) -> tuple[jax.Array, LayerCache]:
        """Decode rows' [B, K, G, h], and the cache with what is new."""
        spec = self.spec
        arrays = {"bias": self.qkv_bias[...]} if spec.qkv_bias else {}
        if spec.qk_norm:
            arrays["norms"] = self.q_norm[...], self.k_norm[...]
        if spec.rope is not None:
            arrays["rope"] = ctx.rope[spec.rope]
        if spec.sinks:
            arrays["sinks"] = self.sinks[...]
        options = dict(scale=spec.scale, window=spec.window, softcap=spec.softcap, ring=cache.ring, limit=ctx.limit)
        options |= dict(eps=self.norm.eps, offset=float(self.norm.unit_offset))
        w, y = self.qkv[...], x.y if isinstance(x, Normed | Unscaled) else x
        if ctx.shards.size(axes.EMBED) == 1 and gives_shares(w, 1, y.shape[0], y.dtype):
            if isinstance(x, Unscaled):
                arrays["squares"] = x.squares
                options |= dict(inputs=y.shape[1], inputs_eps=x.eps)
            qkv, options["dtype"] = product_shares(y, w), y.dtype
        else:
            qkv = ctx.shards.sum(matmul(x, w), axes.EMBED)
        out, k, v = qkv_attention(qkv, *cache.arrays, ctx.batch.decode_lengths, arrays, **options)
        return out, replace(cache, arrays=(k, v))

    def gated(self, out: jax.Array, x: jax.Array | Normed | Unscaled, shards: Shards) -> jax.Array:
        """Attention's output [T, K, G, h], or this device's share of h, by the gate of x [T, D]."""
        gate = shards.sum(matmul(x, self.gate[...], out_dtype=jnp.float32), axes.EMBED)
        gate = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}[self.spec.gate.activation](gate)
        return out * gate.reshape(*out.shape[:3], -1).astype(out.dtype)

    def project(self, x: jax.Array | Normed | Unscaled, ctx: StepContext) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """q [T, K, G, h], normed, rotated, scaled by the query temperature, and what is cached: k, normed and rotated,
        and v [T, K, h]."""
        spec, g = self.spec, self.layout.queries
        qkv = ctx.shards.sum(matmul(x, self.qkv[...]), axes.EMBED)
        if spec.qkv_bias:
            qkv = qkv + self.qkv_bias[...]
        rotated = spec.rope is not None and not spec.qk_norm
        if rotated:  # all at once but values: a few heads at a time are so many fusions for a TPU
            turned = np.arange(qkv.shape[2]) < g + (spec.cache_of is None)
            qkv = jnp.where(turned[:, None], apply_rope(qkv, *ctx.rope[spec.rope]), qkv)
        place = (lambda x, *_: x) if rotated else self.placed
        q = warmed(place(qkv[:, :, :g], "q", ctx), spec.temperature, ctx)
        if spec.cache_of is not None:
            return q, ()
        k = v = qkv[:, :, g]
        if spec.fused_heads == 2:
            v = qkv[:, :, g + 1]
        elif spec.own_values:
            v = ctx.shards.sum(matmul(x, self.v[...]), axes.EMBED)
            v = v + self.v_bias[...] if spec.qkv_bias else v
        if spec.value_norm:
            v = rms_norm(v, jnp.ones((spec.value_dim,)), self.norm.eps)
        v = v if spec.value_scale == 1.0 else v * jnp.asarray(spec.value_scale, v.dtype)
        return q, (place(k, "k", ctx), v)

    def placed(self, x: jax.Array, which: Literal["q", "k"], ctx: StepContext) -> jax.Array:
        """Queries or keys, normed and rotated."""
        spec = self.spec
        if spec.qk_norm and not spec.qk_norm_after_rope:
            x = self.qk_norm(x, which, ctx.shards)
        x = x if spec.rope is None else apply_rope(x, *ctx.rope[spec.rope])
        return self.qk_norm(x, which, ctx.shards) if spec.qk_norm and spec.qk_norm_after_rope else x

    def qk_norm(self, x: jax.Array, which: Literal["q", "k"], shards: Shards) -> jax.Array:
        spec, eps, offset = self.spec, self.norm.eps, self.norm.unit_offset
        if spec.qk_norm == "unit":
            return rms_norm(x, jnp.ones((spec.head_dim,)), eps)
        weight = (self.q_norm if which == "q" else self.k_norm)[...]
        if spec.qk_norm == "head":
            return rms_norm(x, weight, eps, unit_offset=offset)
        y = x.astype(jnp.float32)
        squares = jnp.sum(y * y, axis=tuple(range(1, y.ndim)), keepdims=True)
        heads = spec.heads if which == "q" else spec.kv_heads * self.layout.copies
        mean = shards.sum(squares, axes.KV_HEADS) / (heads * spec.head_dim)
        return scale_norm(y, mean, weight, eps, offset).astype(x.dtype)

    def attend(
        self, q: jax.Array, new: Sequence[jax.Array], cache: LayerCache, ctx: StepContext
    ) -> tuple[jax.Array, LayerCache]:
        """[T, K, G, h], where the output projection takes in a share of h that share; and the cache with what is new
        of all tokens [T, K, h]."""
        spec, batch, own = self.spec, ctx.batch, ctx.shards.stripe(axes.POSITIONS)
        split = math.prod(batch.chunk_tokens.shape)
        dealt = ctx.shards.size(axes.POSITIONS) > 1
        apart = len(cache.arrays) > 1
        # Against a cell of key and value: zeros meet the value, and what meets the key is dropped.
        q = q if apart else widened(q, cache.arrays[0].shape[-1])
        sinks = self.sinks[...] if spec.sinks else None
        options = dict(scale=spec.scale, softcap=spec.softcap, sinks=None if dealt else sinks, ring=cache.ring)

        def reach(stripe: Stripe, positions: jax.Array, operation: str) -> tuple[int | jax.Array | None, str]:
            """The window of these, and what implements their attention. No kernel takes a window for each row: one that
            does not divide covers a position more on some devices."""
            window = stripe.window(positions, self.window(positions))
            lacks = isinstance(window, jax.Array) or kernel_lacks(spec, ctx.backend, operation, cache.scaled)
            return window, "xla" if lacks else getattr(ctx.backend, operation)

        def values(out: jax.Array, lse: jax.Array) -> Attended:
            return out if apart else out[..., spec.head_dim : spec.head_dim + spec.value_dim], lse

        def chunks(share: Share, pages: jax.Array, stripe: Stripe, which: slice) -> Attended:
            queries = q[:split].reshape(*batch.chunk_tokens.shape, *q.shape[1:])[which]
            positions, limit = ctx.chunk_positions[which], limit_of(ctx, stripe)
            window, kernel = reach(stripe, positions, "prefill_attention")
            k, v, scales = _parts(share)
            kind = dict(window=window, limit=limit, backend=kernel, **scales)
            if k.ndim == 5:
                kind["layer"] = cache.layer
            numbers = stripe.number(positions)
            return values(*prefill_attention(queries, k, v, pages, numbers, **kind, **options))

        def rows(stripe: Stripe) -> tuple[Attended, Share]:
            queries, positions = q[split:], batch.decode_lengths - 1
            limit, numbers, layer = limit_of(ctx, stripe), stripe.number(positions), None
            if kernel == "pallas_tpu":
                share, layer = cache.arrays, cache.layer  # it reads a stacked cache where it lies
            else:
                share = cache.read(queries.shape[0], limit)
            k, v, scales = _parts(share)
            kind = dict(window=window, limit=limit, layer=layer, backend=kernel, **scales)
            if fresh is not None:
                kind |= dict(new=fresh, written=stripe.owns(positions) if dealt else None)
            out, lse, *share = decode_attention(queries, k, v, numbers + 1, **kind, **options)
            return values(out, lse), tuple(share)

        window, kernel = reach(own, batch.decode_lengths - 1, "decode_attention")
        fresh, attended = None, None
        if new and kernel == "pallas_tpu" and split < q.shape[0]:  # it writes the cells of decode rows
            fresh, new = [x[split:] for x in cache.cells(new)], [x[:split] for x in new]
        prefill = reach(own, ctx.chunk_positions, "prefill_attention")[1]
        if new and (count := new[0].shape[0]):
            run = batch.chunk_tokens.shape[1] if count == split and "pallas_tpu" in (kernel, prefill) else 1
            if run > 1 and prefill == "pallas_tpu" and not dealt and cache.takes_chunks(run):
                new = [x.reshape(-1, run, *x.shape[1:]) for x in new]
                cache = cache.write_chunks(new, batch.chunk_rows, batch.chunk_starts)
            else:
                cache = cache.write(new, ctx.pages[:count], ctx.positions[:count], own, run)
        if fresh is not None:  # before chunks read the cache, so that it is written in place
            attended, arrays = rows(own)
            cache = replace(cache, arrays=arrays)
        by_kernel = prefill == "pallas_tpu"
        out = attend(
            cache, ctx, chunks, lambda stripe: attended or rows(stripe)[0], sinks if dealt else None, stacked=by_kernel
        )
        return out, cache

    def window(self, positions: jax.Array) -> int | jax.Array | None:
        """How many positions each of these sees, itself included."""
        return self.spec.window if self.spec.chunk is None else positions % self.spec.chunk + 1


def _parts(share: Share) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
    """Keys, values (None: they lie behind the keys) and the scales of both, as attention takes them."""
    k, *rest = share
    return k, rest[0] if rest else None, dict(zip(("k_scales", "v_scales"), rest[1:], strict=False))
