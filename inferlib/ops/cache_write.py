"""Write new keys, values or latents, or scales of these, into the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cache_write(
    cache: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, *, layer: jax.Array | None = None
) -> jax.Array:
    """Put what is new of token t at page `pages[t]`, slot `slots[t]`.

    cache: [N, K, S, h], or [L, N, K, S, h] with `layer` the layer to write; new: [T, K, h]; both without h for scales.
    pages, slots: [T] int32.
    A page >= N or a slot >= S writes nothing: that is how padding and inactive rows are dropped. Pairs (page, slot)
    are distinct. A donated cache is updated in place.
    """
    # Head by head. For a slice of heads a TPU would lay the whole cache out anew; and the write of one row would become
    # a slice update, of which XLA:CPU makes two, each on a copy of the cache.
    heads = jnp.arange(new.shape[1], dtype=jnp.int32)
    at = (pages[:, None], heads, slots[:, None])
    at = at if layer is None else (layer, *at)
    return cache.at[at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
