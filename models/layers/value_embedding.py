"""Gated value embeddings: what attention adds to the values by the tokens' ids (Parcae)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import ValueEmbedding
from inferlib.models.layers.param import OfStack, param
from inferlib.ops.precision import precision_of
from inferlib.sharding import axes


class ValueEmbeddings(nnx.Module):
    """x [T, D], a layer's input -> [T, K, h], which is added to its values. heads, size: K as laid out, and h."""

    def __init__(self, spec: ValueEmbedding, heads: int, size: int, dtype):
        self.spec = spec
        self.table = param((spec.vocab, heads, size), (axes.TOKEN_IDS, axes.KV_HEADS, axes.HEAD_DIM), dtype)
        self.gate = param((spec.channels, heads), (axes.STREAMS, axes.KV_HEADS), dtype)

    def __call__(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        rows = self.rows(jnp.clip(ctx.batch.tokens, 0, self.spec.vocab - 1))
        channels, weight = x[:, : self.spec.channels], self.gate[...]
        gate = jnp.einsum("tc,ck->tk", channels, weight, precision=precision_of(x.dtype))
        return 2 * jax.nn.sigmoid(gate)[:, :, None] * rows

    def rows(self, tokens: jax.Array) -> jax.Array:
        """The table's rows [T, K, h] of these tokens; of a stack, which is not sliced for it, the current layer's."""
        table = self.table.get_value()
        return table.stack[table.layer, tokens] if isinstance(table, OfStack) else table[tokens]
