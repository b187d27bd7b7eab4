"""State-space duality (Dao & Gu 2024, "Transformers are SSMs", arXiv 2405.21060), as in Mamba-2."""

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
from inferlib.models.recurrent import Mamba2Spec
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.matmul import Normed, matmul
from inferlib.ops.state_space import state_space_chunk, state_space_step
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class Mamba2(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds of each row the convolution's last inputs [k - 1, K, c] and the state [K * G, d_v, d_k]. K groups of
    G heads each, as laid out (see `HeadLayout`); c numbers of a group go through the convolution: its B and C, and its
    heads' inputs. Chunks of prompts take products by chunks, decode rows one step.
    """

    def __init__(self, spec: Mamba2Spec, layout: HeadLayout, dim: int, dtype):
        self.spec, self.copies = spec, layout.copies
        k, g, pair, size = layout.groups, layout.queries, 2 * spec.head_dim, spec.value_dim
        groups, heads = (axes.KV_HEADS, axes.HEAD_DIM), (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
        self.bc = param((dim, k, pair), (axes.EMBED, *groups), dtype, contracting=(0,))
        self.x = param((dim, k, g, size), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.z = param((dim, k, g, size), (axes.EMBED, *heads), dtype, contracting=(0,))  # gates of what heads return
        self.dt = param((dim, k, g), (axes.EMBED, *heads[:2]), dtype)
        self.conv_bc = param((spec.taps, k, pair), (None, *groups), dtype)
        self.conv_x = param((spec.taps, k, g, size), (None, *heads), dtype)
        if spec.conv_bias:
            self.conv_bc_shift = param((k, pair), groups, dtype, "zeros")
            self.conv_x_shift = param((k, g, size), heads, dtype, "zeros")
        self.decay = param((k, g), heads[:2], jnp.float32, "zeros")
        self.dt_shift = param((k, g), heads[:2], jnp.float32, "ones")
        self.skip = param((k, g), heads[:2], jnp.float32, "ones")
        self.norm = param((k, g, size), heads, dtype, "ones")
        self.o = param((k, g, size, dim), (*heads, axes.EMBED), dtype, contracting=(0, 1, 2))

    def __call__(self, x: jax.Array | Normed, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        mixed = flat(matmul(x, self.bc[...]), matmul(x, self.x[...]), dims=1)
        z = matmul(x, self.z[...])
        dt = jax.nn.softplus(matmul(x, self.dt[...], out_dtype=jnp.float32) + self.dt_shift[...])
        out, cache = states.in_turn(self.rule, (mixed, jnp.clip(dt, *self.spec.limits)), ctx.batch, cache)
        out = self.normed(out * jax.nn.silu(z.astype(jnp.float32)), ctx.shards)
        return matmul(out.astype(z.dtype), self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], kept: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        (mixed, dt), (tail, state) = inputs, kept
        mixed, new = self.convolved(mixed, flat(tail, dims=2), lengths)
        bc, inner = jnp.split(mixed, [2 * dt.shape[2] * self.spec.head_dim], axis=-1)
        b, c = jnp.split(bc.reshape(*dt.shape[:3], -1), 2, axis=-1)
        inner = inner.reshape(*dt.shape, -1)
        heads = c, b, inner * dt[..., None], -jnp.exp(self.decay[...]) * dt
        out, state = states.advance(state_space_chunk, state_space_step, heads, state, lengths)
        valid, skipped = jnp.arange(mixed.shape[1]) < lengths[:, None], self.skip[...][..., None] * inner
        return out + jnp.where(valid[..., None, None, None], skipped, 0), (new.reshape(tail.shape), state)

    def convolved(self, mixed: jax.Array, tail: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[P, C, K * c] -> the same in float32, and the convolution's new tail."""
        weight = flat(self.conv_bc[...], self.conv_x[...], dims=1)
        out, tail = causal_conv(mixed, tail, weight, lengths)
        if self.spec.conv_bias:
            out = out + flat(self.conv_bc_shift[...], self.conv_x_shift[...], dims=0).astype(jnp.float32)
        return jax.nn.silu(out), tail

    def normed(self, y: jax.Array, shards: Shards) -> jax.Array:
        """RMS norm of y [T, K, G, d_v] over each group, of whose heads other devices may have some."""
        squares = jnp.sum(y * y, axis=(2, 3))
        if self.copies > 1:  # a device has heads of one group
            of_all = shards.gather(squares, axes.KV_HEADS, dim=1)
            alike = jnp.arange(of_all.shape[1]) // self.copies == shards.index(axes.KV_HEADS) // self.copies
            squares = jnp.sum(jnp.where(alike, of_all, 0), axis=1, keepdims=True)
        mean = squares / (self.spec.group * self.spec.value_dim)
        return scale_norm(y, mean[..., None, None], self.norm[...], self.spec.eps, unit_offset=False)


def flat(*parts: jax.Array, dims: int) -> jax.Array:
    """One behind the other, all but the first `dims` dimensions of each as one: heads of 64 fill half a TPU's lanes."""
    return jnp.concatenate([x.reshape(*x.shape[:dims], -1) for x in parts], axis=-1)
