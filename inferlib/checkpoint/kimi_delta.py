"""From checkpoint tensors to the weights of `models.layers.kimi_delta`. Letters: K heads of size h, D width."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from inferlib.checkpoint.pieces import Piece
from inferlib.models.config import LayerSpec
from inferlib.models.recurrent import KimiDeltaSpec


def kimi_delta_pieces(names: Mapping[str, str], spec: KimiDeltaSpec, module: str, dim: int) -> tuple[Piece, ...]:
    """The tensors of one layer's `module`; see `inferlib.checkpoint.assemble.layer_pieces`."""
    h, width = spec.head_dim, spec.heads * spec.head_dim

    def pieces(shape: tuple[int, ...], *parts: str) -> tuple[Piece, ...]:
        return tuple(Piece(names["delta." + part] + ".weight", shape) for part in parts)

    match module.removeprefix("attn."):
        case "qkv":
            return pieces((width, dim), "q", "k", "v")
        case "conv":
            return pieces((width, 1, spec.taps), "q_conv", "k_conv", "v_conv")
        case "down":
            return pieces((h, dim), "fade_a", "gate_a")
        case "fade" | "gate" as part:
            return pieces((width, h), part + "_b")
        case "b":
            return pieces((spec.heads, dim), "b")
        case "norm":
            return pieces((h,), "norm")
        case "o":
            return pieces((dim, width), "o")
        case "decay":
            return (Piece(names["delta.decay"], (1, 1, spec.heads, 1)),)
    return (Piece(names["delta.decay_shift"], (width,)),)


def kimi_delta_rule(spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    """Lay out the pieces of a part. Traceable."""
    first, heads = pieces[0], spec.attention.heads
    match part:
        case "attn.qkv" | "attn.conv":  # [D or taps, K, 3 h]
            of_heads = jnp.stack([x.reshape(heads, -1, x.shape[-1]) for x in pieces], axis=1)
            return jnp.moveaxis(of_heads.reshape(heads, -1, first.shape[-1]), 2, 0)
        case "attn.down":
            return jnp.concatenate(pieces).T
        case "attn.fade" | "attn.gate":
            return jnp.moveaxis(first.reshape(heads, -1, first.shape[1]), 2, 0)
        case "attn.b":
            return first.T
        case "attn.decay":
            return first.reshape(heads)
        case "attn.decay_shift":
            return first.reshape(heads, -1)
        case "attn.o":
            return first.T.reshape(heads, 1, spec.attention.head_dim, -1)
    return first
