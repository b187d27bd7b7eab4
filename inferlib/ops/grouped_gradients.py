"""Products of groups of rows as in `grouped_matmul`, with gradients: the experts of a model that is trained.

The loop of `grouped_matmul` runs as often as the device says, which JAX does not differentiate. Here the product has a
derivative of its own, by such loops: beside the gradients, memory holds the rows' and a transposed copy of the weights.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.fake_quantized import FakeQuantizedWeight
from inferlib.ops.grouped_matmul import Weight, grouped_matmul, tiles_of
from inferlib.ops.precision import precision_of

# Rows that are summed up at once for the gradient of a weight: each sum reads and writes a whole matrix in float32.
_TILE = 512


def grouped_matmul_with_gradients(
    x: jax.Array,
    w: Weight | FakeQuantizedWeight,
    sizes: jax.Array,
    *,
    most: int,
    rows: jax.Array | None = None,
    layer: jax.Array | None = None,
    backend: str = "xla",
) -> jax.Array:
    """`grouped_matmul` by XLA, with gradients of x and of weights that are arrays or fake-quantised, to the same bits.

    Rows of no group and groups without rows have gradients of zeros. Weights of other kinds, and stacks (`layer`), have
    no gradients. Raises ValueError for a backend that is not "xla", and as `grouped_matmul` does.
    """
    if backend != "xla":
        raise ValueError(f"grouped products have gradients by xla only, not by {backend}")
    if isinstance(w, FakeQuantizedWeight):
        x, w = w.inputs(x), w.values
    if not isinstance(w, jax.Array) or layer is not None:
        return grouped_matmul(x, w, sizes, most=most, rows=rows, layer=layer)
    return _product(x, w, sizes, rows, most)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product(x: jax.Array, w: jax.Array, sizes: jax.Array, rows: jax.Array | None, most: int) -> jax.Array:
    return grouped_matmul(x, w, sizes, most=most, rows=rows)


def _forward(x: jax.Array, w: jax.Array, sizes: jax.Array, rows: jax.Array | None, most: int) -> tuple:
    return _product(x, w, sizes, rows, most), (x, w, sizes, rows)


def _backward(most: int, saved: tuple, slopes: jax.Array) -> tuple:
    """The gradients of x and w. slopes [M, *P, O]: of the result."""
    x, w, sizes, rows = saved
    slopes = slopes.reshape(slopes.shape[0], -1)
    counted = (jnp.arange(slopes.shape[0]) < jnp.sum(sizes))[:, None]
    back = jnp.moveaxis(w, -2, -1).reshape(sizes.size, -1, w.shape[-2])  # [E, P O, I]
    of_rows = jnp.where(counted, grouped_matmul(slopes, back, sizes, most=most), 0)
    of_x = of_rows
    if rows is not None:  # a row of x has as many slopes as its token has experts
        of_x = jnp.zeros(x.shape, jnp.float32).at[rows].add(of_rows.astype(jnp.float32)).astype(x.dtype)
    inputs = x if rows is None else x[rows]
    sums = _outer_products(inputs, slopes, sizes, most).reshape(sizes.size, w.shape[-2], -1, w.shape[-1])
    return of_x, jnp.moveaxis(sums, 1, 2).reshape(w.shape).astype(w.dtype), None, None


_product.defvjp(_forward, _backward)


def _outer_products(x: jax.Array, y: jax.Array, sizes: jax.Array, most: int) -> jax.Array:
    """x [M, I] and y [M, N], both sorted by group -> x^T y of each group's rows, [E, I, N] float32."""
    total, stops = x.shape[0], jnp.cumsum(sizes)
    tiles = tiles_of(sizes, total, min(most, _TILE, total))
    summed = (((0,), (0,)), ((), ()))

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        group, row = tiles.group[i], tiles.at[i] + jnp.arange(tiles.height)
        inside = (row >= tiles.start[i]) & (row < stops[group]) & (i < tiles.used)
        # Both, as what is outside may be NaN.
        a, b = (jnp.where(inside[:, None], lax.dynamic_slice_in_dim(z, tiles.at[i], tiles.height), 0) for z in (x, y))
        new = lax.dot_general(a, b, summed, precision_of(x.dtype), preferred_element_type=jnp.float32)
        new = new + lax.dynamic_index_in_dim(sums, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(sums, new, group, 0)

    zeros = jnp.zeros((sizes.size, x.shape[1], y.shape[1]), jnp.float32)
    return lax.fori_loop(0, tiles.most, add, zeros)
