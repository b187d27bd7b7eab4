"""The gated delta rule: for each token S <- exp(g) S, then S <- S + k (b (v - S^T k))^T, and the output is S^T q.

After Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464); by chunks as in Yang et al. 2024, "Parallelizing
Linear Transformers with the Delta Rule" (arXiv 2406.06484). Letters: K key heads with G value heads each, d_k and d_v
their sizes; queries and keys are unit vectors, queries scaled. Everything is computed in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.ops.in_chunks import einsum, fades, in_chunks, live_only, over_chunks, solve_unit_lower

CHUNK = 64  # tokens whose updates become products; longer chunks do more work in all, shorter ones take more steps


def gated_delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token for each of B rows.

    q, k: [B, K, d_k]; v: [B, K, G, d_v]; log_decay, beta: [B, K, G]; state: [B, K * G, d_k, d_v] float32; live: [B]
    bool. Returns out [B, K, G, d_v] float32 and the new state. Rows that are not live keep their state and return
    zeros, whatever their inputs.
    """
    b, heads, group, size = v.shape
    q, k, v, log_decay, beta = live_only(live, q, k, v, log_decay, beta)
    s = state.reshape(b, heads, group, -1, size)
    old = jnp.where(live[:, None, None, None, None], s, 0.0)

    def read(x: jax.Array) -> jax.Array:
        return jnp.sum(old * x[:, :, None, :, None], axis=3)

    decay = jnp.exp(log_decay)[..., None]
    change = beta[..., None] * (v - decay * read(k))
    # Both products read the state before the token, so that it is loaded once.
    out = decay * read(q) + change * jnp.sum(q * k, axis=-1)[..., None, None]
    new = decay[..., None] * old + k[:, :, None, :, None] * change[..., None, :]
    return out, jnp.where(live[:, None, None, None, None], new, s).reshape(state.shape)


def gated_delta_chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C consecutive tokens for each of P rows.

    q, k: [P, C, K, d_k]; v: [P, C, K, G, d_v]; log_decay, beta: [P, C, K, G]; state: [P, K * G, d_k, d_v] float32;
    valid: [P, C] bool. Returns out [P, C, K, G, d_v] float32 and the state after the last token. Invalid tokens change
    nothing, whatever their inputs, and their outputs are undefined.

    Within CHUNK tokens the changes d to the state solve a triangular system: with A[i, j] = b_i exp(g_j+1 + ... + g_i)
    k_i k_j for j < i, (I + A) d = b (v - exp(g_1 + ... + g_i) S^T k_i) for the state S before them. The systems of all
    chunks are solved at once, with S left open; then products with the state remain, one chunk after the other.
    """
    p, c, heads, group, size = v.shape
    q, k, v, log_decay, beta = (in_chunks(x, CHUNK) for x in live_only(valid, q, k, v, log_decay, beta))
    count, width = q.shape[0], q.shape[2]
    q, k = (jnp.moveaxis(x, 2, 3) for x in (q, k))  # [n, P, K, c, d_k]
    v = jnp.moveaxis(v, 2, 4)  # [n, P, K, G, c, d_v]
    log_decay, beta = (jnp.moveaxis(x, 2, 4) for x in (log_decay, beta))  # [n, P, K, G, c]
    ratio, since, left = fades(log_decay)
    strict = jnp.tril(jnp.ones((width, width)), -1)
    seen = ratio * einsum("npkid,npkjd->npkij", q, k)[:, :, :, None]
    system = strict * beta[..., None] * ratio * einsum("npkid,npkjd->npkij", k, k)[:, :, :, None]
    targets = beta[..., None] * jnp.concatenate([v, since[..., None] * k[:, :, :, None]], axis=-1)
    changes, reads = jnp.split(solve_unit_lower(system, targets), [size], axis=-1)

    def step(s: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, since, left, seen, changes, reads = inputs
        change = changes - einsum("pkgid,pkgdv->pkgiv", reads, s)
        out = since[..., None] * einsum("pkid,pkgdv->pkgiv", q, s) + einsum("pkgij,pkgjv->pkgiv", seen, change)
        new = einsum("pkid,pkgiv->pkgdv", k, left[..., None] * change)
        return since[..., -1, None, None] * s + new, out

    s = state.reshape(p, heads, group, -1, size)
    state, out = over_chunks(step, s, (q, k, since, left, seen, changes, reads))
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(p, count * width, heads, group, size)[:, :c]
    return out, state.reshape(p, heads * group, -1, size)
