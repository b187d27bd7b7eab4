"""Linear attention by the gated delta rule (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
arXiv 2412.06464). Letters: K key heads with G value heads each, h and v their sizes, D width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.heads import HeadLayout
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.param import param
from inferlib.models.mixers import states
from inferlib.models.mixers.common import LinearAttentionSpec
from inferlib.models.pieces import Arrange, Assembly, HeadRows, Piece, assembly
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.gated_delta import gated_delta_chunk, gated_delta_step
from inferlib.ops.matmul import Activations
from inferlib.sharding import axes

_EPS = 1e-6  # of the length of queries and keys


@dataclass(frozen=True)
class GatedDeltaSpec(LinearAttentionSpec):
    """The state [h, v] of each value head fades, and forgets the value stored at a key before it learns another one
    there. Every value head has its own RMS norm.

    strength: the most that a token writes; beyond 1, a stored value can change its sign (OLMo Hybrid).
    """

    strength: float = 1.0

    title: ClassVar[str] = "gated delta rule"
    vectors: ClassVar[int] = 3  # two read the state and one changes it

    def build(self, layout: HeadLayout, dim: int, dtype) -> GatedDelta:
        return GatedDelta(self, layout, dim, dtype)

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        """The numbers b and a of value heads are one tensor, key head by key head ("delta.ba"), or two."""
        k, g, heads = self.kv_heads, self.group, self.heads
        piece = _Tensors(names)
        if "delta.ba" in names:
            ba = assembly(piece("ba", 2 * heads, dim), "(k two g) d -> d k g two", k=k, g=g)
        else:
            ba = assembly((piece("b", heads, dim), piece("a", heads, dim)), "two (k g) d -> d k g two", k=k)
        return {
            **self._projections(piece, dim),
            **self._convolutions(piece),
            "ba": ba,
            "decay": assembly(Piece(names["delta.decay"], (heads,)), "(k g) -> k g", k=k),
            "decay_shift": assembly(Piece(names["delta.decay_shift"], (heads,)), "(k g) -> k g", k=k),
            "norm": assembly(piece("norm", self.value_dim), "v -> v"),
            "o": assembly(piece("o", dim, heads * self.value_dim), "d (k g v) -> k g v d", k=k, g=g),
        }

    def _projections(self, piece: _Tensors, dim: int) -> dict[str, Assembly]:
        """Queries, keys, values and gates z are one tensor, key head by key head ("delta.qkvz"); or two, one of all
        queries, keys and values ("delta.qkv") and one of z; or four."""
        k, g, h, keys, values = self.kv_heads, self.group, self.head_dim, self._keys, self._values
        if "delta.qkvz" in piece.names:
            both = (piece("qkvz", keys + 2 * values, dim),)
            vz = Arrange("k (vz g v) d -> d k g (vz v)", (("vz", 2), ("g", g)))
            return {
                "qk": Assembly(both, HeadRows(k, 0, 2 * h, Arrange("k qk d -> d k qk"))),
                "vz": Assembly(both, HeadRows(k, 2 * h, 2 * h + 2 * g * self.value_dim, vz)),
            }
        if "delta.qkv" in piece.names:
            q, v = (piece("qkv", keys + values, dim, rows=rows) for rows in ((0, keys), (keys, keys + values)))
            qk = assembly(q, "(qk k h) d -> d k (qk h)", qk=2, k=k)
        else:
            v = piece("v", values, dim)
            qk = assembly(tuple(piece(part, keys // 2, dim) for part in "qk"), "qk (k h) d -> d k (qk h)", k=k)
        return {"qk": qk, "vz": assembly((v, piece("z", values, dim)), "vz (k g v) d -> d k g (vz v)", k=k, g=g)}

    def _convolutions(self, piece: _Tensors) -> dict[str, Assembly]:
        """One tensor of all heads' queries, keys and values ("delta.conv"), or three."""
        k, g, keys, values, end = self.kv_heads, self.group, self._keys, self._values, (1, self.taps)
        if "delta.conv" in piece.names:
            q, v = (piece("conv", keys + values, *end, rows=rows) for rows in ((0, keys), (keys, keys + values)))
            qk = assembly(q, "(qk k h) 1 taps -> taps k (qk h)", qk=2, k=k)
        else:
            v = piece("v_conv", values, *end)
            both = tuple(piece(part + "_conv", keys // 2, *end) for part in "qk")
            qk = assembly(both, "qk (k h) 1 taps -> taps k (qk h)", k=k)
        return {"conv_qk": qk, "conv_v": assembly(v, "(k g v) 1 taps -> taps k g v", k=k, g=g)}

    @property
    def _keys(self) -> int:
        """Rows of all heads' queries and keys."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def _values(self) -> int:
        return self.heads * self.value_dim


@dataclass(frozen=True)
class _Tensors:
    """The layer's tensors by their parts in the family's name map."""

    names: Mapping[str, str]

    def __call__(self, part: str, *shape: int, rows: tuple[int, int] | None = None) -> Piece:
        return Piece(self.names["delta." + part] + ".weight", shape, rows)


class GatedDelta(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds each row's last inputs of the convolution [taps - 1, K, c] and its state [K * G, h, v], K and G as
    laid out (see `HeadLayout`); c numbers of a key head go through the convolution: its query, its key and its values.
    The rule runs by chunks on prompts and by single steps on decode rows.
    """

    def __init__(self, spec: GatedDeltaSpec, layout: HeadLayout, dim: int, dtype):
        self.spec = spec
        k, g, keys, values = layout.groups, layout.queries, 2 * spec.head_dim, spec.value_dim
        key_heads, heads = (axes.KV_HEADS, axes.HEAD_DIM), (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
        self.qk = param((dim, k, keys), (axes.EMBED, *key_heads), dtype, contracting=(0,))
        # Values, and the gates on the heads' outputs.
        self.vz = param((dim, k, g, 2 * values), (axes.EMBED, *heads), dtype, contracting=(0,))
        # Strength of writing, and fading, before their activations.
        self.ba = param((dim, k, g, 2), (axes.EMBED, *heads), dtype)
        self.conv_qk = param((spec.taps, k, keys), (None, *key_heads), dtype)
        self.conv_v = param((spec.taps, k, g, values), (None, *heads), dtype)
        self.decay = param((k, g), heads[:2], jnp.float32, "zeros")
        self.decay_shift = param((k, g), heads[:2], jnp.float32, "ones")
        self.norm = param((values,), (axes.HEAD_DIM,), dtype, "ones")
        self.o = param((k, g, values, dim), (*heads, axes.EMBED), dtype, contracting=(0, 1, 2))

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        qk, vz = ctx.matmul(x, self.qk[...]), ctx.matmul(x, self.vz[...])
        v, z = jnp.split(vz, 2, axis=-1)
        mixed = jnp.concatenate([qk, v.reshape(*qk.shape[:2], -1)], axis=-1)  # [T, K, c]
        ba = ctx.matmul(x, self.ba[...], out_dtype=jnp.float32)
        log_decay = -jnp.exp(self.decay[...]) * jax.nn.softplus(ba[..., 1] + self.decay_shift[...])
        inputs = mixed, log_decay, self.spec.strength * jax.nn.sigmoid(ba[..., 0])
        out, cache = states.in_turn(self.rule, inputs, ctx.batch, cache)
        out = rms_norm(out, self.norm[...], self.spec.eps) * jax.nn.silu(z.astype(jnp.float32))
        return ctx.matmul(out.astype(qk.dtype), self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], old: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        (mixed, *gates), (tail, state) = inputs, old
        heads, tail = self.convolved(mixed, tail, lengths)
        out, state = states.advance(gated_delta_chunk, gated_delta_step, (*heads, *gates), state, lengths)
        return out, (tail, state)

    def convolved(
        self, mixed: jax.Array, tail: jax.Array, lengths: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        """[P, C, K, c] -> queries and keys [P, C, K, h] of unit length, queries scaled, and values [P, C, K, G, v]; and
        the convolution's new tail."""
        size, conv_v = self.spec.head_dim, self.conv_v[...]
        weight = jnp.concatenate([self.conv_qk[...], conv_v.reshape(*conv_v.shape[:2], -1)], axis=-1)
        out, tail = causal_conv(mixed, tail, weight, lengths)
        out = jax.nn.silu(out)
        q, k = (unit(out[..., at : at + size]) for at in (0, size))
        v = out[..., 2 * size :].reshape(*out.shape[:3], -1, self.spec.value_dim)
        return (q * size**-0.5, k, v), tail


def unit(x: jax.Array) -> jax.Array:
    """The vectors of the last dimension, scaled to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
