"""From checkpoint tensors to the weights of `models.layers.mamba2`.

Gates z, inputs x, B, C of all groups, and the steps dt of all heads are the rows of one tensor, in this order, and x, B
and C those of the convolution. Letters: K groups of G heads each, n and v the sizes of their B and x, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from inferlib.checkpoint.pieces import Piece
from inferlib.models.config import LayerSpec
from inferlib.models.recurrent import Mamba2Spec


def mamba_pieces(names: Mapping[str, str], attn: Mamba2Spec, module: str, dim: int) -> tuple[Piece, ...]:
    """The tensors of one layer's `module`; see `inferlib.checkpoint.assemble.layer_pieces`."""
    inner, pairs = attn.heads * attn.value_dim, 2 * attn.kv_heads * attn.head_dim
    x, bc = (0, inner), (inner, inner + pairs)
    match module.removeprefix("attn."):
        case "z" | "x" | "bc" | "dt" as part:
            ends = 0, inner, 2 * inner, 2 * inner + pairs, 2 * inner + pairs + attn.heads
            at = ("z", "x", "bc", "dt").index(part)
            return (Piece(names["mamba.in"] + ".weight", (ends[-1], dim), ends[at : at + 2]),)
        case "conv_x" | "conv_bc" as part:
            shape, rows = (inner + pairs, 1, attn.taps), x if part == "conv_x" else bc
            return (Piece(names["mamba.conv"] + ".weight", shape, rows),)
        case "conv_x_shift" | "conv_bc_shift" as part:
            return (Piece(names["mamba.conv"] + ".bias", (inner + pairs,), x if part == "conv_x_shift" else bc),)
        case "norm":
            return (Piece(names["mamba.norm"] + ".weight", (inner,)),)
        case "o":
            return (Piece(names["mamba.out"] + ".weight", (dim, inner)),)
        case part:  # named in full
            return (Piece(names["mamba." + part], (attn.heads,)),)


def mamba_rule(spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    """Lay out the piece of a part. Traceable."""
    attn, (x,) = spec.attention, pieces
    groups, group, size = attn.kv_heads, attn.group, attn.value_dim
    match part:
        case "attn.z" | "attn.x":
            return jnp.moveaxis(x.reshape(groups, group, size, -1), 3, 0)
        case "attn.bc":
            return jnp.moveaxis(_pairs(x, groups), 2, 0)
        case "attn.dt":
            return x.T.reshape(-1, groups, group)
        case "attn.conv_x":
            return jnp.moveaxis(x[:, 0].reshape(groups, group, size, -1), 3, 0)
        case "attn.conv_bc":
            return jnp.moveaxis(_pairs(x[:, 0], groups), 2, 0)
        case "attn.conv_bc_shift":
            return _pairs(x[:, None], groups)[..., 0]
        case "attn.conv_x_shift" | "attn.norm":
            return x.reshape(groups, group, size)
        case "attn.o":
            return x.T.reshape(groups, group, size, -1)
    return x.reshape(groups, group)  # a number for each head


def _pairs(x: jax.Array, groups: int) -> jax.Array:
    """Of all groups' B, then C, [2 K n, D], each group's B and C: [K, 2 n, D]."""
    both = jnp.moveaxis(x.reshape(2, groups, -1, x.shape[1]), 0, 1)
    return both.reshape(groups, -1, x.shape[1])
