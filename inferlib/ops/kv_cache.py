"""The caches that attention reads: one layer's arrays, and the places of a row's positions in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.attention_values import KvCache, LatentCache, NewCells, Shaped, shape_of

__all__ = ["KvCache", "LatentCache", "NewCells", "Shaped", "gather_pages", "shape_of"]


def gather_pages(x: jax.Array, pages: jax.Array) -> jax.Array:
    """The cells [B, K, M * S, ...] of rows whose pages of x [N, K, S, ...] are pages [B, M]."""
    x = jnp.moveaxis(x[pages], 2, 1)
    return x.reshape(pages.shape[0], x.shape[1], -1, *x.shape[4:])
