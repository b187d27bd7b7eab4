"""How much attention each cell of the cache got so far, which policies of bounded caches keep cells by.

Kernels of attention do not return their weights. So they are computed again by XLA, from the queries of a step and the
keys: each step reads the keys of its rows twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions
from inferlib.ops.kv_cache import gather_pages


def add_mass(
    mass: jax.Array,
    keys: jax.Array,
    pages: jax.Array,
    queries: tuple[jax.Array, jax.Array, jax.Array],
    options: AttentionOptions,
    layer: jax.Array | int | None = None,
) -> jax.Array:
    """The mass with the attention weights of new queries added; of new cells it starts at 0.

    mass [N, K, S] float32, or of stacked layers [L, N, K, S]; keys [N, K, S, h] likewise, the new cells among them;
    pages [B, M]: of different rows. queries: q [B, C, K, G, h], of consecutive tokens; the position [B] of the first
    one; and how many [B] of them count, 0 for rows that get none. A query sees all positions up to its own. The weights
    of a KV head's queries are summed.
    """
    (q, first, count), slots = queries, mass.shape[-1]
    cells = gather_pages(keys, pages, layer)
    at = jnp.arange(cells.shape[2], dtype=jnp.int32)
    number = jnp.arange(q.shape[1], dtype=jnp.int32)
    seen = (at <= (first[:, None] + number)[..., None]) & (number < count[:, None])[..., None]
    there = at < (first + count)[:, None]
    cells = jnp.where(there[:, None, :, None], cells, 0)

    def of_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, keys, sinks = head
        logits = options.scale * jnp.einsum("bcgh,bph->bcgp", q, keys, preferred_element_type=jnp.float32)
        if options.softcap is not None:
            logits = options.softcap * jnp.tanh(logits / options.softcap)
        logits = jnp.where(seen[:, :, None], logits, -jnp.inf)
        total = jnp.logaddexp(jax.nn.logsumexp(logits, axis=-1), sinks)
        weights = jnp.exp(logits - jnp.where(jnp.isfinite(total), total, 0)[..., None])
        return jnp.sum(weights, axis=(1, 2))

    sinks = jnp.full(q.shape[2:4], -jnp.inf) if options.sinks is None else options.sinks.astype(jnp.float32)
    added = lax.map(of_head, (jnp.moveaxis(q, 2, 0), jnp.moveaxis(cells, 1, 0), sinks))
    old = jnp.where(at < first[:, None, None], gather_pages(mass, pages, layer), 0)
    new = (old + jnp.moveaxis(added, 0, 1)).reshape(*old.shape[:2], -1, slots)
    column, none = jnp.arange(pages.shape[1], dtype=jnp.int32), mass.shape[-3]
    written = jnp.where(column * slots < (first + count)[:, None], pages, none)
    index = written if layer is None else (layer, written)
    return mass.at[index].set(jnp.moveaxis(new, 2, 1), mode="drop")
