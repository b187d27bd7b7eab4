"""The gated delta rule: for each token S <- exp(g) S, then S <- S + k (b (v - S^T k))^T, and the output is S^T q.

After Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464); by chunks as in Yang et al. 2024, "Parallelizing
Linear Transformers with the Delta Rule" (arXiv 2406.06484). Letters: K key heads with G value heads each, d_k and d_v
their sizes; queries and keys are unit vectors, queries scaled. Everything is computed in float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # tokens whose updates are products; longer ones do more work in all, shorter ones more steps

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def gated_delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each of B rows.

    q, k: [B, K, d_k]; v: [B, K, G, d_v]; log_decay, beta: [B, K, G]; state: [B, K * G, d_k, d_v] float32; live: [B]
    bool. Returns out [B, K, G, d_v] float32 and the new state. Rows that are not live keep their state and return
    zeros, whatever they hold.
    """
    b, heads, group, size = v.shape
    q, k, v, log_decay, beta = _live(live, q, k, v, log_decay, beta)
    s = state.reshape(b, heads, group, -1, size)
    held = jnp.where(live[:, None, None, None, None], s, 0.0)

    def read(x: jax.Array) -> jax.Array:
        return jnp.sum(held * x[:, :, None, :, None], axis=3)

    decay = jnp.exp(log_decay)[..., None]
    change = beta[..., None] * (v - decay * read(k))
    # Of the state before the token, so that it is read for both at once.
    out = decay * read(q) + change * jnp.sum(q * k, axis=-1)[..., None, None]
    new = decay[..., None] * held + k[:, :, None, :, None] * change[..., None, :]
    return out, jnp.where(live[:, None, None, None, None], new, s).reshape(state.shape)


def gated_delta_chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C tokens in turn of each of P rows.

    q, k: [P, C, K, d_k]; v: [P, C, K, G, d_v]; log_decay, beta: [P, C, K, G]; state: [P, K * G, d_k, d_v] float32;
    valid: [P, C] bool. Returns out [P, C, K, G, d_v] float32 and the state after the last token. Tokens that are not
    valid change nothing, whatever they hold, and what they return is of no use.

    Within CHUNK tokens the changes d to the state solve a triangular system: with A[i, j] = b_i exp(g_j+1 + ... + g_i)
    k_i k_j for j < i, (I + A) d = b (v - exp(g_1 + ... + g_i) S^T k_i) for the state S before them. All are solved at
    once, up to S; one chunk after the other, products with the state remain.
    """
    p, c, heads, group, size = v.shape
    width = min(CHUNK, 1 << (c - 1).bit_length())
    count = -(-c // width)
    pad = [(0, 0), (0, count * width - c)]

    def chunked(x: jax.Array) -> jax.Array:
        """[P, C, K, ...] -> [n, P, K, ..., c], but a head's numbers are last."""
        x = jnp.pad(x, pad + [(0, 0)] * (x.ndim - 2)).reshape(p, count, width, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    q, k, v, log_decay, beta = map(chunked, _live(valid, q, k, v, log_decay, beta))
    q, k = (jnp.moveaxis(x, 2, 3) for x in (q, k))  # [n, P, K, c, d_k]
    v = jnp.moveaxis(v, 2, 4)  # [n, P, K, G, c, d_v]
    log_decay, beta = (jnp.moveaxis(x, 2, 4) for x in (log_decay, beta))  # [n, P, K, G, c]

    # What fades from after token j to token i, as a sum: a difference of sums would lose what is small.
    lower = jnp.tril(jnp.ones((width, width)))
    strict = lower - jnp.eye(width)
    fades = _einsum("il,npkgl,lj->npkgij", lower, log_decay, strict)
    ratio = jnp.exp(fades) * lower
    since, left = (jnp.exp(x) for x in (jnp.cumsum(log_decay, axis=-1), fades[..., -1, :]))
    seen = ratio * _einsum("npkid,npkjd->npkij", q, k)[:, :, :, None]
    system = strict * beta[..., None] * ratio * _einsum("npkid,npkjd->npkij", k, k)[:, :, :, None]
    given = beta[..., None] * jnp.concatenate([v, since[..., None] * k[:, :, :, None]], axis=-1)
    solved = lax.linalg.triangular_solve(system, given, left_side=True, lower=True, unit_diagonal=True)
    changes, reads = solved[..., :size], solved[..., size:]

    def step(s: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, since, left, seen, changes, reads = inputs
        change = changes - _einsum("pkgid,pkgdv->pkgiv", reads, s)
        out = since[..., None] * _einsum("pkid,pkgdv->pkgiv", q, s) + _einsum("pkgij,pkgjv->pkgiv", seen, change)
        new = _einsum("pkid,pkgiv->pkgdv", k, left[..., None] * change)
        return since[..., -1, None, None] * s + new, out

    s = state.reshape(p, heads, group, -1, size)
    state, out = lax.scan(step, s, (q, k, since, left, seen, changes, reads), unroll=count == 1)
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(p, count * width, heads, group, size)[:, :c]
    return out, state.reshape(p, heads * group, -1, size)


def _live(live: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
    """In float32, zero where not live [B] or [P, C]: then nothing is written, and nothing fades."""
    return [
        jnp.where(live.reshape(*live.shape, *(1,) * (x.ndim - live.ndim)), x.astype(jnp.float32), 0) for x in inputs
    ]
