"""Multi-head latent attention (MLA; DeepSeek-AI 2024, "DeepSeek-V2")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext, kernel_lacks
from inferlib.models.config import MlaSpec
from inferlib.models.layers.attention import warmed
from inferlib.models.layers.kv_cache import LayerCache, widened
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.param import OfStack, param
from inferlib.models.layers.rope import apply_rope
from inferlib.models.layers.step_attention import Attended, Share, attend, limit_of
from inferlib.models.layout import HeadLayout
from inferlib.ops.matmul import Normed, matmul, precision_of
from inferlib.ops.mla_decode_attention import mla_decode_attention
from inferlib.ops.mla_prefill_attention import mla_prefill_attention
from inferlib.ops.mla_queries import mla_queries, mla_queries_lacks
from inferlib.sharding import axes
from inferlib.sharding.stripe import Stripe


class Mla(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads, without `o_bias`.

    The cache holds each token's latent [R], normed, and apart from it its rotary key [r], both shared by all heads;
    zeros fill up what the plan makes larger. Prefill expands them to keys [n + r] and values [v] of each head; decoding
    takes the queries to the latents' space instead and its output back, so that it reads each latent once for all
    heads. H heads as laid out (see `HeadLayout`).
    """

    def __init__(self, spec: MlaSpec, layout: HeadLayout, dim: int, dtype):
        self.spec = spec
        heads, rank, n, v = layout.groups, spec.kv_rank, spec.nope_dim, spec.value_dim
        # One matrix for the queries' latent, the keys' and values', and the rotary key: one read of x, one launch.
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

    def __call__(self, x: jax.Array | Normed, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        spec, (q, down) = self.spec, self.project(x, ctx)
        plain = spec.rotates and spec.temperature is None and spec.latent_scale == 1.0
        plain = plain and not ctx.batch.chunk_tokens.size and self.kernel(ctx, cache) == "pallas_gpu"
        if plain and not mla_queries_lacks(q, self.k[...], ctx.rope[spec.rope][0]):
            angles = ctx.rope[spec.rope]
            *absorbed, latent, key = mla_queries(q, down, self.kv_norm[...], self.k[...], *angles, spec.eps)
            out, cache = self.attend(q, absorbed, (latent, key), cache, ctx)
        else:
            q, latent, key = self.placed(q, down, ctx)
            out, cache = self.attend(q, None, (latent[:, None], key[:, None]), cache, ctx)
        return matmul(out[:, :, 0], self.o[...], contract=2), cache

    def kernel(self, ctx: StepContext, cache: LayerCache) -> str:
        """What implements decode attention."""
        lacks = kernel_lacks(self.spec, ctx.backend, "decode_attention", cache.scaled)
        return "xla" if lacks else ctx.backend.decode_attention

    def project(self, x: jax.Array | Normed, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        """q [T, H, n + r], not rotated, and the latents and the rotary key [T, `spec.latent_dim`] as projected."""
        spec, rank = self.spec, self.spec.q_rank
        down = ctx.shards.sum(matmul(x, self.down[...]), axes.EMBED)
        if spec.latent_bias:
            down = down + self.down_bias[...]
        if rank:
            return matmul(rms_norm(down[:, :rank], self.q_norm[...], spec.eps), self.q[...]), down
        return ctx.shards.sum(matmul(x, self.q[...]), axes.EMBED), down

    def placed(self, q: jax.Array, down: jax.Array, ctx: StepContext) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [T, H, n + r], the normed latent [T, R], and the rotary key [T, r], of what `project` returns; rotated, if
        they are."""
        spec, n, rank = self.spec, self.spec.nope_dim, self.spec.q_rank or 0
        latent, key = down[:, rank : rank + spec.kv_rank], down[:, rank + spec.kv_rank :]
        if spec.rotates:
            angles = ctx.rope[spec.rope]
            q = jnp.concatenate([q[..., :n], apply_rope(q[..., n:], *angles)], axis=-1)
            key = apply_rope(key, *angles)
        latent = rms_norm(latent, self.kv_norm[...], spec.eps)
        latent = latent if spec.latent_scale == 1.0 else latent * jnp.asarray(spec.latent_scale, latent.dtype)
        return warmed(q, spec.temperature, ctx), latent, key

    def attend(
        self,
        q: jax.Array,
        absorbed: Sequence[jax.Array] | None,
        new: Sequence[jax.Array],
        cache: LayerCache,
        ctx: StepContext,
    ) -> tuple[jax.Array, LayerCache]:
        """[T, H, 1, v], where the output projection takes in a share of v that share; and the cache with what is new of
        all tokens, latents [T, 1, R] and rotary keys [T, 1, r]. absorbed: decode rows' queries as `absorb` makes them,
        if they are known; then q is that of no chunk."""
        spec, batch, own = self.spec, ctx.batch, ctx.shards.stripe(axes.POSITIONS)
        split = math.prod(batch.chunk_tokens.shape)
        kernel = self.kernel(ctx, cache)
        lacks = kernel_lacks(spec, ctx.backend, "prefill_attention", cache.scaled)
        prefill = "xla" if lacks else ctx.backend.prefill_attention

        def chunks(share: Share, pages: jax.Array, stripe: Stripe, which: slice) -> Attended:
            latents, keys, *scales = share
            queries = widened(q[:split], spec.nope_dim + cache.sizes[1])
            queries = queries.reshape(*batch.chunk_tokens.shape, *queries.shape[1:])[which]
            kind = dict(scale=spec.scale, limit=limit_of(ctx, stripe), scales=tuple(scales) or None, backend=prefill)
            k, v = self.k[...], self.v[...]
            if prefill == "pallas_tpu" and isinstance(self.k.get_value(), OfStack):
                k, v = (w.get_value().stack for w in (self.k, self.v))
                kind["weight_layer"] = self.k.get_value().layer
            if latents.ndim == 5:
                kind["layer"] = cache.layer
            numbers = stripe.number(ctx.chunk_positions[which])
            out, lse = mla_prefill_attention(queries, k, v, latents, keys, pages, numbers, **kind)
            return out[:, :, :, None], lse[..., None]

        def rows(stripe: Stripe) -> tuple[Attended, Share]:
            lengths, limit, layer = stripe.number(batch.decode_lengths - 1) + 1, limit_of(ctx, stripe), None
            if kernel == "pallas_tpu":
                arrays, layer = cache.arrays, cache.layer  # it reads a stacked cache where it lies
            else:
                arrays = cache.read(lengths.shape[0], limit)
            latents, keys, *scales = arrays
            parts = zip(absorbed or self.absorb(q[split:]), cache.sizes, strict=True)
            queries = [widened(part, size) for part, size in parts]
            kind = dict(limit=limit, layer=layer, scales=tuple(scales) or None, new=fresh, backend=kernel)
            out, lse, *share = mla_decode_attention(*queries, latents, keys, lengths, scale=spec.scale, **kind)
            return (self.values(out[..., : spec.kv_rank])[:, :, None], lse[..., None]), tuple(share)

        fresh, attended = None, None
        if kernel == "pallas_gpu" and cache.layer is None and ctx.shards.size(axes.POSITIONS) == 1 and split < len(q):
            fresh, new = [x[split:] for x in new], [x[:split] for x in new]  # it writes the cells of decode rows
        if count := len(new[0]):
            cache = cache.write(new, ctx.pages[:count], ctx.positions[:count], own)
        if fresh is not None:  # before chunks read the cache, so that it is written in place
            attended, arrays = rows(own)
            cache = replace(cache, arrays=arrays)
        out = attend(cache, ctx, chunks, lambda stripe: attended or rows(stripe)[0], stacked=prefill == "pallas_tpu")
        return out, cache

    def absorb(self, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [B, H, n + r] -> [B, H, R] and [B, H, r]: the sum of their products with a latent and its rotary key
        is that with the expanded key."""
        n = self.spec.nope_dim
        return jnp.moveaxis(_dot(q[..., :n], self.k[...], ((2,), (1,)), ((1,), (0,))), 0, 1), q[..., n:]

    def values(self, out: jax.Array) -> jax.Array:
        """What was attended to, [B, H, R] -> [B, H, v]; linear, so that shares of positions may be merged after it."""
        return jnp.moveaxis(_dot(out, self.v[...], ((2,), (1,)), ((1,), (0,))), 0, 1)


def _dot(x: jax.Array, w: jax.Array, contract, batch=((), ())) -> jax.Array:
    return lax.dot_general(x, w, (contract, batch), precision_of(x.dtype), preferred_element_type=x.dtype)
