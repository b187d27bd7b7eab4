"""Arithmetic that TPU kernels share, on scalars and on values repeated in every lane."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, so that differences are
LOG2E = math.log2(math.e)


def div(x: jax.Array | int, by: int) -> Any:
    """x // by, x >= 0; the scalar unit is slow at divisions."""
    if isinstance(x, int):
        return x // by
    return lax.shift_right_logical(x, by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, by)


def rem(x: jax.Array | int, by: int) -> Any:
    """x mod by, x >= 0."""
    return x & (by - 1) if by & (by - 1) == 0 else lax.rem(x, by)


def seldom(condition: jax.Array, act: Callable[[], None]) -> None:
    """`pl.when` for rare cases: a real branch. For `pl.when`, compilers may predicate copies, which then take their
    time even without effect."""
    lax.fori_loop(0, condition.astype(jnp.int32), lambda *_: act(), None)


def first_nonzero(ref, start: Any, count: int) -> jax.Array:
    """The first index from `start` on at which ref [count], in scalar memory, is not 0; `count` if there is none."""

    def is_zero(index: jax.Array) -> jax.Array:
        return (index < count) & (ref[jnp.minimum(index, count - 1)] == 0)

    return lax.while_loop(is_zero, lambda index: index + 1, start)


def wide(x: jax.Array, count: int) -> jax.Array:
    """[R, 128], all lanes alike, or [R, 1] -> [R, count]."""
    x, (tiles, rest) = jnp.broadcast_to(x, (x.shape[0], LANES)), divmod(count, LANES)
    parts = [x] * tiles + ([x[:, :rest]] if rest else [])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def folded(x: jax.Array) -> jax.Array:
    """[R, n] -> [R, 128] with the same sum over lanes."""
    size = x.shape[1]
    if size % LANES:
        x = jnp.concatenate([x, jnp.zeros((x.shape[0], -size % LANES), x.dtype)], axis=1)
    total: Any = sum(x[:, at : at + LANES] for at in range(0, size, LANES))
    return total
