"""Matrix products of groups of rows, each group with a weight of its own: the experts of a layer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.matmul import precision_of

# Rows of one product: so few that the last of a group is seldom mostly empty, so many that it is bound by compute.
_TILE = 128


def grouped_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, *, most: int, layer: jax.Array | None = None
) -> jax.Array:
    """x [M, I], its rows sorted by group, times w [E, I, *O]: the first sizes[0] rows with w[0], and so on -> [M, *O].

    sizes [E] int32 sum to at most M; rows beyond are in no group and hold anything, in x and in the result. most
    (static): no group is larger. layer: w is [L, E, I, *O], of which this one is used. Only the weights of groups that
    have rows are read.
    """
    *lead, inner = w.shape[: 2 if layer is None else 3]
    outer = w.shape[len(lead) + 1 :]
    if x.shape[1:] != (inner,) or lead[-1:] != [*sizes.shape]:
        raise ValueError(f"grouped_matmul: x {x.shape}, w {w.shape} and {sizes.shape} groups do not go together")
    w = w.reshape(-1, inner, math.prod(outer))  # [L * E, I, O]
    first = 0 if layer is None else layer * sizes.size
    return _by_tiles(x, w, sizes, most, first).reshape(x.shape[0], *outer)


def _by_tiles(x: jax.Array, w: jax.Array, sizes: jax.Array, most: int, first: jax.Array | int) -> jax.Array:
    """One product after the other, each of up to `_TILE` rows of a group: as many as there are. Few rows are one for
    each group that has any."""
    rows, height = x.shape[0], min(most, _TILE)
    tiles = -(-sizes // height)  # of each group
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    number = jnp.arange(min(rows, sizes.size) + rows // height, dtype=jnp.int32)  # of those there are at most
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right"), sizes.size - 1)
    start = starts[group] + (number - (ends - tiles)[group]) * height
    x = jnp.pad(x, ((0, height), (0, 0)))

    def product(i: jax.Array, out: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(x, start[i], height)
        weight = lax.dynamic_index_in_dim(w, first + group[i], keepdims=False)
        y = lax.dot(part, weight, precision=precision_of(x.dtype), preferred_element_type=x.dtype)
        # What it writes beyond its group the next one overwrites.
        return lax.dynamic_update_slice_in_dim(out, y, start[i], 0)

    out = jnp.zeros((rows + height, w.shape[2]), x.dtype)
    return lax.fori_loop(0, ends[-1], product, out)[:rows]
