"""Per-layer embeddings (Gemma 3n, Gemma 4): what a token brings along for every layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.config import ModelConfig, NormSpec, PerLayerSpec
from inferlib.models.layers.embedding import look_up
from inferlib.models.layers.mlp import ACTIVATIONS
from inferlib.models.layers.norm import Norm, rms_norm
from inferlib.models.layers.param import param
from inferlib.models.layout import Layout
from inferlib.ops.matmul import matmul
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class PerLayerEmbedding(nnx.Module):
    """Tokens [T] and their embeddings x [T, D] -> [T, L, P], P numbers of each token for each of L layers.

    Where tokens are split, x and the result are this device's share.
    """

    def __init__(self, layout: Layout, dtype):
        self.config: ModelConfig = layout.config
        spec, dim = self.config.per_layer, self.config.dim
        width = len(self.config.layers) * spec.dim
        self.table = param((layout.vocab, width), (axes.VOCAB, axes.PER_LAYER), dtype)
        self.projection = param((dim, width), (axes.EMBED, axes.PER_LAYER), dtype, contracting=(0,))
        self.norm = param((spec.dim,), (axes.PER_LAYER,), dtype, "zeros" if self.config.norm.unit_offset else "ones")

    def __call__(self, tokens: jax.Array, x: jax.Array, shards: Shards) -> jax.Array:
        spec, norm, layers = self.config.per_layer, self.config.norm, len(self.config.layers)
        ids = jnp.where(tokens < spec.vocab, tokens, 0)
        found = shards.sum_tokens(look_up(self.table[...], ids, shards), axes.VOCAB)
        found = found.reshape(-1, layers, spec.dim) * jnp.asarray(spec.dim**0.5, x.dtype)
        made = shards.sum(matmul(x, self.projection[...]), axes.EMBED) * jnp.asarray(self.config.dim**-0.5, x.dtype)
        made = made.reshape(-1, layers, spec.dim)
        made = rms_norm(made, self.norm[...], norm.eps, unit_offset=norm.unit_offset)
        return (found + made) * jnp.asarray(2**-0.5, x.dtype)


class PerLayerInput(nnx.Module):
    """x [T, D] and a layer's numbers of its tokens [T, P] -> norm(out(act(gate(x)) * numbers)) [T, D]."""

    def __init__(self, spec: PerLayerSpec, norm: NormSpec, dim: int, dtype):
        self.spec = spec
        self.gate = param((dim, spec.dim), (axes.EMBED, axes.PER_LAYER), dtype, contracting=(0,))
        self.out = param((spec.dim, dim), (axes.PER_LAYER, axes.EMBED), dtype, contracting=(0,))
        self.norm = Norm(norm, dim, dtype)

    def __call__(self, x: jax.Array, given: jax.Array, shards: Shards) -> jax.Array:
        gate = shards.sum(matmul(x, self.gate[...]), axes.EMBED)
        return self.norm(matmul(ACTIVATIONS[self.spec.activation](gate) * given, self.out[...]), shards)
