"""Write new keys, values or latents, or scales of these, into the cache."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def cache_write(
    cache: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, *, layer: jax.Array | None = None
) -> jax.Array:
    """Put what is new of token t at page `pages[t]`, slot `slots[t]`.

    cache: [N, K, S, h], or [L, N, K, S, h] with `layer` the layer to write; new: [T, K, h]; pages, slots: [T] int32.
    A page >= N or a slot >= S writes nothing: that is how padding and inactive rows are dropped. Pairs (page, slot)
    are distinct. A donated cache is updated in place.
    """
    # Head by head. For a slice of heads a TPU would lay the whole cache out anew; and the write of one row would become
    # a slice update, of which XLA:CPU makes two, each on a copy of the cache.
    heads = jnp.arange(new.shape[1], dtype=jnp.int32)
    at = (pages[:, None], heads, slots[:, None])
    at = at if layer is None else (layer, *at)
    return cache.at[at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)


def scale_write(
    scales: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, *, layer: jax.Array | None = None
) -> jax.Array:
    """As `cache_write`, of positive numbers: scales [N, K, S] or [L, N, K, S], new [T, K]."""
    stacked = scales[None] if layer is None else scales
    layer = jnp.int32(0) if layer is None else layer
    written = lax.platform_dependent(stacked, new, pages, slots, layer, tpu=_by_runs, default=_one_by_one)
    return written.reshape(scales.shape)


def _one_by_one(scales: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, layer: jax.Array) -> jax.Array:
    return cache_write(scales, new, pages, slots, layer=layer)


def _by_runs(scales: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, layer: jax.Array) -> jax.Array:
    """A TPU writes runs of lanes in place, and lays all scales out anew to write single numbers: so the runs of 128 in
    which there are tokens are read, changed, and written back by the first of their tokens."""
    count, (*_, rows, heads, size) = pages.size, scales.shape
    lanes = math.gcd(size, 128)
    run, head = slots // lanes, jnp.arange(heads, dtype=jnp.int32)
    first = jnp.argmax((pages[:, None] == pages) & (run[:, None] == run), axis=1).astype(jnp.int32)
    unchanged = jnp.full((count, heads, lanes), -1.0, scales.dtype)
    changed = unchanged.at[first[:, None], head, (slots % lanes)[:, None]].set(new)
    pages = jnp.where(first == jnp.arange(count), pages, rows)
    parts = (layer, pages[:, None], head, (run * lanes)[:, None])
    at = jnp.stack([jnp.broadcast_to(x, (count, heads)) for x in parts], axis=-1)
    taken = lax.GatherDimensionNumbers((2,), collapsed_slice_dims=(0, 1, 2), start_index_map=(0, 1, 2, 3))
    old = lax.gather(scales, at, taken, (1, 1, 1, lanes), mode="clip")
    put = lax.ScatterDimensionNumbers((2,), inserted_window_dims=(0, 1, 2), scatter_dims_to_operand_dims=(0, 1, 2, 3))
    return lax.scatter(scales, at, jnp.where(changed < 0, old, changed), put, mode="drop", unique_indices=True)
