"""Write new keys and values into the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cache_write(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Put token t's key and value at page `pages[t]`, slot `slots[t]`.

    k_cache, v_cache: [N, K, S, h], or [L, N, K, S, h] with `layer` the layer to write; k, v: [T, K, h];
    pages, slots: [T] int32. A page >= N or a slot >= S writes nothing: that is how padding and
    inactive rows are dropped. Pairs (page, slot) are distinct. Donated caches are updated in place.
    """
    # Head by head. For a slice of heads a TPU would lay the whole cache out anew; and the write of one row would become
    # a slice update, of which XLA:CPU makes two, each on a copy of the cache.
    heads = jnp.arange(k.shape[1], dtype=jnp.int32)
    at = (pages[:, None], heads, slots[:, None])
    at = at if layer is None else (layer, *at)

    def put(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)

    return put(k_cache, k), put(v_cache, v)
