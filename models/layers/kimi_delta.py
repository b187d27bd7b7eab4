"""Kimi Delta Attention (Moonshot AI 2025, "Kimi Linear", arXiv 2510.26692)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.layers import states
from inferlib.models.layers.gated_delta import unit
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.param import param
from inferlib.models.layout import HeadLayout
from inferlib.models.recurrent import KimiDeltaSpec
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.kimi_delta import kimi_delta_chunk, kimi_delta_step
from inferlib.ops.matmul import Normed, matmul
from inferlib.sharding import axes


class KimiDelta(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds of each row the convolution's last inputs [k - 1, K, 3 h] and the state [K, h, h] of K heads of size
    h, as laid out. Chunks of prompts take the rule by chunks, decode rows one step.
    """

    def __init__(self, spec: KimiDeltaSpec, layout: HeadLayout, dim: int, dtype):
        self.spec = spec
        k, h, heads = layout.groups, spec.head_dim, (axes.KV_HEADS, axes.HEAD_DIM)
        self.qkv = param((dim, k, 3 * h), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.conv = param((spec.taps, k, 3 * h), (None, *heads), dtype)
        # The latents of fading and output gates, and how each head makes its own of them.
        self.down = param((dim, 2 * h), (axes.EMBED, axes.LATENT), dtype, contracting=(0,))
        self.fade = param((h, k, h), (axes.LATENT, *heads), dtype, contracting=(0,))
        self.gate = param((h, k, h), (axes.LATENT, *heads), dtype, contracting=(0,))
        self.b = param((dim, k), (axes.EMBED, axes.KV_HEADS), dtype)
        self.decay = param((k,), heads[:1], jnp.float32, "zeros")
        self.decay_shift = param((k, h), heads, jnp.float32, "ones")
        self.norm = param((h,), (axes.HEAD_DIM,), dtype, "ones")
        names = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM, axes.EMBED)
        self.o = param((k, layout.queries, h, dim), names, dtype, contracting=(0, 1, 2))

    def __call__(self, x: jax.Array | Normed, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        mixed, (fade, gate) = matmul(x, self.qkv[...]), jnp.split(matmul(x, self.down[...]), 2, axis=-1)
        fade = matmul(fade, self.fade[...], out_dtype=jnp.float32) + self.decay_shift[...]
        log_decay = -jnp.exp(self.decay[...])[:, None] * jax.nn.softplus(fade)
        beta = jax.nn.sigmoid(matmul(x, self.b[...], out_dtype=jnp.float32))
        out, cache = states.in_turn(self.rule, (mixed, log_decay, beta), ctx.batch, cache)
        gate = jax.nn.sigmoid(matmul(gate, self.gate[...], out_dtype=jnp.float32))
        out = (rms_norm(out, self.norm[...], self.spec.eps) * gate).astype(mixed.dtype)
        return matmul(out[:, :, None], self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], kept: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        (mixed, *gates), (tail, state) = inputs, kept
        mixed, tail = causal_conv(mixed, tail, self.conv[...], lengths)
        q, k, v = jnp.split(jax.nn.silu(mixed), 3, axis=-1)
        heads = unit(q) * self.spec.head_dim**-0.5, unit(k), v
        out, state = states.advance(kimi_delta_chunk, kimi_delta_step, (*heads, *gates), state, lengths)
        return out, (tail, state)
