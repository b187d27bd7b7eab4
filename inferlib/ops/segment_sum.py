"""Weighted sums over segments of rows: the experts' outputs for each token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.loops import expected_trips

TILE = 256  # segments summed together: enough that loops cost little, and few enough to stay on chip


@dataclass(frozen=True)
class Segments:
    """T segments of unequal length. Segment t has the rows `places[p]` times `factors[p]`, in this order, for counts[t]
    values of p from starts[t] on.

    T is a multiple of `TILE`; places [M] int32, factors [M] float32 (None: ones), starts and counts [T] int32.
    """

    places: jax.Array
    factors: jax.Array | None
    starts: jax.Array
    counts: jax.Array


def segment_sum(
    into: jax.Array,
    rows: jax.Array,
    segments: Segments,
    first: jax.Array | int,
    stop: jax.Array | int,
    *,
    tiles: float,
    longest: float,
) -> jax.Array:
    """into [T, *D], rows [M, *E] -> [T, *D]: `into` with the sums of the segments in tiles `first` to `stop` - 1, each
    of `TILE` segments, accumulated in float32 and reshaped.

    Rows of no segment may hold anything. tiles, longest: the number of tiles, and the length of a tile's longest
    segment, if load is balanced; only reports of compiled programs use them.
    """
    places, factors, starts, counts = segments.places, segments.factors, segments.starts, segments.counts
    each = (TILE, *[1] * (rows.ndim - 1))

    def tile(i: jax.Array, into: jax.Array) -> jax.Array:
        start, count = (lax.dynamic_slice_in_dim(a, i * TILE, TILE) for a in (starts, counts))

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            inside = (j < count).reshape(each)
            p = jnp.where(j < count, start + j, 0)
            row = rows[places[p]].astype(jnp.float32)
            row = row if factors is None else row * factors[p].reshape(each)
            return total + jnp.where(inside, row, 0)

        with expected_trips(longest):
            total = lax.fori_loop(0, jnp.max(count), add, jnp.zeros((TILE, *rows.shape[1:]), jnp.float32))
        total = total.astype(into.dtype).reshape(TILE, *into.shape[1:])
        return lax.dynamic_update_slice_in_dim(into, total, i * TILE, 0)

    with expected_trips(tiles):
        return lax.fori_loop(first, stop, tile, into)
