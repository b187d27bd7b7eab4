"""From checkpoint tensors to the weights of `models.layers.gated_delta`.

Queries, keys, values and their gates z are one tensor, those of each key head in turn ("delta.qkvz"), or two, queries,
keys and values of all heads and z, or four, and the convolution's three. So are the numbers b and a of a value head
("delta.ba"). Letters: K key heads with G value heads each, h and v their sizes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from inferlib.checkpoint.pieces import Piece
from inferlib.models.config import LayerSpec
from inferlib.models.recurrent import GatedDeltaSpec


def delta_pieces(names: Mapping[str, str], attn: GatedDeltaSpec, module: str, dim: int) -> tuple[Piece, ...]:
    """The tensors of one layer's `module`; see `inferlib.checkpoint.assemble.layer_pieces`."""
    keys, values = 2 * attn.kv_heads * attn.head_dim, attn.heads * attn.value_dim

    def piece(name: str, *shape: int, rows: tuple[int, int] | None = None) -> Piece:
        return Piece(names["delta." + name] + ".weight", shape, rows)

    match module.removeprefix("attn."):
        case "qk" | "vz" if "delta.qkvz" in names:
            return (piece("qkvz", keys + 2 * values, dim),)
        case "qk" if "delta.q" in names:
            return tuple(piece(part, keys // 2, dim) for part in "qk")
        case "vz" if "delta.q" in names:
            return tuple(piece(part, values, dim) for part in "vz")
        case "conv_qk" if "delta.q" in names:
            return tuple(piece(part + "_conv", keys // 2, 1, attn.taps) for part in "qk")
        case "conv_v" if "delta.q" in names:
            return (piece("v_conv", values, 1, attn.taps),)
        case "qk":
            return (piece("qkv", keys + values, dim, rows=(0, keys)),)
        case "vz":
            return piece("qkv", keys + values, dim, rows=(keys, keys + values)), piece("z", values, dim)
        case "ba" if "delta.ba" in names:
            return (piece("ba", 2 * attn.heads, dim),)
        case "ba":
            return piece("b", attn.heads, dim), piece("a", attn.heads, dim)
        case "conv_qk" | "conv_v" as part:
            rows = (0, keys) if part == "conv_qk" else (keys, keys + values)
            return (piece("conv", keys + values, 1, attn.taps, rows=rows),)
        case "norm":
            return (piece("norm", attn.value_dim),)
        case "o":
            return (piece("o", dim, values),)
        case part:  # named in full
            return (Piece(names["delta." + part], (attn.heads,)),)


def delta_rule(spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    """Lay out the pieces of a part. Traceable."""
    attn, first = spec.attention, pieces[0]
    heads, group, size, value = attn.kv_heads, attn.group, attn.head_dim, attn.value_dim
    match part:
        case "attn.qk" | "attn.vz" if first.shape[0] == heads * 2 * (size + group * value):
            of_key_heads = first.reshape(heads, -1, *first.shape[1:])
            qk, vz = of_key_heads[:, : 2 * size], of_key_heads[:, 2 * size :]
            if part == "attn.qk":
                return jnp.moveaxis(qk, 2, 0)
            return _value_heads(vz.reshape(heads, 2, group, value, -1))
        case "attn.qk":
            return _key_heads(jnp.concatenate(pieces), heads)
        case "attn.vz":
            return _value_heads(jnp.stack([x.reshape(heads, group, value, -1) for x in pieces], axis=1))
        case "attn.ba" if len(pieces) == 1:
            return jnp.moveaxis(first.reshape(heads, 2, group, -1), (3, 1), (0, 3))
        case "attn.ba":
            return jnp.moveaxis(jnp.stack([x.reshape(heads, group, -1) for x in pieces], axis=1), (3, 1), (0, 3))
        case "attn.conv_qk":
            return _key_heads(jnp.concatenate(pieces)[:, 0], heads)
        case "attn.conv_v":
            return jnp.moveaxis(first.reshape(heads, group, value, -1), 3, 0)
        case "attn.decay" | "attn.decay_shift":
            return first.reshape(heads, group)
        case "attn.o":
            return first.T.reshape(heads, group, value, -1)
    return first


def _key_heads(x: jax.Array, heads: int) -> jax.Array:
    """Of all heads' queries, then keys, [2 K h, D], each head's query and key: [D, K, 2 h]."""
    both = jnp.moveaxis(x.reshape(2, heads, -1, x.shape[1]), 0, 1)
    return jnp.moveaxis(both.reshape(heads, -1, x.shape[1]), 2, 0)


def _value_heads(x: jax.Array) -> jax.Array:
    """[K, 2, G, v, D] -> [D, K, G, 2 v]."""
    x = jnp.moveaxis(x, (4, 1), (0, 3))
    return x.reshape(*x.shape[:3], -1)
