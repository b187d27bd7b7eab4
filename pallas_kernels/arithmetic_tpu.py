"""Arithmetic that TPU kernels share: of scalars, and of values that are kept once for each lane."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128


def div(x: jax.Array, by: int) -> jax.Array:
    """x // by, x >= 0; the scalar unit is slow at divisions."""
    return lax.shift_right_logical(x, by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, by)


def rem(x: jax.Array, by: int) -> jax.Array:
    """x mod by, x >= 0."""
    return x & (by - 1) if by & (by - 1) == 0 else lax.rem(x, by)


def wide(x: jax.Array, count: int) -> jax.Array:
    """[R, 128], all lanes alike -> [R, count], a multiple of 128."""
    return x if count == LANES else jnp.concatenate([x] * (count // LANES), axis=1)


def folded(x: jax.Array) -> jax.Array:
    """[R, n], n a multiple of 128 -> [R, 128] with the same sum over lanes."""
    return sum(x[:, at : at + LANES] for at in range(0, x.shape[1], LANES))
