"""Gated short convolutions (LFM2, Liquid AI 2025)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.layers import states
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.param import param
from inferlib.models.layout import HeadLayout
from inferlib.models.recurrent import ShortConvSpec
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.matmul import Normed, matmul
from inferlib.sharding import axes


class ShortConv(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over channels.

    The cache holds of each row the convolution's last inputs [k - 1, K, h]: K heads of h channels, as laid out.
    """

    def __init__(self, spec: ShortConvSpec, layout: HeadLayout, dim: int, dtype):
        k, h, heads = layout.groups, spec.head_dim, (axes.KV_HEADS, axes.HEAD_DIM)
        self.bcx = param((dim, k, 3 * h), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.conv = param((spec.taps, k, h), (None, *heads), dtype)
        names = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM, axes.EMBED)
        self.o = param((k, layout.queries, h, dim), names, dtype, contracting=(0, 1, 2))

    def __call__(self, x: jax.Array | Normed, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        b, c, x = jnp.split(matmul(x, self.bcx[...]), 3, axis=-1)  # [T, K, h]
        out, cache = states.in_turn(self.rule, (b * x,), ctx.batch, cache)
        return matmul((c * out.astype(c.dtype))[:, :, None], self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], kept: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        out, tail = causal_conv(*inputs, *kept, self.conv[...], lengths)
        valid = jnp.arange(out.shape[1]) < lengths[:, None]
        return jnp.where(valid[..., None, None], out, 0.0), (tail,)
