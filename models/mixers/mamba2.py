"""State-space duality (Dao & Gu 2024, "Transformers are SSMs", arXiv 2405.21060), as in Mamba-2.

Letters: K groups of G heads each, n and v the sizes of their B and x, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import ConfigError
from inferlib.models.heads import HeadLayout
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import scale_norm
from inferlib.models.layers.param import param
from inferlib.models.mixers import states
from inferlib.models.mixers.common import LinearAttentionSpec
from inferlib.models.pieces import Assembly, Piece, assembly
from inferlib.models.recurrent import HeadCollective
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.matmul import Activations
from inferlib.ops.state_space import state_space_chunk, state_space_step
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class Mamba2Spec(LinearAttentionSpec):
    """State-space duality in the terms of linear attention: C are queries and B are keys, one head of each for a group.
    Values are inputs times their step dt, and the state [v, n] of a head fades by exp(A dt). A group's heads share an
    RMS norm, behind their gates.

    conv_bias: the convolution has a bias; limits: the least and the largest dt.
    """

    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, math.inf)

    title: ClassVar[str] = "state-space duality (Mamba-2)"
    vectors: ClassVar[int] = 2  # one reads the state and one changes it

    def __post_init__(self):
        super().__post_init__()
        least, most = self.limits
        if not 0 <= least < most:
            raise ConfigError(
                f"the limits of the step dt must be two numbers from 0 on, the first less, got {self.limits}"
            )

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.value_dim, self.head_dim

    def build(self, layout: HeadLayout, dim: int, dtype) -> Mamba2:
        return Mamba2(self, layout, dim, dtype)

    def collectives(self, layout: HeadLayout, devices: int) -> tuple[HeadCollective, ...]:
        """The sum for the norm of a group, if several devices have heads of it."""
        return (HeadCollective("all-gather", "norms of groups of heads", devices),) if layout.copies > 1 else ()

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        """One tensor has the rows of gates z, inputs x, B and C of all groups, and steps dt of all heads, in this
        order. The tensors of the convolution have the rows of x, B and C."""
        k, g, inner, pairs = self.kv_heads, self.group, self.heads * self.value_dim, 2 * self.kv_heads * self.head_dim
        ends = tuple(accumulate((inner, inner, pairs, self.heads), initial=0))
        z, x, bc, dt = (Piece(names["mamba.in"] + ".weight", (ends[-1], dim), rows) for rows in pairwise(ends))
        conv, parts, mixed = names["mamba.conv"], ((0, inner), (inner, inner + pairs)), inner + pairs
        conv_x, conv_bc = (Piece(conv + ".weight", (mixed, 1, self.taps), rows) for rows in parts)
        shift_x, shift_bc = (Piece(conv + ".bias", (mixed,), rows) for rows in parts)
        made = {
            "z": assembly(z, "(k g v) d -> d k g v", k=k, g=g),
            "x": assembly(x, "(k g v) d -> d k g v", k=k, g=g),
            "bc": assembly(bc, "(bc k n) d -> d k (bc n)", bc=2, k=k),
            "dt": assembly(dt, "(k g) d -> d k g", k=k),
            "conv_x": assembly(conv_x, "(k g v) 1 taps -> taps k g v", k=k, g=g),
            "conv_bc": assembly(conv_bc, "(bc k n) 1 taps -> taps k (bc n)", bc=2, k=k),
            "conv_x_shift": assembly(shift_x, "(k g v) -> k g v", k=k, g=g),
            "conv_bc_shift": assembly(shift_bc, "(bc k n) -> k (bc n)", bc=2, k=k),
            "norm": assembly(Piece(names["mamba.norm"] + ".weight", (inner,)), "(k g v) -> k g v", k=k, g=g),
            "o": assembly(Piece(names["mamba.out"] + ".weight", (dim, inner)), "d (k g v) -> k g v d", k=k, g=g),
        }
        numbers = ("decay", "dt_shift", "skip")  # one for each head
        return made | {
            part: assembly(Piece(names["mamba." + part], (self.heads,)), "(k g) -> k g", k=k) for part in numbers
        }


class Mamba2(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds each row's last inputs of the convolution [taps - 1, K, c] and its state [K * G, v, n], K and G as
    laid out (see `HeadLayout`); c numbers of a group go through the convolution: its B and C, and its heads' inputs.
    The rule runs by chunks on prompts and by single steps on decode rows.
    """

    def __init__(self, spec: Mamba2Spec, layout: HeadLayout, dim: int, dtype):
        self.spec, self.copies = spec, layout.copies
        k, g, pair, size = layout.groups, layout.queries, 2 * spec.head_dim, spec.value_dim
        groups, heads = (axes.KV_HEADS, axes.HEAD_DIM), (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
        self.bc = param((dim, k, pair), (axes.EMBED, *groups), dtype, contracting=(0,))
        self.x = param((dim, k, g, size), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.z = param((dim, k, g, size), (axes.EMBED, *heads), dtype, contracting=(0,))  # gates of the heads' outputs
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

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        mixed = flat(ctx.matmul(x, self.bc[...]), ctx.matmul(x, self.x[...]), dims=1)
        z = ctx.matmul(x, self.z[...])
        dt = jax.nn.softplus(ctx.matmul(x, self.dt[...], out_dtype=jnp.float32) + self.dt_shift[...])
        out, cache = states.in_turn(self.rule, (mixed, jnp.clip(dt, *self.spec.limits)), ctx.batch, cache)
        out = self.normed(out * jax.nn.silu(z.astype(jnp.float32)), ctx.shards)
        return ctx.matmul(out.astype(z.dtype), self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], old: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        (mixed, dt), (tail, state) = inputs, old
        mixed, new = self.convolved(mixed, flat(tail, dims=2), lengths)
        bc, inner = jnp.split(mixed, [2 * dt.shape[2] * self.spec.head_dim], axis=-1)
        b, c = jnp.split(bc.reshape(*dt.shape[:3], -1), 2, axis=-1)
        inner = inner.reshape(*dt.shape, -1)
        heads = c, b, inner * dt[..., None], -jnp.exp(self.decay[...]) * dt
        out, state = states.advance(state_space_chunk, state_space_step, heads, state, lengths)
        valid, skipped = jnp.arange(mixed.shape[1]) < lengths[:, None], self.skip[...][..., None] * inner
        return out + jnp.where(valid[..., None, None, None], skipped, 0), (new.reshape(tail.shape), state)

    def convolved(self, mixed: jax.Array, tail: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Convolve [P, C, K * c], which gives float32; also returns the convolution's new tail."""
        weight = flat(self.conv_bc[...], self.conv_x[...], dims=1)
        out, tail = causal_conv(mixed, tail, weight, lengths)
        if self.spec.conv_bias:
            out = out + flat(self.conv_bc_shift[...], self.conv_x_shift[...], dims=0).astype(jnp.float32)
        return jax.nn.silu(out), tail

    def normed(self, y: jax.Array, shards: Shards) -> jax.Array:
        """The RMS norm of y [T, K, G, v] over each group, whose heads may be on several devices."""
        squares = jnp.sum(y * y, axis=(2, 3))
        if self.copies > 1:  # a device has heads of one group
            of_all = shards.gather(squares, axes.KV_HEADS, dim=1)
            alike = jnp.arange(of_all.shape[1]) // self.copies == shards.index(axes.KV_HEADS) // self.copies
            squares = jnp.sum(jnp.where(alike, of_all, 0), axis=1, keepdims=True)
        mean = squares / (self.spec.group * self.spec.value_dim)
        return scale_norm(y, mean[..., None, None], self.norm[...], self.spec.eps, unit_offset=False)


def flat(*parts: jax.Array, dims: int) -> jax.Array:
    """Merge all but the first `dims` dimensions of each part into one and concatenate along it. Unmerged heads of 64
    would fill half of a tile's lanes."""
    return jnp.concatenate([x.reshape(*x.shape[:dims], -1) for x in parts], axis=-1)
