"""Coordinate descent on a rounded matrix (Behdin et al. 2023, "QuantEase", https://arxiv.org/abs/2309.01885).

GPTQ decides on each weight once, when the weights behind it are not rounded yet. From its result on, each weight takes
the value that is best given all others, several times over; and so does each scale.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.ops.quantized import Scheme, round_scales, round_values

SWEEPS = 4


@partial(jax.jit, static_argnames=("scheme",))
def descend(
    w: jax.Array, values: jax.Array, scales: jax.Array, h: jax.Array, scheme: Scheme
) -> tuple[jax.Array, jax.Array]:
    """Values [I, O] and scales [I / group, O] of which no output loses more than before, by h.

    w [I, O]: the matrix; h [I, I]: positive definite, so damped. Scales that are powers of two stay as they are.
    """
    groups = scales.shape[0]
    size = w.shape[0] // groups
    # H times what is missing of w: minus half the gradient of the loss by the rounded matrix.
    missing = w - values * jnp.repeat(scales, size, axis=0)
    rest = jnp.matmul(h, missing, precision=lax.Precision.HIGHEST)

    def group(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rest, values, scales = carry
        at = number % groups
        near, old, strip = (lax.dynamic_slice_in_dim(x, at * size, size) for x in (rest, values, h))
        corner, scale = lax.dynamic_slice_in_dim(strip, at * size, size, axis=1), scales[at]
        near, new = _best_values(near, old, scale, corner, np.dtype(scheme.values))
        better = scale if scheme.scales == "float8_e8m0fnu" else _best_scale(near, new, scale, corner, scheme)
        rest = rest - jnp.matmul(strip.T, new * better - old * scale, precision=lax.Precision.HIGHEST)
        return rest, lax.dynamic_update_slice_in_dim(values, new, at * size, 0), scales.at[at].set(better)

    return lax.fori_loop(0, SWEEPS * groups, group, (rest, values, scales))[1:]


def _best_values(
    rest: jax.Array, values: jax.Array, scale: jax.Array, corner: jax.Array, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """One weight of a group after the other. corner: the part of H of the group; rest [group, O] is kept up to date."""

    def one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, values = carry
        new = round_values(values[i] + rest[i] / (corner[i, i] * scale), dtype)
        return rest - corner[:, i, None] * ((new - values[i]) * scale), values.at[i].set(new)

    return lax.fori_loop(0, values.shape[0], one, (rest, values))


def _best_scale(rest: jax.Array, values: jax.Array, scale: jax.Array, corner: jax.Array, scheme: Scheme) -> jax.Array:
    """The scales [O] of a group by least squares; where that leaves none, as they were."""
    square = jnp.sum(values * jnp.matmul(corner, values, precision=lax.Precision.HIGHEST), axis=0)
    step = jnp.sum(values * rest, axis=0) / jnp.where(square > 0, square, 1.0)
    better = round_scales(scale + step, scheme.scales)
    return jnp.where(better > 0, better, scale)
