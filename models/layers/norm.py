"""RMS norm and layer norm, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.config import NormSpec
from inferlib.models.layers.param import param
from inferlib.sharding import axes


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dims: int = 1, unit_offset: bool = False) -> jax.Array:
    """RMS norm over the last `dims` dimensions; `weight` has their shape."""
    over = tuple(range(-dims, 0))
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=over, keepdims=True) + eps)
    return (y * (weight.astype(jnp.float32) + (1.0 if unit_offset else 0.0))).astype(x.dtype)


class Norm(nnx.Module):
    """x [..., D] -> [..., D]."""

    def __init__(self, spec: NormSpec, dim: int, dtype):
        self.spec = spec
        self.weight = param((dim,), (axes.EMBED,), dtype, "zeros" if spec.unit_offset else "ones")

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        if self.spec.kind == "layer":
            y = x.astype(jnp.float32)
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        return rms_norm(y, self.weight[...], self.spec.eps, unit_offset=self.spec.unit_offset).astype(x.dtype)
