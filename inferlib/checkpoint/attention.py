"""Checkpoint tensors of attention and of latent attention, [out, in] each, as parameters.

Letters: H query heads, K KV heads, G = H / K, h head size, D width; of latent attention, R latents, n and r the parts
of a query and key head without and with positions, v value head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from inferlib.models.config import AttentionSpec, MlaSpec, RopeSpec
from inferlib.models.pieces import Arrange, Assembly, HeadRows, Piece, assembly


@dataclass(frozen=True)
class _Tensors:
    """A layer's tensors by their parts in the family's name map; their biases if the parameter is a bias."""

    names: Mapping[str, str]
    bias: bool
    dim: int

    def __call__(self, part: str, rows: int, columns: int | None = None) -> Piece:
        """A matrix [rows, columns], D columns if None; or the bias [rows]."""
        shape = (rows,) if self.bias else (rows, columns or self.dim)
        return Piece(self.names["attn." + part] + (".bias" if self.bias else ".weight"), shape)

    def norm(self, part: str, size: int) -> Piece:
        return Piece(self.names["attn." + part] + ".weight", (size,))

    def fused(self, module: str, parts: Mapping[str, int]) -> tuple[Piece, ...]:
        """Tensors with these numbers of rows; if the family stores them as one `module`, its rows in this order."""
        if "attn." + module not in self.names:
            return tuple(self(part, rows) for part, rows in parts.items())
        return fused_rows(self(module, sum(parts.values())), tuple(parts.values()))


def fused_rows(whole: Piece, counts: tuple[int, ...]) -> tuple[Piece, ...]:
    """Cut a fused tensor into pieces of `counts` rows."""
    ends = accumulate(counts, initial=0)
    return tuple(Piece(whole.tensor, whole.shape, rows) for rows in pairwise(ends))


def attention_assembly(names: Mapping[str, str], spec: AttentionSpec, parameter: str, dim: int) -> Assembly:
    """How a parameter of `models.layers.attention` is made, "qkv" or "qkv_bias" for example."""
    part = parameter.removesuffix("_bias")
    tensors, k, g, h, v = (
        _Tensors(names, part != parameter, dim),
        spec.kv_heads,
        spec.group,
        spec.head_dim,
        spec.value_dim,
    )
    # If queries and gates are one tensor, each head's in turn, both parameters read all of it.
    shared = spec.gate is not None and names["attn.gate"] == names["attn.q"]
    match part:
        case "key_basis":
            return assembly(Piece(names["attn.key_basis"], (k, h, spec.key_basis)), "k h d -> k h d")
        case "key_turns":
            return assembly(Piece(names["attn.key_turns"], (k, 2, h, h)), "k n h d -> k n h d")
        case "qkv" if parameter == "qkv_bias" and "attn.qk_bias" in names:
            biases = Piece(names["attn.qk_bias"], (2, 1, spec.heads, h))
            return Assembly((biases,), _QueryKeyBiases(_rotary(spec.rope)))
        case "value_embedding.table" if spec.value_embedding is not None:
            return assembly(tensors("value_embedding", spec.value_embedding.vocab, k * v), "row (k h) -> row k h", k=k)
        case "value_embedding.gate" if spec.value_embedding is not None:
            return assembly(tensors("value_gate", k, spec.value_embedding.channels), "k channel -> channel k")
        case "qkv" | "v":
            rows = {"q": spec.heads * h * (1 + shared)}
            if spec.cache_of is None:
                rows |= {"k": k * h} | ({} if spec.key_is_value else {"v": k * v})
            pieces = tensors.fused("qkv", rows)
            if part == "v":
                return assembly(pieces[2:], "(k v) ... -> ... k v", k=k)
            return Assembly(pieces[: 1 + spec.fused_heads], _FusedHeads(k, h, spec.heads * shared, _rotary(spec.rope)))
        case "gate" if spec.gate is not None and spec.gate.per_head:
            return assembly(tensors("gate", spec.heads), "(k g) d -> d k g", k=k)
        case "gate":
            last = Arrange("(k g) v d -> d k g v", (("k", k),))
            size = v * (1 + shared)
            return Assembly((tensors("gate", spec.heads * size),), HeadRows(spec.heads, size - v, size, last))
        case "q_norm" | "k_norm" if spec.qk_norm == "full":
            heads, pattern = (spec.heads, "(k g h) -> k g h") if part == "q_norm" else (k, "(k h) -> k h")
            arrange = Arrange(pattern, (("k", k), ("h", h)))
            return Assembly((tensors.norm(part, heads * h),), _HalfSplit(_rotary(spec.rope), arrange))
        case "q_norm" | "k_norm":
            return Assembly((tensors.norm(part, h),), _HalfSplit(_rotary(spec.rope), Arrange("h -> h")))
        case "sinks":
            return assembly(Piece(names["attn.sinks"], (spec.heads,)), "(k g) -> k g", k=k)
        case _:
            return _output(tensors, spec.heads * v, "d (k g v) -> k g v d", k=k, g=g)


def latent_assembly(names: Mapping[str, str], spec: MlaSpec, parameter: str, dim: int) -> Assembly:
    """How a parameter of `models.layers.mla` is made, "down" or "down_bias" for example."""
    part = parameter.removesuffix("_bias")
    tensors, heads, nope, rotary = (
        _Tensors(names, part != parameter, dim),
        spec.heads,
        spec.nope_dim,
        _rotary(spec.rope),
    )
    match part:
        case "down":
            rows = {"q_a": spec.q_rank} if spec.q_rank else {}
            pieces = tensors.fused("down", rows | {"kv_a": spec.kv_rank + spec.rope.dim})
            return Assembly(pieces, _LatentDown(spec.kv_rank, rotary))
        case "q":
            piece = tensors("q_b" if spec.q_rank else "q", heads * spec.head_dim, spec.q_rank)
            return Assembly((piece,), _LatentQueries(heads, nope, rotary))
        case "k" | "v":
            size = nope + spec.value_dim
            ends, pattern = ((0, nope), "h n r -> h n r") if part == "k" else ((nope, size), "h v r -> h r v")
            piece = tensors("kv_b", heads * size, spec.kv_rank)
            return Assembly((piece,), HeadRows(heads, *ends, Arrange(pattern)))
        case "q_norm" if spec.q_rank is not None:
            return assembly(tensors.norm(part, spec.q_rank), "r -> r")
        case "kv_norm":
            return assembly(tensors.norm(part, spec.kv_rank), "r -> r")
        case _:
            return _output(tensors, heads * spec.value_dim, "d (h v) -> h v d", h=heads)


def _output(tensors: _Tensors, width: int, pattern: str, **sizes: int) -> Assembly:
    piece = tensors("o", tensors.dim, width)
    return assembly(piece, "d -> d") if tensors.bias else assembly(piece, pattern, **sizes)


def _rotary(rope: RopeSpec | None) -> int:
    """Dimensions whose rotary pairs are interleaved."""
    return rope.dim if rope is not None and rope.interleaved else 0


def half_split(x: jax.Array, rotary: int, axis: int) -> jax.Array:
    """Reorder the first `rotary` entries from pairs (2i, 2i + 1) to (i, i + rotary / 2). Scores stay the same if
    queries and keys are both reordered."""
    if not rotary:
        return x
    order = np.concatenate([np.arange(0, rotary, 2), np.arange(1, rotary, 2), np.arange(rotary, x.shape[axis])])
    return jnp.take(x, order, axis=axis)


@dataclass(frozen=True)
class _HalfSplit:
    """`arrange`, then the rotary pairs of the last axis in halves."""

    rotary: int
    arrange: Arrange

    def __call__(self, x: jax.Array) -> jax.Array:
        return half_split(self.arrange(x), self.rotary, axis=-1)


@dataclass(frozen=True)
class _FusedHeads:
    """Queries, keys and values as one array [D, K, G + 2, h], or biases [K, G + 2, h]; fewer if keys or values are
    absent. gated_heads: H, if each query head's rows are followed by its gate's; else 0."""

    kv_heads: int
    head_dim: int
    gated_heads: int
    rotary: int

    def __call__(self, q: jax.Array, *kv: jax.Array) -> jax.Array:
        if self.gated_heads:
            q = HeadRows(self.gated_heads, 0, self.head_dim, Arrange("heads h ... -> (heads h) ..."))(q)
        sizes = {"k": self.kv_heads, "h": self.head_dim}
        heads = [rearrange(x, "(k n h) ... -> k n h ...", **sizes) for x in (q, *kv)]
        turned = [half_split(x, self.rotary, axis=2) for x in heads[:2]]  # queries and keys
        return rearrange(jnp.concatenate([*turned, *heads[2:]], axis=1), "k n h ... -> ... k n h")


@dataclass(frozen=True)
class _QueryKeyBiases:
    """Biases [2, 1, K, h] of queries and keys, one query head for each key head, as [K, 3, h] with none of values."""

    rotary: int

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k = half_split(x[:, 0], self.rotary, axis=-1)
        return jnp.stack([q, k, jnp.zeros_like(k)], axis=1)


@dataclass(frozen=True)
class _LatentDown:
    """Projections to the queries' latent, if there is one, to the keys' and values', and to the rotary key: [D, R + r],
    or biases [R + r]."""

    kv_rank: int
    rotary: int

    def __call__(self, *pieces: jax.Array) -> jax.Array:
        *q, kv = pieces
        turned = half_split(kv[self.kv_rank :], self.rotary, axis=0)
        return rearrange(jnp.concatenate([*q, kv[: self.kv_rank], turned]), "out ... -> ... out")


@dataclass(frozen=True)
class _LatentQueries:
    """Queries [R or D, H, n + r]."""

    heads: int
    nope_dim: int
    rotary: int

    def __call__(self, q: jax.Array) -> jax.Array:
        heads = rearrange(q, "(h nr) d -> h nr d", h=self.heads)
        turned = half_split(heads[:, self.nope_dim :], self.rotary, axis=1)
        return rearrange(jnp.concatenate([heads[:, : self.nope_dim], turned], axis=1), "h nr d -> d h nr")
