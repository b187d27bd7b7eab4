"""Matrix products of groups of rows, each group with a weight of its own: the experts of a layer.

`jax.lax.ragged_dot` is not among the forms: XLA:CPU multiplies every row by every group, and the TPU's kernel for it
wants weights in an order of memory that others do not, which costs a copy of all experts.
"""

from __future__ import annotations

import math
from functools import partial

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
    have rows are read; accumulated in float32.
    """
    *lead, inner = w.shape[: 2 if layer is None else 3]
    if x.shape[1:] != (inner,) or lead[-1:] != [*sizes.shape]:
        raise ValueError(f"grouped_matmul: x {x.shape}, w {w.shape} and {sizes.shape} groups do not go together")
    outer = w.shape[len(lead) + 1 :]
    first = jnp.int32(0) if layer is None else layer * sizes.size
    w = w.reshape(-1, inner, *outer)  # [L * E, I, *O]; what follows E is merged where it is used, which copies nothing
    few = x.shape[0] <= sizes.size
    forms = {
        "default": partial(_by_tiles, most=most),
        "cuda": _by_rows if few else partial(_by_tiles, most=most, counted=True),
    }
    return lax.platform_dependent(x, w, sizes, first, **forms).reshape(-1, *outer)


def _by_tiles(
    x: jax.Array, w: jax.Array, sizes: jax.Array, first: jax.Array, *, most: int, counted: bool = False
) -> jax.Array:
    """One product after the other, each of up to `_TILE` rows of a group: as many as there are. Few rows are one for
    each group that has any.

    counted: as many as there can be, where a device loop would wait for the host to look at its condition.
    """
    rows, height = x.shape[0], min(most, _TILE)
    tiles = -(-sizes // height)  # of each group
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    count = min(rows, sizes.size) + rows // height  # at most
    number = jnp.arange(count, dtype=jnp.int32)
    group = _group_of(number, tiles)
    start = starts[group] + (number - (ends - tiles)[group]) * height
    start = jnp.where(number < ends[-1], start, rows)
    x = jnp.pad(x, ((0, height), (0, 0)))

    def product(i: jax.Array, out: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(x, start[i], height)
        weight = lax.dynamic_index_in_dim(w, first + group[i], keepdims=False).reshape(w.shape[1], -1)
        y = lax.dot(part, weight, precision=precision_of(x.dtype), preferred_element_type=x.dtype)
        # What it writes beyond its group the next one overwrites.
        return lax.dynamic_update_slice_in_dim(out, y, start[i], 0)

    out = jnp.zeros((rows + height, math.prod(w.shape[2:])), x.dtype)
    return lax.fori_loop(0, count if counted else ends[-1], product, out)[:rows]


def _by_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, first: jax.Array) -> jax.Array:
    """Every row with the weight of its group, all at once: XLA:GPU fuses the choice with multiplication and sum."""
    chosen = w[first + _group_of(jnp.arange(x.shape[0], dtype=jnp.int32), sizes)]
    products = chosen.astype(jnp.float32) * x.astype(jnp.float32).reshape(*x.shape, *[1] * (w.ndim - 2))
    return jnp.sum(products, axis=1).astype(x.dtype).reshape(x.shape[0], -1)


def _group_of(number: jax.Array, sizes: jax.Array) -> jax.Array:
    """The group that each of these numbers, counted through all groups, falls into; the last, if none."""
    found = jnp.searchsorted(jnp.cumsum(sizes), number, side="right", method="compare_all")
    return jnp.minimum(found, sizes.size - 1).astype(jnp.int32)
