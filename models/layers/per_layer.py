"""Per-layer embeddings (Gemma 3n, Gemma 4): numbers that a token has for every layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import NormSpec, PerLayerSpec
from inferlib.models.layers.embedding import look_up
from inferlib.models.layers.mlp import ACTIVATIONS
from inferlib.models.layers.norm import Norm, rms_norm
from inferlib.models.layers.param import param
from inferlib.models.layout import Layout
from inferlib.sharding import axes


class PerLayerEmbedding(nnx.Module):
    """The step's tokens and their embeddings x [T, D] -> [T, L, P]: P numbers for each token and each of L layers.

    Where tokens are split, x and the result are this device's part.
    """

    def __init__(self, spec: PerLayerSpec, layout: Layout, dtype):
        self.config, self.spec = layout.config, spec
        width = len(self.config.layers) * spec.dim
        self.table = param((layout.vocab, width), (axes.VOCAB, axes.PER_LAYER), dtype)
        self.projection = param((self.config.dim, width), (axes.EMBED, axes.PER_LAYER), dtype, contracting=(0,))
        self.norm = param((spec.dim,), (axes.PER_LAYER,), dtype, "zeros" if self.config.norm.unit_offset else "ones")

    def __call__(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        spec, norm, layers = self.spec, self.config.norm, len(self.config.layers)
        tokens, shards = ctx.batch.tokens, ctx.shards
        ids = jnp.where(tokens < spec.vocab, tokens, 0)
        looked_up = shards.sum_tokens(look_up(self.table[...], ids, shards), axes.VOCAB)
        looked_up = looked_up.reshape(-1, layers, spec.dim) * jnp.asarray(spec.dim**0.5, x.dtype)
        projected = shards.sum(ctx.matmul(x, self.projection[...]), axes.EMBED)
        projected = (projected * jnp.asarray(self.config.dim**-0.5, x.dtype)).reshape(-1, layers, spec.dim)
        projected = rms_norm(projected, self.norm[...], norm.eps, unit_offset=norm.unit_offset)
        return (looked_up + projected) * jnp.asarray(2**-0.5, x.dtype)


class PerLayerInput(nnx.Module):
    """x [T, D] and this layer's inputs of its tokens [T, P] -> norm(out(act(gate(x)) * inputs)) [T, D]."""

    def __init__(self, spec: PerLayerSpec, norm: NormSpec, dim: int, dtype):
        self.spec = spec
        self.gate = param((dim, spec.dim), (axes.EMBED, axes.PER_LAYER), dtype, contracting=(0,))
        self.out = param((spec.dim, dim), (axes.PER_LAYER, axes.EMBED), dtype, contracting=(0,))
        self.norm = Norm(norm, dim, dtype)

    def __call__(self, x: jax.Array, inputs: jax.Array, ctx: StepContext) -> jax.Array:
        gate = ctx.shards.sum(ctx.matmul(x, self.gate[...]), axes.EMBED)
        out = ctx.matmul(ACTIVATIONS[self.spec.activation](gate) * inputs, self.out[...])
        return self.norm(out, ctx.shards)
