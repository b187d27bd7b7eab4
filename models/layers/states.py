"""What rows keep in recurrent layers (see `models.recurrent`): a `LayerCache` of arrays [N, ...], in a scanned segment
[L, N, ...]. It is read and written where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.batch import StepBatch
from inferlib.models.layers.kv_cache import LayerCache

States = tuple[jax.Array, ...]


def of_rows(cache: LayerCache, rows: int) -> States:
    """Those of the first rows, [B, ...] each."""
    return tuple(_read(x, cache.layer, 0, rows) for x in cache.arrays)


def with_rows(cache: LayerCache, new: Sequence[jax.Array]) -> LayerCache:
    """The cache with those of the first rows replaced."""
    return replace(cache, arrays=tuple(_write(x, cache.layer, 0, s) for x, s in zip(cache.arrays, new, strict=True)))


def of_chunks(cache: LayerCache, batch: StepBatch) -> States:
    """Those of the chunks' rows, [P, ...] each: zeros where a prompt starts."""
    states = []
    for x in cache.arrays:
        held = jnp.concatenate([_read(x, cache.layer, row, 1) for row in batch.chunk_rows])
        begins = (batch.chunk_starts == 0).reshape(-1, *(1,) * (held.ndim - 1))
        states.append(jnp.where(begins, 0, held))
    return tuple(states)


def with_chunks(cache: LayerCache, batch: StepBatch, new: Sequence[jax.Array]) -> LayerCache:
    """The cache with those of the chunks' rows replaced; absent chunks replace none."""
    arrays = []
    for x, states in zip(cache.arrays, new, strict=True):
        for i, row in enumerate(batch.chunk_rows):
            held = _read(x, cache.layer, row, 1)
            x = _write(x, cache.layer, row, jnp.where(batch.chunk_lengths[i] > 0, states[i : i + 1], held))
        arrays.append(x)
    return replace(cache, arrays=tuple(arrays))


def _read(x: jax.Array, layer: jax.Array | None, first: jax.Array | int, rows: int) -> jax.Array:
    if layer is None:
        return lax.dynamic_slice_in_dim(x, first, rows)
    return lax.dynamic_slice(x, (layer, first, *[0] * (x.ndim - 2)), (1, rows, *x.shape[2:]))[0]


def _write(x: jax.Array, layer: jax.Array | None, first: jax.Array | int, new: jax.Array) -> jax.Array:
    new = new.astype(x.dtype)
    if layer is None:
        return new if new.shape == x.shape else lax.dynamic_update_slice_in_dim(x, new, first, axis=0)
    return lax.dynamic_update_slice(x, new[None], (layer, first, *[0] * (x.ndim - 2)))
