"""Kimi Delta Attention: for each token S <- diag(exp(g)) S, then S <- S + k (b (v - S^T k))^T, and the output is S^T q.

After Moonshot AI 2025, "Kimi Linear" (arXiv 2510.26692). It is the gated delta rule (`inferlib.ops.gated_delta`) with a
separate fading g for each of a key's d_k channels. Letters: K heads, d_k and d_v the sizes of their keys and values;
queries and keys are unit vectors, queries scaled. Everything is computed in float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from inferlib.ops.gated_delta import CHUNK
from inferlib.ops.in_chunks import einsum, in_chunks, live_only, over_chunks, solve_unit_lower

BLOCK = 16  # tokens of a block; fading is computed for each pair of them, and between blocks it is a product


def kimi_delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token for each of B rows.

    q, k, log_decay: [B, K, d_k]; v: [B, K, d_v]; beta: [B, K]; state: [B, K, d_k, d_v] float32; live: [B] bool.
    Returns out [B, K, d_v] float32 and the new state. Rows that are not live keep their state and return zeros,
    whatever their inputs.
    """
    q, k, v, log_decay, beta = live_only(live, q, k, v, log_decay, beta)
    at = live[:, None, None, None]
    faded = jnp.where(at, state, 0.0) * jnp.exp(log_decay)[..., None]
    change = beta[..., None] * (v - jnp.sum(faded * k[..., None], axis=2))
    new = faded + k[..., None] * change[:, :, None]
    return jnp.sum(new * q[..., None], axis=2), jnp.where(at, new, state)


def kimi_delta_chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C consecutive tokens for each of P rows.

    q, k, log_decay: [P, C, K, d_k]; v: [P, C, K, d_v]; beta: [P, C, K]; state: [P, K, d_k, d_v] float32; valid: [P, C]
    bool. Returns out [P, C, K, d_v] float32 and the state after the last token. Invalid tokens change nothing, whatever
    their inputs, and their outputs are undefined.

    Like `gated_delta_chunk`, but the product of a query or key i with a key j is a sum over channels that each fade
    from j to i by exp(g_j+1 + ... + g_i). This is a product of factors that are at most 1: to the end of j's block of
    tokens, over the blocks between, and from the start of i's block. Within a block it is computed pair by pair.
    """
    p, c, heads, size = v.shape

    chunks = (in_chunks(x, CHUNK) for x in live_only(valid, q, k, v, log_decay, beta))
    q, k, v, log_decay, beta = (jnp.moveaxis(x, 3, 2) for x in chunks)  # [n, P, K, c, ...]
    count, width = q.shape[0], q.shape[3]
    block = min(BLOCK, width)
    number, blocks = width // block, partial(_blocks, size=block)
    since = jnp.cumsum(blocks(log_decay), axis=4)  # from the start of a token's block [n, P, K, a, i, d]
    whole = since[..., -1, :]
    until = whole[..., None, :] - since  # to the end of it
    at = jnp.arange(number)
    # Blocks after b and before a.
    passed = (at[None, :, None] < at) & (at < at[:, None, None])
    between = einsum("abm,npkmd->npkabd", passed.astype(jnp.float32), whole)
    before, after = (
        einsum("am,npkmd->npkad", x.astype(jnp.float32), whole) for x in (at < at[:, None], at > at[:, None])
    )

    queries = blocks(jnp.concatenate([q, k], axis=0))  # of both, in one pass over the pairs
    causal = jnp.tril(jnp.ones((block, block), bool))[:, :, None]
    pairs = jnp.exp(jnp.where(causal, since[..., :, None, :] - since[..., None, :, :], -jnp.inf))
    within = jnp.sum(queries[..., :, None, :] * _twice(blocks(k))[..., None, :, :] * _twice(pairs), axis=-1)
    reached = (queries * jnp.exp(_twice(since)))[:, :, :, :, None] * jnp.exp(_twice(between))[..., None, :]
    across = einsum("npkabid,npkbjd->npkaibj", reached, _twice(blocks(k) * jnp.exp(until)))
    across = jnp.where((at[:, None] > at)[:, None, :, None], across, 0.0)
    products = across + jnp.eye(number)[:, None, :, None] * within[:, :, :, :, :, None]
    seen, met = jnp.split(products.reshape(2 * count, p, heads, width, width), 2)

    q, read, k = _faded(q, since, before), _faded(k, since, before), _faded(k, until, after)
    targets = beta[..., None] * jnp.concatenate([v, read], axis=-1)
    system = jnp.tril(jnp.ones((width, width)), -1) * beta[..., None] * met
    changes, reads = jnp.split(solve_unit_lower(system, targets), [size], axis=-1)

    def step(s: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, seen, change, reads, fading = inputs
        change = change - einsum("pkid,pkdv->pkiv", reads, s)
        out = einsum("pkid,pkdv->pkiv", q, s) + einsum("pkij,pkjv->pkiv", seen, change)
        return fading[..., None] * s + einsum("pkid,pkiv->pkdv", k, change), out

    inputs = q, k, seen, changes, reads, jnp.exp(jnp.sum(whole, axis=3))
    state, out = over_chunks(step, state, inputs)
    return jnp.moveaxis(out, (0, 3), (1, 2)).reshape(p, count * width, heads, size)[:, :c], state


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """[n, P, K, c, d] -> [n, P, K, a, i, d], blocks of `size` tokens."""
    return x.reshape(*x.shape[:3], -1, size, x.shape[-1])


def _twice(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, x])


def _faded(x: jax.Array, within: jax.Array, between: jax.Array) -> jax.Array:
    """x [n, P, K, c, d] times the factors within blocks, [n, P, K, a, i, d], and between blocks, [n, P, K, a, d]."""
    return x * jnp.exp(within + between[..., None, :]).reshape(x.shape)
