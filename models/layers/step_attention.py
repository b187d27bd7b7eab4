"""Attention of a step's tokens over the cache, also where a row's positions are dealt out to several devices (see
`inferlib.sharding.stripe`).

Each device attends to its own share of the cache; disjoint shares merge exactly by their log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepContext
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.ops.attention import merge_attention
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.sharding.stripe import Stripe

Share = tuple[jax.Array, ...]  # the arrays of a layer's cache, of one device's positions
Attended = tuple[jax.Array, jax.Array]


def attend(
    cache: LayerCache,
    ctx: StepContext,
    chunks: Callable[[Share, jax.Array, Stripe, slice], Attended],
    rows: Callable[[Stripe], Attended],
    sinks: jax.Array | None = None,
    stacked: bool = False,
) -> jax.Array:
    """The step's tokens [T, K, G, h]; where the output projection takes in a share of h, that share.

    chunks: the queries of some chunks over the positions of a stripe, by the prefill contract: takes arrays that hold
    them, the chunks' pages [P] in these, the stripe and which chunks; returns out [P, C, K, G, h] and LSE. rows: the
    decode rows' over those of a stripe, by the decode contract, from the cache itself: out [B, K, G, h]. sinks [K, G]:
    where positions are dealt out, a logit that joins the denominator; once for all shares, so `chunks` and `rows` must
    leave it out. stacked: `chunks` takes the arrays of a stacked cache, too.
    """
    batch, shards = ctx.batch, ctx.shards
    whole, shares = [], []
    if math.prod(batch.chunk_tokens.shape):
        if shards.size(axes.TOKENS) > 1:
            whole.append(_flat(_around_ring(cache, ctx, chunks, sinks)))
        else:
            shares += [tuple(map(_flat, part)) for part in _over_cache(cache, ctx, chunks, stacked)]
    if batch.decode_tokens.shape[0]:
        shares.append(rows(shards.stripe(axes.POSITIONS)))
    if shares:
        out, lse = (_joined(parts) for parts in zip(*shares, strict=True))
        whole.append(_merged(out, lse, shards, sinks) if shards.size(axes.POSITIONS) > 1 else out)
    return _joined(whole)


def limit_of(ctx: StepContext, stripe: Stripe) -> int | None:
    """What no number of a position reaches on a device."""
    return ctx.limit and stripe.most(ctx.limit)


def _over_cache(cache: LayerCache, ctx: StepContext, chunks: Callable, stacked: bool) -> list[Attended]:
    """Of a stacked cache one chunk after the other, each reading its row in one slice, unless `stacked`: the rows of
    several would be copied to memory."""
    stripe, pages = ctx.shards.stripe(axes.POSITIONS), ctx.batch.chunk_rows
    limit, everyone = limit_of(ctx, stripe), slice(None)
    if stacked:
        return [chunks(cache.arrays, pages, stripe, everyone)]
    if cache.layer is None:
        return [chunks(cache.read(cache.rows, limit), pages, stripe, everyone)]
    firsts = jnp.minimum(pages, cache.rows - 1)
    own = jnp.zeros(1, jnp.int32)
    return [chunks(cache.read(1, limit, firsts[i]), own, stripe, slice(i, i + 1)) for i in range(pages.shape[0])]


def _around_ring(cache: LayerCache, ctx: StepContext, chunks: Callable, sinks: jax.Array | None) -> jax.Array:
    """Ring attention (Liu et al. 2023): queries are of this device's tokens of the chunks; the shares of their rows'
    cache are passed from device to device. -> out [P, C, K, G, h]."""
    shards, slots = ctx.shards, cache.slots
    if ctx.limit is not None and not cache.ring:
        slots = min(slots, limit_of(ctx, shards.stripe(axes.POSITIONS)))
    rows = jnp.minimum(ctx.batch.chunk_rows, cache.rows - 1)
    share = tuple(x[rows, :, :slots] for x in cache.read(cache.rows, slots))
    own = jnp.arange(rows.size)
    parts = []
    for passed in range(count := shards.size(axes.POSITIONS)):
        current = share
        if passed < count - 1:  # asked for before the computation that hides it
            share = tuple(shards.pass_on(x, axes.POSITIONS) for x in share)
        parts.append(chunks(current, own, shards.stripe(axes.POSITIONS, behind=passed), slice(None)))
    outs, lses = zip(*parts, strict=True)
    return merge_attention(jnp.stack(outs), jnp.stack(lses), sinks=sinks)[0]


def _merged(out: jax.Array, lse: jax.Array, shards: Shards, sinks: jax.Array | None) -> jax.Array:
    """The attention of T tokens from every device's share, out [T, K, G, h] and lse [T, K, G].

    Where the output projection takes in a share of h, each device exchanges its parts for the others' of that share:
    [T, K, G, h / n]; else all get [T, K, G, h].
    """
    lses = shards.stack(lse, axes.POSITIONS)
    if shards.size(axes.HEAD_OUT) > 1:
        return merge_attention(shards.exchange(out, axes.HEAD_OUT), lses, sinks=sinks)[0]
    total = jax.nn.logsumexp(lses, axis=0)
    total = total if sinks is None else jnp.logaddexp(total, sinks.astype(jnp.float32))
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))
    return shards.sum((out * weight[..., None]).astype(out.dtype), axes.POSITIONS)


def _flat(x: jax.Array) -> jax.Array:
    """[P, C, ...] -> [P * C, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
