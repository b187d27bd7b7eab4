"""From checkpoint tensors ([out, in], one per projection) to the decoder's weights.

For every part of a layer: which tensors it is made of, with the shapes they must have, and the function
that lays them out. Letters: H query heads, K KV heads, G = H / K, h head size, D width, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.models.config import AttentionSpec, LayerSpec, ModelConfig, RopeSpec


@dataclass(frozen=True)
class Piece:
    """Rows of a checkpoint tensor: `shape` is the whole tensor's; rows None means all."""

    tensor: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None


def layer_pieces(names: Mapping[str, str], spec: LayerSpec, part: str, dim: int) -> tuple[Piece, ...]:
    """The checkpoint tensors of one layer's `part` ("attn.qkv", "mlp.down_bias", "pre_attn_norm", ...).

    names: the family's map of parts to modules, prefix included.
    """
    suffix = ".bias" if part.endswith("_bias") else ".weight"
    tail = () if suffix == ".bias" else (dim,)
    module = part.removesuffix("_bias")
    attn, mlp = spec.attention, spec.mlp
    q_rows, kv_rows = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim
    if module == "attn.qkv":
        return _fused(names, module, {"attn.q": q_rows, "attn.k": kv_rows, "attn.v": kv_rows}, suffix, tail)
    if module == "mlp.gate_up":
        return _fused(names, module, {"mlp.gate": mlp.hidden, "mlp.up": mlp.hidden}, suffix, tail)
    if module == "attn.o":
        shape = (dim,) if suffix == ".bias" else (dim, q_rows)
    elif module == "mlp.down":
        shape = (dim,) if suffix == ".bias" else (dim, mlp.hidden)
    elif module in ("attn.q_norm", "attn.k_norm"):
        full = q_rows if module == "attn.q_norm" else kv_rows
        shape = (full if attn.qk_norm == "full" else attn.head_dim,)
    else:
        shape = (dim,)
    return (Piece(names[module] + suffix, shape),)


def _fused(names, module: str, parts: dict[str, int], suffix: str, tail: tuple[int, ...]) -> tuple[Piece, ...]:
    if module not in names:
        return tuple(Piece(names[key] + suffix, (rows, *tail)) for key, rows in parts.items())
    total, start, pieces = sum(parts.values()), 0, []
    for rows in parts.values():
        pieces.append(Piece(names[module] + suffix, (total, *tail), (start, start + rows)))
        start += rows
    return tuple(pieces)


def top_pieces(names: Mapping[str, str], config: ModelConfig, part: str) -> tuple[Piece, ...]:
    """The checkpoint tensor of `embed`, `final_norm` or `head`."""
    shape = (config.dim,) if part == "final_norm" else (config.vocab, config.dim)
    return (Piece(names[part] + ".weight", shape),)


def assemble(spec: LayerSpec | None, part: str, dtype: str, *pieces: jax.Array) -> jax.Array:
    """Lay out the pieces of a part (see `layer_pieces`) as the decoder wants it. Traceable; one jit per shape."""
    return _layout(spec, part, *pieces).astype(dtype)


def _layout(spec: LayerSpec | None, part: str, *pieces: jax.Array) -> jax.Array:
    if spec is None:
        return pieces[0].T if part == "head" else pieces[0]
    attn = spec.attention
    k, g, h = attn.kv_heads, attn.group, attn.head_dim
    if part in ("attn.qkv", "attn.qkv_bias"):
        q, key, v = pieces
        tail = q.shape[1:]
        q = _half_split(q.reshape(k, g, h, *tail), attn.rope, axis=2)
        key = _half_split(key.reshape(k, 1, h, *tail), attn.rope, axis=2)
        both = jnp.concatenate([q, key, v.reshape(k, 1, h, *tail)], axis=1)
        return jnp.moveaxis(both, 3, 0) if tail else both
    if part in ("attn.q_norm", "attn.k_norm"):
        return _head_weight(pieces[0], attn, part)
    if part == "attn.o":
        return pieces[0].T.reshape(k, g, h, -1)
    if part == "mlp.gate_up":
        return jnp.moveaxis(jnp.stack(pieces), 2, 0)
    if part == "mlp.gate_up_bias":
        return jnp.stack(pieces)
    return pieces[0].T if part == "mlp.down" else pieces[0]


def _head_weight(weight: jax.Array, attn: AttentionSpec, part: str) -> jax.Array:
    if attn.qk_norm == "full":
        weight = weight.reshape((attn.kv_heads, attn.group, -1) if part == "attn.q_norm" else (attn.kv_heads, -1))
    return _half_split(weight, attn.rope, axis=weight.ndim - 1)


def _half_split(x: jax.Array, rope: RopeSpec | None, axis: int) -> jax.Array:
    """Reorder interleaved rotary pairs (2i, 2i+1) to (i, i + dim/2); queries and keys alike, so scores stay."""
    if rope is None or not rope.interleaved:
        return x
    order = np.concatenate([np.arange(0, rope.dim, 2), np.arange(1, rope.dim, 2), np.arange(rope.dim, x.shape[axis])])
    return jnp.take(x, order, axis=axis)
