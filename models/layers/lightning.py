"""Lightning attention (MiniMax 2025, "MiniMax-01", arXiv 2501.08313)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.layers import states
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import scale_norm
from inferlib.models.layers.param import param
from inferlib.models.layout import HeadLayout
from inferlib.models.recurrent import LightningSpec
from inferlib.ops.matmul import Normed, matmul
from inferlib.ops.state_space import state_space_chunk, state_space_step
from inferlib.sharding import axes


class Lightning(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds of each row the state [K, h, h] of K heads of size h, as laid out. Chunks of prompts take it on by
    chunks, decode rows by one step.
    """

    def __init__(self, spec: LightningSpec, layout: HeadLayout, dim: int, dtype):
        self.spec, self.layout = spec, layout
        k, h, heads = layout.groups, spec.head_dim, (axes.KV_HEADS, axes.HEAD_DIM)
        self.qkv = param((dim, k, 3 * h), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.gate = param((dim, k, h), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.decay = param((k,), heads[:1], jnp.float32, "ones")
        self.norm = param((k, h), heads, dtype, "ones")
        names = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM, axes.EMBED)
        self.o = param((k, layout.queries, h, dim), names, dtype, contracting=(0, 1, 2))

    def __call__(self, x: jax.Array | Normed, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        qkv, gate = matmul(x, self.qkv[...]), matmul(x, self.gate[...], out_dtype=jnp.float32)
        out, cache = states.in_turn(self.rule, (jax.nn.silu(qkv),), ctx.batch, cache)
        heads = self.spec.heads * self.layout.copies
        squares = ctx.shards.sum(jnp.sum(out * out, axis=(1, 2), keepdims=True), axes.KV_HEADS)
        out = scale_norm(out, squares / (heads * self.spec.head_dim), self.norm[...], self.spec.eps, False)
        out = (out * jax.nn.sigmoid(gate)).astype(qkv.dtype)
        return matmul(out[:, :, None], self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], kept: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        ((qkv,), (state,)) = inputs, kept
        q, k, v = jnp.split(qkv, 3, axis=-1)  # [P, C, K, h]
        v = v[:, :, :, None]
        heads = q, k, v, jnp.broadcast_to(-self.decay[...][:, None], v.shape[:-1])
        out, state = states.advance(state_space_chunk, state_space_step, heads, state, lengths)
        return out[:, :, :, 0], (state,)
