"""Helpers of recurrent rules that advance by chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

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
    """`lax.scan` over inputs [n, ...]; a single chunk takes no loop."""
    if inputs[0].shape[0] > 1:
        return lax.scan(step, state, inputs)
    state, out = step(state, tuple(x[0] for x in inputs))
    return state, out[None]


def fades(log_decay: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log_decay [..., c] -> three fading factors: [..., i, j] at token i for the writing of token j, zero for j > i;
    [..., c] at each token for the state before the chunk; and [..., c] after the chunk for the writing of each token.

    The logarithms after token j up to token i are summed: a difference of cumulative sums would lose small logarithms.
    """
    width = log_decay.shape[-1]
    lower = jnp.tril(jnp.ones((width, width)))
    between = einsum("il,...l,lj->...ij", lower, log_decay, lower - jnp.eye(width))
    return jnp.exp(between) * lower, jnp.exp(jnp.cumsum(log_decay, axis=-1)), jnp.exp(between[..., -1, :])
