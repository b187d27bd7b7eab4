"""The queries of each row's newest positions, by whose attention policies of bounded caches keep cells.

They are stored as they are computed, and weigh the cells only where a row is compacted. So decode steps read no keys
for them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.attention_values import AttentionOptions


def write_queries(
    recent: jax.Array, new: jax.Array, rows: jax.Array, positions: jax.Array, layer: jax.Array | int | None = None
) -> jax.Array:
    """The queries of the last W positions of each row, with all that a step computes of it.

    recent [R, K, W, G * h], or of stacked layers [L, R, K, W, G * h]: position p lies at p mod W. new [T, K, G, h]: of
    rows [T] at positions [T]. Dropped are negative positions, rows that do not exist, and positions that later ones of
    their row take the place of.
    """
    (count, _, window), layers = recent.shape[-4:-1], () if layer is None else (layer,)
    rows = jnp.where((positions >= 0) & (rows < count), rows, count)
    newest = jnp.full((count + 1,), -1, jnp.int32).at[rows].max(positions)
    rows = jnp.where(positions > newest[rows] - window, rows, count)
    values = new.reshape(*new.shape[:2], -1).astype(recent.dtype)
    return recent.at[(*layers, rows, slice(None), positions % window)].set(values, mode="drop")


def recent_weights(
    queries: jax.Array, keys: jax.Array, cells: jax.Array, position: jax.Array, options: AttentionOptions
) -> jax.Array:
    """How the queries of a row's newest W cells weigh its cells: [K, W, G, P] float32, the oldest query first.

    queries [K, W, G * h]: of the row, as `write_queries` stores them. keys [K, P, h]: of P cells, of which the first
    `cells` are there, W or more; others are finite. position: the position of the newest cell. Each query sees the
    cells up to its own. Layers with learned sinks are not for this.
    """
    window, (_, count, size) = queries.shape[1], keys.shape
    number = jnp.arange(window, dtype=jnp.int32) - window + 1
    ordered = jnp.take(queries, (position + number) % window, axis=1).reshape(*queries.shape[:2], -1, size)
    logits = options.scale * jnp.einsum("kwgh,kph->kwgp", ordered, keys, preferred_element_type=jnp.float32)
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    seen = jnp.arange(count, dtype=jnp.int32) < (cells + number)[:, None]
    return jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)
