"""Weights in training that multiply as their quantised ones will.

A rounding has no slope. Gradients go straight through it, as if it were not there (Bengio et al. 2013,
https://arxiv.org/abs/1308.3432). `matmul` takes a `FakeQuantizedWeight` where a matrix stands, and rounds its inputs
where the scheme rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops import eight_bits
from inferlib.ops.hadamard import rotated
from inferlib.ops.quantized import MX_GROUP, Scheme, largest_value, round_values, to_mxfp8
from inferlib.ops.read_whole import ArrayWeight


def straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """The rounded numbers, with the gradient of x."""
    return x + lax.stop_gradient(rounded - x)


def fake_quantized(w: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """w rounded to what `dtype` times its scales can be, float32. scales: as many as numbers, or ones that broadcast.

    Gradients reach w where the type has its magnitude, and the scales: a larger one rounds more coarsely and cuts off
    less (Esser et al. 2020, "Learned step size quantization", https://arxiv.org/abs/1902.08153).
    """
    most, steps = largest_value(dtype), w / scales
    within = jnp.clip(steps, -most, most)
    return straight_through(within, round_values(within, dtype)) * scales


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FakeQuantizedWeight(ArrayWeight):
    """A matrix whose values were rounded to a scheme, with gradients; of rotated inputs if the scheme rotates them."""

    values: jax.Array
    scheme: Scheme = field(metadata={"static": True})

    def inputs(self, x: jax.Array) -> jax.Array:
        """The inputs [T, *I] as the quantised weight multiplies them."""
        x = rotated(x, self.scheme.rotation) if self.scheme.rotation else x
        if not self.scheme.round_inputs:
            return x
        if self.scheme.group is not None:
            return straight_through(x, to_mxfp8(x, MX_GROUP))
        numbers, scales = eight_bits.by_token(x, jnp.dtype(self.scheme.values))
        rounded = numbers.astype(jnp.float32) * scales.reshape(-1, *[1] * (x.ndim - 1))
        return straight_through(x, rounded.astype(x.dtype))
