"""The caches that attention reads: one layer's arrays, and the places of a row's positions in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.attention_values import KvCache, LatentCache, NewCells, Shaped, shape_of

__all__ = ["KvCache", "LatentCache", "NewCells", "Shaped", "cells_of_rows", "gather_pages", "shape_of"]


def cells_of_rows(cache: KvCache, x: jax.Array, rows: jax.Array) -> jax.Array:
    """The cells [P, K, slots, ...] of rows [P] in one of the cache's arrays. Rows that do not exist are any others."""
    slots, pages = cache.slots, cache.pages
    if pages is None:
        x = cache.of_layer(x)
        return x[:, :, :slots][jnp.minimum(rows, x.shape[0] - 1)]
    return gather_pages(x, pages[jnp.minimum(rows, pages.shape[0] - 1)], cache.layer)[:, :, :slots]


def gather_pages(x: jax.Array, pages: jax.Array, layer: jax.Array | int | None = None) -> jax.Array:
    """The cells [B, K, M * S, ...] of rows whose pages of x [N, K, S, ...] are pages [B, M]; of a stack [L, N, ...]
    those of `layer`. Pages that do not exist are any others."""
    x = jnp.asarray(x).at[pages if layer is None else (layer, pages)].get(mode="clip")
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(pages.shape[0], x.shape[1], -1, *x.shape[4:])
