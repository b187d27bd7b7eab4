"""A short causal convolution, each channel by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def causal_conv(x: jax.Array, tail: jax.Array, weight: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convolve C consecutive tokens of each of P rows.

    x: [P, C, *c]; tail: [P, k - 1, *c], the inputs before them, zeros where there were none; weight: [k, *c], whose
    last tap multiplies the token itself; lengths: [P] int32, the number of valid tokens, which come first. Returns out
    [P, C, *c] float32, and the tail after the valid tokens. Invalid tokens change nothing, whatever their inputs.
    """
    taps, count = weight.shape[0], x.shape[1]
    inputs = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    out: Any = sum(inputs[:, i : i + count].astype(jnp.float32) * weight[i].astype(jnp.float32) for i in range(taps))
    ones = (1,) * (x.ndim - 2)
    if count == 1:
        return out, jnp.where(lengths.reshape(-1, 1, *ones) > 0, inputs[:, 1:].astype(tail.dtype), tail)
    last = (lengths[:, None] + jnp.arange(taps - 1)).reshape(-1, taps - 1, *ones)
    return out, jnp.take_along_axis(inputs, last, axis=1).astype(tail.dtype)
