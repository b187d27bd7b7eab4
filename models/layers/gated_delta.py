"""Linear attention by the gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.layers import states
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.param import param
from inferlib.models.layout import HeadLayout
from inferlib.models.recurrent import GatedDeltaSpec
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.gated_delta import gated_delta_chunk, gated_delta_step
from inferlib.ops.matmul import Normed, matmul
from inferlib.sharding import axes

_EPS = 1e-6  # of the length of queries and keys


class GatedDelta(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds of each row the convolution's last inputs [k - 1, K, c] and the state [K * G, d_k, d_v]. K key heads
    with G value heads each, as laid out (see `HeadLayout`); c numbers of a key head go through the convolution: its
    query, its key and its values. Chunks of prompts take the rule by chunks, decode rows one step.
    """

    def __init__(self, spec: GatedDeltaSpec, layout: HeadLayout, dim: int, dtype):
        self.spec = spec
        k, g, keys, values = layout.groups, layout.queries, 2 * spec.head_dim, spec.value_dim
        key_heads, heads = (axes.KV_HEADS, axes.HEAD_DIM), (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
        self.qk = param((dim, k, keys), (axes.EMBED, *key_heads), dtype, contracting=(0,))
        # A value and what its head's output is multiplied by.
        self.vz = param((dim, k, g, 2 * values), (axes.EMBED, *heads), dtype, contracting=(0,))
        # What the strength of writing and the fading are made of.
        self.ba = param((dim, k, g, 2), (axes.EMBED, *heads), dtype)
        self.conv_qk = param((spec.taps, k, keys), (None, *key_heads), dtype)
        self.conv_v = param((spec.taps, k, g, values), (None, *heads), dtype)
        self.decay = param((k, g), heads[:2], jnp.float32, "zeros")
        self.decay_shift = param((k, g), heads[:2], jnp.float32, "ones")
        self.norm = param((values,), (axes.HEAD_DIM,), dtype, "ones")
        self.o = param((k, g, values, dim), (*heads, axes.EMBED), dtype, contracting=(0, 1, 2))

    def __call__(self, x: jax.Array | Normed, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        qk, vz = matmul(x, self.qk[...]), matmul(x, self.vz[...])
        v, z = jnp.split(vz, 2, axis=-1)
        mixed = jnp.concatenate([qk, v.reshape(*qk.shape[:2], -1)], axis=-1)  # [T, K, c]
        ba = matmul(x, self.ba[...], out_dtype=jnp.float32)
        log_decay = -jnp.exp(self.decay[...]) * jax.nn.softplus(ba[..., 1] + self.decay_shift[...])
        inputs = mixed, log_decay, self.spec.strength * jax.nn.sigmoid(ba[..., 0])
        out, cache = states.in_turn(self.rule, inputs, ctx.batch, cache)
        out = rms_norm(out, self.norm[...], self.spec.eps) * jax.nn.silu(z.astype(jnp.float32))
        return matmul(out.astype(qk.dtype), self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], kept: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        (mixed, *gates), (tail, state) = inputs, kept
        heads, tail = self.convolved(mixed, tail, lengths)
        out, state = states.advance(gated_delta_chunk, gated_delta_step, (*heads, *gates), state, lengths)
        return out, (tail, state)

    def convolved(
        self, mixed: jax.Array, tail: jax.Array, lengths: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        """[P, C, K, c] -> queries and keys [P, C, K, d_k] of unit length, the former scaled, and values
        [P, C, K, G, d_v]; and the convolution's new tail."""
        size, conv_v = self.spec.head_dim, self.conv_v[...]
        weight = jnp.concatenate([self.conv_qk[...], conv_v.reshape(*conv_v.shape[:2], -1)], axis=-1)
        out, tail = causal_conv(mixed, tail, weight, lengths)
        out = jax.nn.silu(out)
        q, k = (unit(out[..., at : at + size]) for at in (0, size))
        v = out[..., 2 * size :].reshape(*out.shape[:3], -1, self.spec.value_dim)
        return (q * size**-0.5, k, v), tail


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1 of the last dimension."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
