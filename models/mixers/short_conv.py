"""Gated short convolutions (LFM2, Liquid AI 2025). Letters: K heads of h channels, D width."""

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
from inferlib.models.layers.param import param
from inferlib.models.mixers import states
from inferlib.models.mixers.common import EqualHeads, check_taps
from inferlib.models.pieces import Assembly, Piece, assembly
from inferlib.models.recurrent import StateArray
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.matmul import Activations
from inferlib.sharding import axes


@dataclass(frozen=True)
class ShortConvSpec(EqualHeads):
    """A token has three projections b, c and x. A causal convolution of b x, each channel by itself, is multiplied by
    c. A row keeps the convolution's last inputs and nothing else.

    heads: parts of the channels, which a mesh can split; taps: length of the convolution.
    """

    taps: int

    title: ClassVar[str] = "short convolution"

    def __post_init__(self):
        super().__post_init__()
        check_taps(self.taps)

    def states(self, layout: HeadLayout) -> tuple[StateArray, ...]:
        shape, names = (self.taps - 1, layout.groups, self.head_dim), (None, axes.KV_HEADS, axes.HEAD_DIM)
        return (StateArray("tail", shape, names, wide=False),)

    def build(self, layout: HeadLayout, dim: int, dtype) -> ShortConv:
        return ShortConv(self, layout, dim, dtype)

    @property
    def token_products(self) -> int:
        """The taps and two gates."""
        return (self.taps + 2) * self.head_dim

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        k, channels = self.heads, self.heads * self.head_dim

        def piece(part: str, *shape: int) -> Piece:
            return Piece(names["conv." + part] + ".weight", shape)

        return {
            "bcx": assembly(piece("bcx", 3 * channels, dim), "(bcx k h) d -> d k (bcx h)", bcx=3, k=k),
            "conv": assembly(piece("conv", channels, 1, self.taps), "(k h) 1 taps -> taps k h", k=k),
            "o": assembly(piece("o", dim, channels), "d (k h) -> k 1 h d", k=k),
        }

    def summary(self) -> str:
        return f"{self.title} of {self.heads * self.head_dim} channels, {self.taps} taps"


class ShortConv(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over channels.

    The cache holds each row's last inputs of the convolution [taps - 1, K, h], K as laid out (see `HeadLayout`).
    """

    def __init__(self, spec: ShortConvSpec, layout: HeadLayout, dim: int, dtype):
        k, h, heads = layout.groups, spec.head_dim, (axes.KV_HEADS, axes.HEAD_DIM)
        self.bcx = param((dim, k, 3 * h), (axes.EMBED, *heads), dtype, contracting=(0,))
        self.conv = param((spec.taps, k, h), (None, *heads), dtype)
        names = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM, axes.EMBED)
        self.o = param((k, layout.queries, h, dim), names, dtype, contracting=(0, 1, 2))

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        b, c, x = jnp.split(ctx.matmul(x, self.bcx[...]), 3, axis=-1)  # [T, K, h]
        out, cache = states.in_turn(self.rule, (b * x,), ctx.batch, cache)
        return ctx.matmul((c * out.astype(c.dtype))[:, :, None], self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], old: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        ((mixed,), (tail,)) = inputs, old
        out, tail = causal_conv(mixed, tail, self.conv[...], lengths)
        valid = jnp.arange(out.shape[1]) < lengths[:, None]
        return jnp.where(valid[..., None, None], out, 0.0), (tail,)
