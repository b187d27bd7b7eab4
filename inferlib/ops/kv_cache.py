"""The caches that attention reads: one layer's arrays, and the places of a row's positions in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.attention_values import KvCache, LatentCache, NewCells, Shaped, shape_of

__all__ = ["KvCache", "LatentCache", "NewCells", "Shaped", "gather_pages", "shape_of"]


def gather_pages(x: jax.Array, pages: jax.Array, layer: jax.Array | int | None = None) -> jax.Array:
    """The cells [B, K, M * S, ...] of rows whose pages of x [N, K, S, ...] are pages [B, M]; of a stack [L, N, ...]
    those of `layer`. Pages that do not exist are any others."""
    x = jnp.asarray(x).at[pages if layer is None else (layer, pages)].get(mode="clip")
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(pages.shape[0], x.shape[1], -1, *x.shape[4:])
