"""Attention where a row's positions are dealt out to several devices (see `inferlib.sharding.stripe`).

Each device attends to its own share of the cache; disjoint shares merge exactly by their log-sum-exps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepContext
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.ops.attention import merge_attention
from inferlib.ops.decode_attention import decode_attention
from inferlib.ops.prefill_attention import prefill_attention
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.sharding.stripe import Stripe


def attend_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    ctx: StepContext,
    stripe: Stripe,
    *,
    window: int | None,
    ring: bool,
    **options,
) -> tuple[jax.Array, jax.Array]:
    """The chunks' queries [P, C, K, G, h] over the positions of `stripe`; k and v [N, K, S, h] hold them, `rows` [P] in
    their pages. Returns out and LSE as `prefill_attention` does."""
    positions = ctx.chunk_positions
    return prefill_attention(
        q,
        k,
        v,
        rows,
        stripe.number(positions),
        window=stripe.window(positions, window),
        ring=ring,
        limit=ctx.limit and stripe.most(ctx.limit),
        backend=ctx.backend.prefill_attention,
        **options,
    )


def attend_rows(
    q: jax.Array, cache: LayerCache, ctx: StepContext, *, window: int | None, **options
) -> tuple[jax.Array, jax.Array]:
    """The rows' queries [B, K, G, h] over this device's positions. Returns out and LSE as `decode_attention` does."""
    stripe, positions = ctx.shards.stripe(axes.POSITIONS), ctx.batch.decode_lengths - 1
    limit = ctx.limit and stripe.most(ctx.limit)
    k, v = cache.read(q.shape[0], limit)
    window = stripe.window(positions, window)
    options |= dict(window=window, ring=cache.ring, limit=limit)
    if not isinstance(window, jax.Array):
        return decode_attention(q, k, v, stripe.number(positions) + 1, backend=ctx.backend.decode_attention, **options)
    # A window that does not divide covers a position more on some devices; no decode kernel takes one for each row.
    options |= dict(window=window[:, None], backend=ctx.backend.prefill_attention)
    out, lse = prefill_attention(q[:, None], k, v, jnp.arange(q.shape[0]), stripe.number(positions)[:, None], **options)
    return out[:, 0], lse[:, 0]


def attend_around_ring(q: jax.Array, cache: LayerCache, ctx: StepContext, **options) -> jax.Array:
    """Ring attention (Liu et al. 2023): q [P, C, K, G, h] holds this device's tokens of the chunks; the shares of their
    rows' keys and values are passed from device to device. -> out [P, C, K, G, h]."""
    shards, slots = ctx.shards, cache.slots
    if ctx.limit is not None and not cache.ring:
        slots = min(slots, shards.stripe(axes.POSITIONS).most(ctx.limit))
    rows = jnp.minimum(ctx.batch.chunk_rows, cache.rows - 1)
    share = tuple(x[rows, :, :slots] for x in cache.read(cache.rows, slots))
    own = jnp.arange(rows.size)
    parts = []
    for passed in range(count := shards.size(axes.POSITIONS)):
        k, v = share
        if passed < count - 1:  # asked for before the computation that hides it
            share = tuple(shards.pass_on(x, axes.POSITIONS) for x in share)
        stripe = shards.stripe(axes.POSITIONS, behind=passed)
        parts.append(attend_chunks(q, k, v, own, ctx, stripe, ring=cache.ring, **options))
    outs, lses = zip(*parts, strict=True)
    return merge_attention(jnp.stack(outs), jnp.stack(lses))[0]


def merge_shares(out: jax.Array, lse: jax.Array, shards: Shards) -> jax.Array:
    """The attention of T tokens from every device's share, out [T, K, G, h] and lse [T, K, G].

    Where the output projection takes in a share of h, each device exchanges its parts for the others' of that share:
    [T, K, G, h / n]; else all get [T, K, G, h].
    """
    lses = shards.stack(lse, axes.POSITIONS)
    if shards.size(axes.HEAD_OUT) > 1:
        return merge_attention(shards.exchange(out, axes.HEAD_OUT), lses)[0]
    total = jax.nn.logsumexp(lses, axis=0)
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))
    return shards.sum((out * weight[..., None]).astype(out.dtype), axes.POSITIONS)
