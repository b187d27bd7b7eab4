"""State-space duality: for each token S <- exp(g) S + v k^T, and the output is S q.

After Dao & Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), whose C, B and A dt are q, k and g here, and whose
dt x is v. Letters: K key heads with G value heads each, d_k and d_v their sizes. Everything is computed in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.ops.in_chunks import einsum, fades, in_chunks, live_only, over_chunks

CHUNK = 128  # tokens that attend to each other; longer chunks do more work in all, shorter ones take more steps


def state_space_step(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, state: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token for each of B rows.

    q, k: [B, K, d_k]; v: [B, K, G, d_v]; log_decay: [B, K, G]; state: [B, K * G, d_v, d_k] float32; live: [B] bool.
    Returns out [B, K, G, d_v] float32 and the new state. Rows that are not live keep their state and return zeros,
    whatever their inputs.
    """
    q, k, v, log_decay = live_only(live, q, k, v, log_decay)
    s, rows = state.reshape(*v.shape, -1), live[:, None, None, None, None]
    old = jnp.where(rows, s, 0.0)
    decay = jnp.exp(log_decay)[..., None]
    # Both products read the state before the token, so that it is loaded once.
    out = decay * jnp.sum(old * q[:, :, None, None], axis=-1) + v * jnp.sum(q * k, axis=-1)[..., None, None]
    new = decay[..., None] * old + v[..., None] * k[:, :, None, None]
    return out, jnp.where(rows, new, s).reshape(state.shape)


def state_space_chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, state: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """C consecutive tokens for each of P rows.

    q, k: [P, C, K, d_k]; v: [P, C, K, G, d_v]; log_decay: [P, C, K, G]; state: [P, K * G, d_v, d_k] float32; valid: [P,
    C] bool. Returns out [P, C, K, G, d_v] float32 and the state after the last token. Invalid tokens change nothing,
    whatever their inputs, and their outputs are undefined.

    Within a chunk each token attends to the tokens before it, by products that are weighted by the fading in between;
    the state carries earlier tokens.
    """
    p, c, heads, group, size = v.shape
    q, k, v, log_decay = (in_chunks(x, CHUNK) for x in live_only(valid, q, k, v, log_decay))
    ratio, since, left = fades(jnp.moveaxis(log_decay, 2, 4))
    since, left = (jnp.moveaxis(x, 4, 2)[..., None] for x in (since, left))  # [n, P, c, K, G, 1]
    seen = ratio * einsum("npikd,npjkd->npkij", q, k)[:, :, :, None]
    within = einsum("npkgij,npjkgv->npikgv", seen, v)

    def step(s: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, since, left = inputs
        out = since * einsum("pikd,pkgvd->pikgv", q, s)
        return since[:, -1, ..., None] * s + einsum("pikgv,pikd->pkgvd", left * v, k), out

    s = state.reshape(p, heads, group, size, -1)
    state, before = over_chunks(step, s, (q, k, v, since, left))
    out = jnp.moveaxis(within + before, 0, 1).reshape(p, -1, heads, group, size)[:, :c]
    return out, state.reshape(p, heads * group, size, -1)
