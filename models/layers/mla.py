"""Multi-head latent attention (MLA; DeepSeek-AI 2024, "DeepSeek-V2")."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext, kernel_lacks
from inferlib.models.config import MlaSpec
from inferlib.models.layers.attention import warmed
from inferlib.models.layers.kv_cache import LayerCache, widened
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.param import param
from inferlib.models.layers.rope import apply_rope
from inferlib.models.layers.step_attention import Attended, Share, attend, limit_of
from inferlib.models.layout import HeadLayout
from inferlib.ops.cache_write import folded_rows, unfolded
from inferlib.ops.matmul import Normed, matmul, precision_of
from inferlib.ops.mla_decode_attention import mla_decode_attention
from inferlib.ops.prefill_attention import prefill_attention
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
        q, latent, key = self.project(x, ctx)
        cache = cache.write(
            (latent[:, None], key[:, None]), ctx.pages, ctx.positions, ctx.shards.stripe(axes.POSITIONS)
        )
        return matmul(self.attend(q, cache, ctx)[:, :, 0], self.o[...], contract=2), cache

    def project(self, x: jax.Array | Normed, ctx: StepContext) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [T, H, n + r], the normed latent [T, R], and the rotated key [T, r]."""
        spec, n, rank = self.spec, self.spec.nope_dim, self.spec.q_rank or 0
        down = ctx.shards.sum(matmul(x, self.down[...]), axes.EMBED)
        if spec.latent_bias:
            down = down + self.down_bias[...]
        latent, key = down[:, rank : rank + spec.kv_rank], down[:, rank + spec.kv_rank :]
        if rank:
            q = matmul(rms_norm(down[:, :rank], self.q_norm[...], spec.eps), self.q[...])
        else:
            q = ctx.shards.sum(matmul(x, self.q[...]), axes.EMBED)
        angles = ctx.rope[spec.rope]
        q = jnp.concatenate([q[..., :n], apply_rope(q[..., n:], *angles)], axis=-1)
        latent = rms_norm(latent, self.kv_norm[...], spec.eps)
        latent = latent if spec.latent_scale == 1.0 else latent * jnp.asarray(spec.latent_scale, latent.dtype)
        return warmed(q, spec.temperature, ctx), latent, apply_rope(key, *angles)

    def attend(self, q: jax.Array, cache: LayerCache, ctx: StepContext) -> jax.Array:
        """[T, H, 1, v], where the output projection takes in a share of v that share."""
        spec, batch = self.spec, ctx.batch
        split = math.prod(batch.chunk_tokens.shape)

        def chunks(share: Share, pages: jax.Array, stripe: Stripe, which: slice) -> Attended:
            (latents, keys, *scales), page = share, jnp.minimum(pages, share[0].shape[0] - 1)
            latents, fold = latents[page, 0, : limit_of(ctx, stripe)], cache.folds[1]
            slots = latents.shape[1]
            keys = unfolded(keys[page, 0, : folded_rows(slots, fold)], fold)[:, :slots]
            if scales:
                scales = (x[page, 0, :slots, None] for x in scales)
                pairs = zip((latents, keys), scales, strict=True)
                latents, keys = ((x.astype(jnp.float32) * scale).astype(q.dtype) for x, scale in pairs)
            queries = q[:split].reshape(*batch.chunk_tokens.shape, q.shape[1], 1, q.shape[2])[which]
            own, numbers = jnp.arange(pages.size), stripe.number(ctx.chunk_positions[which])
            return prefill_attention(queries, *self.expand(latents, keys), own, numbers, scale=spec.scale)

        def rows(stripe: Stripe) -> Attended:
            lengths, limit = stripe.number(batch.decode_lengths - 1) + 1, limit_of(ctx, stripe)
            kernel, layer = "xla" if kernel_lacks(spec, ctx.backend, "decode_attention") else "pallas_tpu", None
            if kernel == "pallas_tpu":
                arrays, layer = cache.arrays, cache.layer  # it reads a stacked cache where it lies
            else:
                arrays = cache.read(lengths.shape[0], limit)
            latents, keys, *scales = arrays
            parts = zip(self.absorb(q[split:]), cache.sizes, strict=True)
            queries = jnp.concatenate([widened(part, size) for part, size in parts], axis=-1)
            kind = dict(scale=spec.scale, limit=limit, layer=layer, scales=tuple(scales) or None, backend=kernel)
            out, lse = mla_decode_attention(queries, latents, keys, lengths, **kind)
            return self.values(out[..., : spec.kv_rank])[:, :, None], lse[..., None]

        return attend(cache, ctx, chunks, rows)

    def expand(self, latent: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Latents [P, S, R] and rotary keys [P, S, r] -> each head's keys [P, H, S, n + r] and values [P, H, S, v]."""
        latent, key = latent[..., : self.spec.kv_rank], key[..., : self.spec.rope.dim]
        k = jnp.moveaxis(_dot(latent, self.k[...], ((2,), (2,))), 1, 2)  # [P, S, H, n]
        v = jnp.moveaxis(_dot(latent, self.v[...], ((2,), (1,))), 1, 2)
        key = jnp.broadcast_to(key[:, None], (*k.shape[:3], key.shape[-1]))
        return jnp.concatenate([k, key], axis=-1), v

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
