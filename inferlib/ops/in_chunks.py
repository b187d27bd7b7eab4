"""Helpers of recurrent rules that advance by chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.by_platform import by_platform

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def live_only(live: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
    """The inputs in float32, with zeros where `live` [B] or [P, C] is False, so that nothing is written and nothing
    fades."""
    return [
        jnp.where(live.reshape(*live.shape, *(1,) * (x.ndim - live.ndim)), x.astype(jnp.float32), 0) for x in inputs
    ]


def in_chunks(x: jax.Array, most: int) -> jax.Array:
    """Cut [P, C, ...] into chunks [n, P, c, ...] of at most `most` tokens; zeros pad the last one."""
    width = min(most, 1 << (x.shape[1] - 1).bit_length())
    count = -(-x.shape[1] // width)
    x = jnp.pad(x, [(0, 0), (0, count * width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)


def over_chunks(
    step: Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]],
    state: jax.Array,
    inputs: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """`lax.scan` over inputs [n, ...]; a single chunk takes no loop, and Trainium has none."""
    if inputs[0].shape[0] > 1:
        return scan(step, state, inputs)
    state, out = step(state, tuple(x[0] for x in inputs))
    return state, out[None]


def scan(step: Callable, state: Any, inputs: Any) -> Any:
    """`lax.scan`, which is unrolled on Trainium: its compiler takes no loops."""
    loop, unrolled = partial(lax.scan, step), partial(lax.scan, step, unroll=True)
    return by_platform(state, inputs, neuron=unrolled, default=loop)


def solve_unit_lower(system: jax.Array, targets: jax.Array) -> jax.Array:
    """The x [..., c, m] of (I + system) x = targets, of whose system [..., c, c] only what is below the diagonal is
    read. c is a power of two."""

    def by_substitution(system, targets):
        return lax.linalg.triangular_solve(system, targets, left_side=True, lower=True, unit_diagonal=True)

    def by_blocks(system, targets):
        return einsum("...ij,...jm->...im", unit_lower_inverse(system), targets)

    # XLA substitutes in a loop, which Trainium has not.
    return by_platform(system, targets, neuron=by_blocks, default=by_substitution)


def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """The inverse of I + below [..., c, c], of which only what is below the diagonal is read; c is a power of two.

    By blocks that double: the inverse of [[A, 0], [B, C]] is [[A^-1, 0], [-C^-1 B A^-1, C^-1]]. There are log2(c)
    steps, each a few products.
    """
    width = below.shape[-1]
    inverse = jnp.ones((*below.shape[:-2], width, 1, 1), below.dtype)  # of each block on the diagonal
    while (size := inverse.shape[-1]) < width:
        pairs = width // (2 * size)
        blocks = below.reshape(*below.shape[:-2], pairs, 2, size, pairs, 2, size)
        corners = jnp.stack([blocks[..., n, 1, :, n, 0, :] for n in range(pairs)], axis=-3)
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corners = -einsum("...ij,...jk,...kl->...il", lower, corners, upper)
        rows = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1), jnp.concatenate([corners, lower], axis=-1)
        inverse = jnp.concatenate(rows, axis=-2)
    return inverse[..., 0, :, :]


def fades(log_decay: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log_decay [..., c] -> three fading factors: [..., i, j] at token i for the writing of token j, zero for j > i;
    [..., c] at each token for the state before the chunk; and [..., c] after the chunk for the writing of each token.

    The logarithms after token j up to token i are summed: a difference of cumulative sums would lose small logarithms.
    """
    width = log_decay.shape[-1]
    lower = jnp.tril(jnp.ones((width, width)))
    between = einsum("il,...l,lj->...ij", lower, log_decay, lower - jnp.eye(width))
    return jnp.exp(between) * lower, jnp.exp(jnp.cumsum(log_decay, axis=-1)), jnp.exp(between[..., -1, :])
