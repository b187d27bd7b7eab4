"""From checkpoint tensors to the weights of `models.layers.lightning`: each head's query, key and value in turn are one
tensor. Letters: K heads of size h, D width."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from inferlib.checkpoint.pieces import Piece
from inferlib.models.config import LayerSpec
from inferlib.models.recurrent import LightningSpec


def lightning_pieces(names: Mapping[str, str], spec: LightningSpec, module: str, dim: int) -> tuple[Piece, ...]:
    """The tensors of one layer's `module`; see `inferlib.checkpoint.assemble.layer_pieces`."""
    width, part = spec.heads * spec.head_dim, module.removeprefix("attn.")
    shape = {"qkv": (3 * width, dim), "gate": (width, dim), "norm": (width,), "o": (dim, width)}[part]
    return (Piece(names["lightning." + part] + ".weight", shape),)


def lightning_rule(spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    """Lay out the piece of a part. Traceable."""
    (x,), heads = pieces, spec.attention.heads
    match part:
        case "attn.qkv" | "attn.gate":
            return jnp.moveaxis(x.reshape(heads, -1, x.shape[1]), 2, 0)
        case "attn.norm":
            return x.reshape(heads, -1)
        case "attn.o":
            return x.T.reshape(heads, 1, spec.attention.head_dim, -1)
    return x
