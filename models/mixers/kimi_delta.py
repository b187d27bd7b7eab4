"""Kimi Delta Attention (Moonshot AI 2025, "Kimi Linear", arXiv 2510.26692). Letters: K heads of size h, D width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import ConfigError
from inferlib.models.heads import HeadLayout
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.param import param
from inferlib.models.mixers import states
from inferlib.models.mixers.common import LinearAttentionSpec
from inferlib.models.mixers.gated_delta import unit
from inferlib.models.pieces import Assembly, Piece, assembly
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.kimi_delta import kimi_delta_chunk, kimi_delta_step
from inferlib.ops.matmul import Activations
from inferlib.sharding import axes


@dataclass(frozen=True)
class KimiDeltaSpec(LinearAttentionSpec):
    """The gated delta rule in which each channel of a head's keys fades by itself. Fading and output gates are of low
    rank, the head size. Every head has queries and keys, of the same size as its values, and an RMS norm."""

    title: ClassVar[str] = "Kimi delta attention"
    vectors: ClassVar[int] = 3  # two read the state and one changes it

    def __post_init__(self):
        super().__post_init__()
        if self.group != 1 or self.value_dim != self.head_dim:
            raise ConfigError("Kimi delta attention has as many heads of values as of keys, and of the same size")

    def build(self, layout: HeadLayout, dim: int, dtype) -> KimiDelta:
        return KimiDelta(self, layout, dim, dtype)

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        h, k, width = self.head_dim, self.heads, self.heads * self.head_dim

        def pieces(shape: tuple[int, ...], *parts: str) -> tuple[Piece, ...]:
            return tuple(Piece(names["delta." + part] + ".weight", shape) for part in parts)

        qkv, convs = pieces((width, dim), "q", "k", "v"), pieces((width, 1, self.taps), "q_conv", "k_conv", "v_conv")
        return {
            "qkv": assembly(qkv, "qkv (k h) d -> d k (qkv h)", k=k),
            "conv": assembly(convs, "qkv (k h) 1 taps -> taps k (qkv h)", k=k),
            "down": assembly(pieces((h, dim), "fade_a", "gate_a"), "two h d -> d (two h)"),
            "fade": assembly(pieces((width, h), "fade_b"), "(k h) rank -> rank k h", k=k),
            "gate": assembly(pieces((width, h), "gate_b"), "(k h) rank -> rank k h", k=k),
            "b": assembly(pieces((k, dim), "b"), "k d -> d k"),
            "decay": assembly(Piece(names["delta.decay"], (1, 1, k, 1)), "1 1 k 1 -> k"),
            "decay_shift": assembly(Piece(names["delta.decay_shift"], (width,)), "(k h) -> k h", k=k),
            "norm": assembly(pieces((h,), "norm"), "h -> h"),
            "o": assembly(pieces((dim, width), "o"), "d (k h) -> k 1 h d", k=k),
        }


class KimiDelta(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds each row's last inputs of the convolution [taps - 1, K, 3 h] and its state [K, h, h], K as laid out
    (see `HeadLayout`). The rule runs by chunks on prompts and by single steps on decode rows.
    """

    def __init__(self, spec: KimiDeltaSpec, layout: HeadLayout, dim: int, dtype):
        self.spec = spec
        k, h, heads = layout.groups, spec.head_dim, (axes.KV_HEADS, axes.HEAD_DIM)
        self.qkv = param((dim, k, 3 * h), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.conv = param((spec.taps, k, 3 * h), (None, *heads), dtype)
        # The latents of fading and of output gates, and how each head expands them.
        self.down = param((dim, 2 * h), (axes.EMBED, axes.LATENT), dtype, contracting=(0,))
        self.fade = param((h, k, h), (axes.LATENT, *heads), dtype, contracting=(0,))
        self.gate = param((h, k, h), (axes.LATENT, *heads), dtype, contracting=(0,))
        self.b = param((dim, k), (axes.EMBED, axes.KV_HEADS), dtype)
        self.decay = param((k,), heads[:1], jnp.float32, "zeros")
        self.decay_shift = param((k, h), heads, jnp.float32, "ones")
        self.norm = param((h,), (axes.HEAD_DIM,), dtype, "ones")
        names = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM, axes.EMBED)
        self.o = param((k, layout.queries, h, dim), names, dtype, contracting=(0, 1, 2))

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        mixed, (fade, gate) = ctx.matmul(x, self.qkv[...]), jnp.split(ctx.matmul(x, self.down[...]), 2, axis=-1)
        fade = ctx.matmul(fade, self.fade[...], out_dtype=jnp.float32) + self.decay_shift[...]
        log_decay = -jnp.exp(self.decay[...])[:, None] * jax.nn.softplus(fade)
        beta = jax.nn.sigmoid(ctx.matmul(x, self.b[...], out_dtype=jnp.float32))
        out, cache = states.in_turn(self.rule, (mixed, log_decay, beta), ctx.batch, cache)
        gate = jax.nn.sigmoid(ctx.matmul(gate, self.gate[...], out_dtype=jnp.float32))
        out = (rms_norm(out, self.norm[...], self.spec.eps) * gate).astype(mixed.dtype)
        return ctx.matmul(out[:, :, None], self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], old: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        (mixed, *gates), (tail, state) = inputs, old
        mixed, tail = causal_conv(mixed, tail, self.conv[...], lengths)
        q, k, v = jnp.split(jax.nn.silu(mixed), 3, axis=-1)
        heads = unit(q) * self.spec.head_dim**-0.5, unit(k), v
        out, state = states.advance(kimi_delta_chunk, kimi_delta_step, (*heads, *gates), state, lengths)
        return out, (tail, state)
