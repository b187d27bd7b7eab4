"""Learned residuals: LAuReL, and the parallel residuals of AltUp (both as in Gemma 3n)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import NormSpec
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.ops.precision import precision_of
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class Laurel(nnx.Module):
    """x [T, D] -> x + norm(right(left(x))) with R numbers between (Menghani et al. 2024, "LAuReL")."""

    def __init__(self, rank: int, norm: NormSpec, dim: int, dtype):
        self.left = param((dim, rank), (axes.EMBED, axes.LATENT), dtype, contracting=(0,))
        self.right = param((rank, dim), (axes.LATENT, axes.EMBED), dtype, contracting=(0,))
        self.norm = Norm(norm, dim, dtype)

    def __call__(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        latent = ctx.shards.sum(ctx.matmul(x, self.left[...]), axes.EMBED)
        return x + self.norm(ctx.matmul(latent, self.right[...]), ctx.shards)


class AltUp(nnx.Module):
    """Alternating updates (Baykal et al. 2023). A layer computes on the first of N residuals [T, N, D]. Before, each
    residual is predicted from all of them; after, each is corrected by the difference between the layer's output and
    the first prediction."""

    def __init__(self, streams: int, norm: NormSpec, dim: int, dtype):
        self.streams, self.dim = streams, dim
        self.norm = Norm(norm, dim, dtype)
        self.router = param((dim, streams), (axes.EMBED, axes.STREAMS), dtype)
        self.prediction = param((streams, streams**2), (None, axes.STREAMS), dtype)
        self.correction = param((streams, streams), (None, axes.STREAMS), dtype)
        self.scale = param((dim,), (axes.EMBED,), dtype, "ones")

    def predict(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        """[T, N, D] -> [T, N, D]."""
        factors = ctx.matmul(self.modalities(x[:, 0], ctx), self.prediction[...])
        factors = factors.reshape(-1, self.streams, self.streams)
        return x + jnp.einsum("tmn,tnd->tmd", factors, x, precision=precision_of(x.dtype))

    def correct(self, predicted: jax.Array, x: jax.Array, ctx: StepContext) -> jax.Array:
        """The predictions [T, N, D] and the layer's output for the first [T, D] -> [T, N, D]."""
        factors = ctx.matmul(self.modalities(x, ctx), self.correction[...]) + 1
        return predicted + (x - predicted[:, 0])[:, None] * factors[:, :, None]

    def modalities(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        """[T, D] -> [T, N], each within +-1."""
        y = self.norm(x, ctx.shards) * jnp.asarray(1 / self.dim, x.dtype)
        routed = ctx.shards.sum(ctx.matmul(y, self.router[...], out_dtype=jnp.float32), axes.EMBED)
        return jnp.tanh(routed).astype(x.dtype)


class Streams(nnx.Module):
    """One residual [T, D] to N of them [T, N, D], and back. Projections are scaled to the magnitude of the first."""

    def __init__(self, streams: int, dim: int, dtype):
        self.dim = dim
        shape, names = (streams - 1, dim, dim), (axes.STREAMS, None, axes.EMBED)
        self.split = param(shape, names, dtype)
        self.merge = param(shape, names, dtype)

    def spread(self, x: jax.Array, shards: Shards) -> jax.Array:
        whole = shards.gather(x, axes.EMBED, dim=1)
        projected = jnp.einsum("td,nde->tne", whole, self.split[...], precision=precision_of(x.dtype))
        return jnp.concatenate([x[:, None], self.match_magnitude(projected, x, shards)], axis=1)

    def gather(self, x: jax.Array, shards: Shards) -> jax.Array:
        whole = shards.gather(x[:, 1:], axes.EMBED, dim=2)
        projected = jnp.einsum("tnd,nde->tne", whole, self.merge[...], precision=precision_of(x.dtype))
        streams = jnp.concatenate([x[:, :1], self.match_magnitude(projected, x[:, 0], shards)], axis=1)
        return jnp.mean(streams, axis=1)

    def match_magnitude(self, x: jax.Array, reference: jax.Array, shards: Shards) -> jax.Array:
        """x [T, n, D], scaled to the root mean squares of reference [T, D]."""
        streams = jnp.concatenate([reference[:, None], x], axis=1).astype(jnp.float32)
        squares = shards.sum(jnp.sum(streams * streams, axis=-1, keepdims=True), axes.EMBED) / self.dim
        ratio = jnp.sqrt(squares[:, :1]) / jnp.sqrt(jnp.maximum(squares[:, 1:], 1e-5))
        return (x * ratio).astype(x.dtype)
