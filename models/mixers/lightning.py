"""Lightning attention (MiniMax 2025, "MiniMax-01", arXiv 2501.08313). Letters: K heads of size h, D width."""

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
from inferlib.models.layers.norm import scale_norm
from inferlib.models.layers.param import param
from inferlib.models.mixers import states
from inferlib.models.mixers.common import EqualHeads
from inferlib.models.pieces import Assembly, Piece, assembly
from inferlib.models.recurrent import HeadCollective, StateArray
from inferlib.ops.matmul import Activations
from inferlib.ops.state_space import state_space_chunk, state_space_step
from inferlib.sharding import axes


@dataclass(frozen=True)
class LightningSpec(EqualHeads):
    """Linear attention in which the state [h, h] of each head fades at a rate of its own, the same for all tokens.
    Queries, keys and values are activated; heads' outputs are normed together and gated. eps: of the norm."""

    eps: float = 1e-6

    title: ClassVar[str] = "lightning attention"

    def states(self, layout: HeadLayout) -> tuple[StateArray, ...]:
        shape, names = (layout.groups, self.head_dim, self.head_dim), (axes.KV_HEADS, None, axes.HEAD_DIM)
        return (StateArray("state", shape, names, wide=True),)

    def build(self, layout: HeadLayout, dim: int, dtype) -> Lightning:
        return Lightning(self, layout, dim, dtype)

    @property
    def token_products(self) -> int:
        """One vector reads the state and one changes it."""
        return 2 * self.head_dim * self.head_dim

    def collectives(self, layout: HeadLayout, devices: int) -> tuple[HeadCollective, ...]:
        return (HeadCollective("all-reduce", "norm of all heads", 1),)

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        """The rows of the fused tensor are the query, key and value of one head after the other. "decay" is no tensor:
        families compute it."""
        k, width = self.heads, self.heads * self.head_dim

        def piece(part: str, *shape: int) -> Piece:
            return Piece(names["lightning." + part] + ".weight", shape)

        return {
            "qkv": assembly(piece("qkv", 3 * width, dim), "(k qkv) d -> d k qkv", k=k),
            "gate": assembly(piece("gate", width, dim), "(k h) d -> d k h", k=k),
            "norm": assembly(piece("norm", width), "(k h) -> k h", k=k),
            "o": assembly(piece("o", dim, width), "d (k h) -> k 1 h d", k=k),
        }

    def summary(self) -> str:
        return f"{self.title} with {self.heads} heads, states of {self.head_dim} x {self.head_dim}"


class Lightning(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads.

    The cache holds each row's state [K, h, h], K as laid out (see `HeadLayout`). It advances by chunks on prompts and
    by single steps on decode rows.
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

    def __call__(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        qkv, gate = ctx.matmul(x, self.qkv[...]), ctx.matmul(x, self.gate[...], out_dtype=jnp.float32)
        out, cache = states.in_turn(self.rule, (jax.nn.silu(qkv),), ctx.batch, cache)
        heads = self.spec.heads * self.layout.copies
        squares = ctx.shards.sum(jnp.sum(out * out, axis=(1, 2), keepdims=True), axes.KV_HEADS)
        out = scale_norm(out, squares / (heads * self.spec.head_dim), self.norm[...], self.spec.eps, False)
        out = (out * jax.nn.sigmoid(gate)).astype(qkv.dtype)
        return ctx.matmul(out[:, :, None], self.o[...], contract=3), cache

    def rule(self, inputs: list[jax.Array], old: states.States, lengths: jax.Array) -> tuple[jax.Array, states.States]:
        """See `states.Rule`."""
        ((qkv,), (state,)) = inputs, old
        q, k, v = jnp.split(qkv, 3, axis=-1)  # [P, C, K, h]
        v = v[:, :, :, None]
        heads = q, k, v, jnp.broadcast_to(-self.decay[...][:, None], v.shape[:-1])
        out, state = states.advance(state_space_chunk, state_space_step, heads, state, lengths)
        return out[:, :, :, 0], (state,)
