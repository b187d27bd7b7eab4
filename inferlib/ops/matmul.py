"""Matrix product of activations and a weight."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def precision_of(dtype) -> lax.Precision | None:
    """Float32 means float32: GPUs and TPUs would otherwise round the operands to tf32 or bf16."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def matmul(x: jax.Array, w: jax.Array, *, contract: int = 1, out_dtype=None) -> jax.Array:
    """x [T, *I] times w [*I, *O] -> [T, *O], accumulated in float32.

    contract: how many leading dimensions of `w` (and trailing of `x`) are summed over.
    out_dtype: dtype of the result; x's by default.
    """
    inner, outer = w.shape[:contract], w.shape[contract:]
    if x.shape[1:] != inner:
        raise ValueError(f"matmul: x {x.shape} does not end in the {contract} leading dimensions of w {w.shape}")
    y = lax.dot_general(
        x.reshape(x.shape[0], -1),
        w.reshape(math.prod(inner), math.prod(outer)),
        (((1,), (0,)), ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )
    return y.reshape(x.shape[0], *outer)
