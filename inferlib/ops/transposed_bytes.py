"""A matrix of bytes, transposed four at a time.

Tensor cores multiply operands of eight bits whose summed dimension is the minor one. A weight lies the other way. Left
to itself, XLA:GPU transposes it byte by byte, at less than a tenth of the memory's bandwidth: on an H200, 0.76 ms for
the 117 MB of Llama-3-8B's gate and up, and 0.07 ms in words of 32 bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

_BYTES = 4  # of a word


def transposed(x: jax.Array) -> jax.Array:
    """x [I, O] of a dtype of eight bits as [O, I], with I minor in memory. I is a multiple of 4."""
    inner, outer = x.shape
    each = lax.bitcast_convert_type(x, jnp.uint8).reshape(inner // _BYTES, _BYTES, outer).astype(jnp.uint32)
    words = each[:, 0]
    for i in range(1, _BYTES):
        words |= each[:, i] << (8 * i)
    # Otherwise XLA moves the transpose to the bytes, either those before or those after.
    row_major = Layout((0, 1))
    words = with_layout_constraint(with_layout_constraint(words, row_major).T, row_major)
    return lax.bitcast_convert_type(words, x.dtype).reshape(outer, inner)


def transposable(rows: int) -> bool:
    """Whether `transposed` takes a matrix of `rows` rows."""
    return rows % _BYTES == 0
