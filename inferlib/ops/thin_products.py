"""Products with two thin matrices, (x A) B, which are added to the product with a weight: adapters, and branches that
take up the error of rounding.

GPUs run them beside the weight's product, which reads far more: they depend on x, but not on its result. For that,
nothing may join them. XLA would add them inside one of cuBLAS's products, which would wait for them; and next to a
product of cuBLAS others have to fit the multiprocessors that it leaves free. So they are small kernels there, as long
as there are so few rows that reading the weight bounds the step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.by_platform import by_platform
from inferlib.ops.precision import precision_of

ROWS = 128  # most rows of products that run side by side
# Inputs that a program of the first product multiplies. On an H100 programs of 512 took 11 us for 4,096 inputs of one
# row, and those of 128 or 256 under 4.
_INPUTS = 256


def beside(rows: int, dtype: jax.typing.DTypeLike, backend: str | None) -> bool:
    """True if GPUs run thin products beside the weight's. backend: see `inferlib.ops.matmul.matmul`."""
    return rows <= ROWS and dtype == jnp.bfloat16 and backend in (None, "pallas_gpu")


def thin_products(
    x: jax.Array, a: jax.Array, b: jax.Array, keep: jax.Array | None = None, *, backend: str | None
) -> jax.Array:
    """x [T, *I] times A [*I, P, C], then each of the P parts times its B [P, C, *O] -> [T, P, *O] of x's dtype.

    keep [T, C]: which of the C numbers between the products count for a token; all by default. backend: as in
    `inferlib.ops.matmul.matmul`.
    """
    if not beside(x.shape[0], x.dtype, backend):
        return _by_xla(x, a, b, keep)
    operands = x, a, b, *(() if keep is None else (keep,))
    return by_platform(*operands, cuda=by_tiles, default=_by_xla)


def _by_xla(x: jax.Array, a: jax.Array, b: jax.Array, keep: jax.Array | None = None) -> jax.Array:
    options: dict[str, Any] = dict(precision=precision_of(x.dtype), preferred_element_type=x.dtype)
    parts, width = a.shape[-2:]
    inputs = tuple(range(1, x.ndim)), tuple(range(a.ndim - 2))
    low = lax.dot_general(x, a.reshape(*a.shape[:-2], parts * width), (inputs, ((), ())), **options)
    if parts == 1:
        low = low if keep is None else jnp.where(keep, low, 0)
        return lax.dot_general(low, b[0], (((1,), (0,)), ((), ())), **options)[:, None]
    low = low.reshape(-1, parts, width)
    low = low if keep is None else jnp.where(keep[:, None], low, 0)
    return jnp.moveaxis(lax.dot_general(low, b, (((2,), (1,)), ((1,), (0,))), **options), 0, 1)


def by_tiles(
    x: jax.Array, a: jax.Array, b: jax.Array, keep: jax.Array | None = None, *, interpret: bool = False
) -> jax.Array:
    """`thin_products` by the GPU kernel of tiles; the second product's groups are the parts."""
    from inferlib.pallas_kernels.decode_attention_gpu import power_of_two
    from inferlib.pallas_kernels.grouped_matmul_gpu import Blocks, Sorted, grouped_matmul

    (parts, width), rows, outer = a.shape[-2:], x.shape[0], b.shape[2:]
    x, tile = x.reshape(rows, -1), 16 if rows <= 16 else 64
    first = Blocks(tile, min(power_of_two(parts * width), 64), 128, max(1, x.shape[1] // _INPUTS))
    second = Blocks(tile, 128, min(power_of_two(width), 128), stages=2)
    product = partial(grouped_matmul, scales=None, parts=1, interpret=interpret)
    of_all, of_parts = (Sorted(jnp.full((count,), rows, jnp.int32)) for count in (1, parts))
    low = product(x, a.reshape(1, -1, parts * width), groups=of_all, chosen=first).reshape(rows, parts, width)
    low = jnp.moveaxis(low, 1, 0)
    low = (low if keep is None else jnp.where(keep, low, 0)).reshape(parts * rows, width)
    y = product(low, b.reshape(parts, width, -1), groups=of_parts, chosen=second)
    return jnp.moveaxis(y.reshape(parts, rows, *outer), 0, 1)
