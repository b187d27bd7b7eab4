"""RMS norm and layer norm, computed in float32."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.config import NormSpec
from inferlib.models.layers.param import OfStack, param
from inferlib.models.stream import Residual
from inferlib.ops.matmul import Activations, FusableNorm
from inferlib.ops.residual_norm import DeferredNorm, residual_norm
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, unit_offset: bool = False) -> jax.Array:
    """RMS norm over the last dimension; weight [D]."""
    y = x.astype(jnp.float32)
    return scale_norm(y, jnp.mean(y * y, axis=-1, keepdims=True), weight, eps, unit_offset).astype(x.dtype)


def scale_norm(y: jax.Array, mean: jax.Array, weight: jax.Array, eps: float, unit_offset: bool) -> jax.Array:
    """y divided by the root of its mean square, times the weight; all float32."""
    return y * jax.lax.rsqrt(mean + eps) * (weight.astype(jnp.float32) + (1.0 if unit_offset else 0.0))


class Norm(nnx.Module):
    """x [..., D] -> [..., D]; where the width is split, this device's share of it."""

    def __init__(self, spec: NormSpec, dim: int, dtype):
        self.spec, self.dim = spec, dim
        self.weight = param((dim,), (axes.EMBED,), dtype, "zeros" if spec.unit_offset else "ones")
        if spec.bias:
            self.bias = param((dim,), (axes.EMBED,), dtype, "zeros")

    def __call__(self, x: jax.Array, shards: Shards) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.spec.kind == "layer":
            y = y - self.mean(y, shards)
        mean = self.mean(y * y, shards)
        y = scale_norm(y, mean, self.weight[...], self.spec.eps, self.spec.unit_offset)
        return (y + self.bias[...].astype(jnp.float32) if self.spec.bias else y).astype(x.dtype)

    def read(self, residual: Residual, shards: Shards, *, defer: bool = False) -> tuple[Residual, Activations]:
        """The residual with its pending branch added, and its norm for products.

        defer: the reader takes a `DeferredNorm`, the norm that follows split-K partial sums.
        """
        if residual.pending is None:
            return residual, self.for_products(residual.x, self(residual.x, shards), shards)
        x, y, mailboxes = residual_norm(
            residual.x, residual.pending, self.weight[...], self.spec.eps, mailboxes=residual.mailboxes
        )
        if isinstance(y, DeferredNorm) and not defer:
            y = y.array()
        return replace(residual, x=x, pending=None, mailboxes=mailboxes), y

    def for_products(self, x: jax.Array, y: jax.Array, shards: Shards) -> Activations:
        """y in a form for products, which may norm x themselves. y: the norm of x, or of several devices' tokens."""
        if self.spec.kind != "rms" or self.spec.bias or shards.size(axes.EMBED) > 1 or x.shape != y.shape:
            return y
        weight = self.weight.get_value()
        stack = weight.stack if isinstance(weight, OfStack) else weight[None]
        return FusableNorm(x, y, stack, self.spec.eps, float(self.spec.unit_offset))

    def mean(self, y: jax.Array, shards: Shards) -> jax.Array:
        return shards.sum(jnp.sum(y, axis=-1, keepdims=True), axes.EMBED) / self.dim
