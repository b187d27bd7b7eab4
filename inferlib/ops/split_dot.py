"""Products of few rows on GPUs, by XLA, as split-K partial sums that the next kernel adds up.

XLA splits such a product by itself and adds up the sums in a launch of its own. With the splits written out, the kernel
that needs the result adds them: attention, the residual with the next norm, or the feed-forward's activation. A layer
of Llama-3-8B then has 9 launches instead of 12 to 14.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.precision import precision_of
from inferlib.pallas_kernels.processors_gpu import PROCESSORS

ROWS = 16  # up to which a launch takes longer than it takes to write and read sums in float32
_OUTPUTS = 64  # of a tile of XLA's kernels
_TILES = 384  # tiles that fill the GPU
_LEAST = 512  # inputs of a split
_HALVED = 4096  # least inputs of a product in two halves


def unsupported(rows: int, dtype: jax.typing.DTypeLike, w: jax.Array) -> str | None:
    """Why a product of `rows` rows of a dtype with a weight is not made so; None if it is. A norm without its factor,
    which the next product then reads, may be too large for float16."""
    if jnp.dtype(dtype) != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        return f"products of {jnp.dtype(dtype).name} with {w.dtype.name}"
    return None if rows <= ROWS else f"{rows} rows"


def splits(inputs: int, outputs: int) -> int:
    """Parts of the inputs that are summed apart, so that the tiles of all fill the GPU."""
    count, tiles = 1, -(-outputs // _OUTPUTS)
    while count * tiles < _TILES and inputs % (2 * count) == 0 and inputs >= 2 * count * _LEAST:
        count *= 2
    return count


def halved(rows: int, inputs: int, outputs: int) -> bool:
    """True if a product of so many rows is made as the sum of two, of half the inputs each: its tiles of 64 rows and 64
    outputs are fewer than the processors of an H100 or H200. cuBLAS alone fills such a GPU less, or shares the inputs
    as well and adds the sums in a launch of its own.

    Eight tokens of each of 16 rows of Llama-3-8B on one H200: 6.35 ms a step without, 6.15 with. With 64 rows two
    products took longer than one.
    """
    even = inputs >= _HALVED and inputs % 2 == 0
    return even and 64 < rows <= 128 and 2 * -(-outputs // _OUTPUTS) <= PROCESSORS


def partial_products(x: jax.Array, w: jax.Array, count: int | None = None) -> jax.Array:
    """x [T, I] times w [I, O] -> partial sums [S, T, O] float32. count: S, by default `splits`; it divides I.

    A single row is two of half its size, whose products are added like others: XLA would make multiplications and sums
    of a product of one row, and transpose the weight for them.
    """
    (rows, inputs), outputs = x.shape, w.shape[1]
    count = count or splits(inputs, outputs)
    x = jnp.broadcast_to(x * 0.5, (2, inputs)) if rows == 1 else x
    x, w = x.reshape(x.shape[0], count, -1), w.reshape(count, -1, outputs)
    dimensions = (((2,), (1,)), ((1,), (0,)))
    y = lax.dot_general(x, w, dimensions, precision_of(x.dtype), preferred_element_type=jnp.float32)
    return y.reshape(-1, rows, outputs)
