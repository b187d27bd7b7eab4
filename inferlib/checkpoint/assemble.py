"""From checkpoint tensors ([out, in], one per projection) to the decoder's weights.

For every part of a layer: which tensors it is made of, with the shapes they must have, and the function
that lays them out. Letters: H query heads, K KV heads, G = H / K, h head size, D width, F feed-forward; of latent
attention, R latents, n + r a query's and a key's parts without and with positions, v value head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.checkpoint.delta import delta_pieces, delta_rule
from inferlib.checkpoint.kimi_delta import kimi_delta_pieces, kimi_delta_rule
from inferlib.checkpoint.lightning import lightning_pieces, lightning_rule
from inferlib.checkpoint.mamba import mamba_pieces, mamba_rule
from inferlib.checkpoint.pieces import Piece
from inferlib.checkpoint.short_conv import short_conv_pieces, short_conv_rule
from inferlib.checkpoint.source import TensorSource
from inferlib.models.abstract import WeightSpec
from inferlib.models.config import AttentionSpec, LayerSpec, MlaSpec, MlpSpec, ModelConfig, RopeSpec
from inferlib.models.families.common import FusedExperts
from inferlib.models.layout import HeadLayout, Layout
from inferlib.models.recurrent import GatedDeltaSpec, KimiDeltaSpec, LightningSpec, Mamba2Spec, Mixer, ShortConvSpec
from inferlib.sharding import axes


@dataclass(frozen=True)
class LoadItem:
    """One weight and the tensors it is made of: a tuple of pieces per layer (several if it is stacked). placed: of each
    layer, the expert of each slot, if experts are placed by a file."""

    weight: WeightSpec
    layer: LayerSpec | None
    pieces: tuple[tuple[Piece, ...], ...]
    fused_experts: FusedExperts
    placed: tuple[tuple[int, ...], ...] | None = None


# Parts of a layer that are the checkpoint's tensors as they are, matrices transposed; the latter named in full.
_PLAIN = ("altup.", "laurel.", "per_layer.")
_NAMED_IN_FULL = ("scalar", "altup.scale", "mlp.router.norm", "mlp.router.expert_scale")


def layer_pieces(
    names: Mapping[str, str], spec: LayerSpec, part: str, dim: int, shape: tuple[int, ...]
) -> tuple[Piece, ...]:
    """The checkpoint tensors of one layer's `part` ("attn.qkv", "mlp.down_bias", "pre_attn_norm", ...).

    names: the family's map of parts to modules, prefix included. shape: of the layer's weight.
    """
    part = part.removesuffix(".weight")
    if part in _NAMED_IN_FULL:
        return (Piece(names[part], shape),)
    if part.startswith(_PLAIN):
        return (Piece(names[part] + ".weight", shape[::-1]),)
    if part == "mlp.router.correction":
        return _correction(names[part], spec.mlp.router.experts)
    suffix = ".bias" if part.endswith(("_bias", ".bias")) else ".weight"
    tail = () if suffix == ".bias" else (dim,)
    module = part.removesuffix("_bias").removesuffix(".bias")
    if module.startswith("attn.") and (pieces := _PIECES.get(type(spec.attention))):
        return pieces(names, spec.attention, module, dim)
    if module == "attn.o":
        shape = (dim,) if suffix == ".bias" else (dim, spec.attention.heads * spec.attention.value_dim)
        return (Piece(names[module] + suffix, shape),)
    if module.startswith("attn."):
        pieces = _latent_pieces if isinstance(spec.attention, MlaSpec) else _attention_pieces
        return pieces(names, spec.attention, module, suffix, tail)
    if module in ("mlp.gate_up", "mlp.shared.gate_up"):
        gate, up = (module.removesuffix("gate_up") + key for key in ("gate", "up"))
        hidden = _mlp_spec(spec, module).hidden
        halves = {gate: hidden, up: hidden} if _mlp_spec(spec, module).gated else {up: hidden}
        return _fused(names, module, halves, suffix, tail)
    if module in ("mlp.down", "mlp.shared.down"):
        shape = (dim,) if suffix == ".bias" else (dim, _mlp_spec(spec, module).hidden)
    elif module == "mlp.router":
        shape = (spec.mlp.router.experts, *tail)
    elif module == "mlp.shared_gate":
        shape = (1, dim)
    else:
        shape = (dim,)
    return (Piece(names[module] + suffix, shape),)


def _attention_pieces(names, attn: AttentionSpec, module: str, suffix: str, tail: tuple[int, ...]):
    q_rows, k_rows, v_rows = (
        heads * size
        for heads, size in (
            (attn.heads, attn.head_dim),
            (attn.kv_heads, attn.head_dim),
            (attn.kv_heads, attn.value_dim),
        )
    )
    if module == "attn.sinks":
        return (Piece(names[module], (attn.heads,)),)
    if module == "attn.gate":
        rows = attn.heads * (1 if attn.gate.per_head else attn.value_dim)
        if names[module] == names["attn.q"]:
            rows += q_rows
        return (Piece(names[module] + suffix, (rows, *tail)),)
    if module in ("attn.q_norm", "attn.k_norm"):
        full = q_rows if module == "attn.q_norm" else k_rows
        return (Piece(names[module] + suffix, (full if attn.qk_norm == "full" else attn.head_dim,)),)
    # Where queries and gates are one tensor, each head's in turn, both read all of it.
    shared = attn.gate is not None and names["attn.gate"] == names["attn.q"]
    rows = {"attn.q": 2 * q_rows if shared else q_rows}
    if attn.cache_of is None:
        rows |= {"attn.k": k_rows} | ({} if attn.key_is_value else {"attn.v": v_rows})
    pieces = _fused(names, "attn.qkv", rows, suffix, tail)
    return pieces[2:] if module == "attn.v" else pieces[: 1 + attn.fused_heads]


def _latent_pieces(names, attn: MlaSpec, module: str, suffix: str, tail: tuple[int, ...]):
    if module == "attn.down":
        rows = {"attn.q_a": attn.q_rank} if attn.q_rank else {}
        return _fused(names, module, rows | {"attn.kv_a": attn.kv_rank + attn.rope.dim}, suffix, tail)
    if module == "attn.q":
        source, shape = ("attn.q_b", (attn.q_rank,)) if attn.q_rank else (module, tail)
        return (Piece(names[source] + suffix, (attn.heads * attn.head_dim, *shape)),)
    if module in ("attn.k", "attn.v"):
        rows = attn.heads * (attn.nope_dim + attn.value_dim)
        return (Piece(names["attn.kv_b"] + suffix, (rows, attn.kv_rank)),)
    return (Piece(names[module] + suffix, (attn.q_rank if module == "attn.q_norm" else attn.kv_rank,)),)


def _mlp_spec(spec: LayerSpec, module: str) -> MlpSpec:
    return spec.mlp.shared if module.startswith("mlp.shared.") else spec.mlp


def _correction(name: str, experts: int) -> tuple[Piece, ...]:
    """A vector, or "...[0]": the only row of a matrix."""
    if name.endswith("[0]"):
        return (Piece(name.removesuffix("[0]"), (1, experts)),)
    return (Piece(name, (experts,)),)


def _fused(names, module: str, parts: dict[str, int], suffix: str, tail: tuple[int, ...]) -> tuple[Piece, ...]:
    if module not in names:
        return tuple(Piece(names[key] + suffix, (rows, *tail)) for key, rows in parts.items())
    total, start, pieces = sum(parts.values()), 0, []
    for rows in parts.values():
        pieces.append(Piece(names[module] + suffix, (total, *tail), (start, start + rows)))
        start += rows
    return tuple(pieces)


def top_pieces(names: Mapping[str, str], config: ModelConfig, part: str) -> tuple[Piece, ...]:
    """The checkpoint tensors of a part outside the layers: `embed`, `positions`, `final_norm`, `head`, the bias of one
    of the latter two, `per_layer.table`, `.projection` or `.norm`, `streams.split` or `.merge`; of the latter "{n}" in
    a name is the number."""
    module = part.removesuffix("_bias").removesuffix(".bias")
    if module != part:
        return (Piece(names[module] + ".bias", (config.vocab if module == "head" else config.dim,)),)
    if part.startswith("streams."):
        tensors = (names[part].format(n=n) + ".weight" for n in range(config.streams - 1))
        return tuple(Piece(tensor, (config.dim, config.dim)) for tensor in tensors)
    if part.startswith("per_layer."):
        spec = config.per_layer
        width = len(config.layers) * spec.dim
        shapes = {"table": (spec.vocab, width), "projection": (width, config.dim), "norm": (spec.dim,)}
        return (Piece(names[part] + ".weight", shapes[part.removeprefix("per_layer.")]),)
    rows = {"final_norm": (), "positions": (config.context,)}.get(part, (config.vocab,))
    shape = (*rows, config.dim)
    return (Piece(names[part] + ".weight", shape),)


def piece_bytes(source: TensorSource, piece: Piece) -> int:
    """Of its rows, on disk."""
    if piece.values is not None:
        return 0
    share = 1.0 if piece.rows is None else (piece.rows[1] - piece.rows[0]) / piece.shape[0]
    return int(source.nbytes(piece.tensor) * share)


def assemble(
    layout: Layout,
    spec: LayerSpec | None,
    names: tuple[str, ...],
    part: str,
    dtype: str,
    *pieces: jax.Array,
    fill: float = 0.0,
) -> jax.Array:
    """Lay out the pieces of a part (see `layer_pieces`) as the decoder wants it. Traceable; one jit per shape.

    names: the logical axes of the result. fill: what padding holds.
    """
    if spec is None or not part.startswith("attn."):
        fuse = _top if spec is None else _mlp
    else:
        fuse = _ASSEMBLED.get(type(spec.attention), _attention)
    return expand(layout, spec, names, fuse(spec, part, pieces), fill).astype(dtype)


def expand(
    layout: Layout, spec: LayerSpec | None, names: tuple[str | None, ...], x: jax.Array, fill: float = 0.0
) -> jax.Array:
    """Copy and pad, with `fill`, heads, feed-forward, experts and vocabulary of a weight laid out for one device, or of
    its values or scales in groups. Traceable."""
    for axis, name in enumerate(names):
        if name == axes.VOCAB:
            x = _padded(x, layout.vocab, axis, fill)
        elif name == axes.MLP:
            x = _padded(x, layout.hidden(x.shape[axis]), axis, fill)
        elif name == axes.EXPERTS:
            x = _padded(x, layout.experts(x.shape[axis]), axis, fill)
        elif name == axes.KV_HEADS:
            queries = names[axis + 1 : axis + 2] == (axes.QUERIES,)
            x = _heads(x, axis, queries, spec.attention.group, layout.heads(spec.attention), fill)
    return x


def alike(layout: Layout, spec: LayerSpec | None, part: str) -> tuple[Layout, LayerSpec | None]:
    """Without what laying out a part does not depend on, so that parts alike share a compilation: of layers that differ
    in a window or in their experts, say, or of other models."""
    attention = AttentionSpec(1, 1, layout.shards.size(axes.HEAD_OUT), scale=1.0, rope=None)  # of any mesh
    if spec is not None and part.startswith("attn."):
        attention = _bare(spec.attention)
    bare, config = LayerSpec(attention, MlpSpec(1)), layout.config
    config = ModelConfig("", config.vocab, config.dim, (bare,), context=1)
    return replace(layout, config=config), spec and bare


_NO_MATTER = {"scale": 1.0, "window": None, "chunk": None, "softcap": None, "temperature": None, "cache_of": None}


def _bare(attention: Mixer) -> Mixer:
    names = {field.name for field in fields(attention)}
    changes = {name: value for name, value in _NO_MATTER.items() if name in names}
    if attention.rope is not None:
        changes["rope"] = replace(attention.rope, base=1.0, scaling=None)
    return replace(attention, **changes)


def _top(_spec: None, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    if part.startswith("streams."):
        return jnp.stack([piece.T for piece in pieces])
    return pieces[0].T if part in ("head", "per_layer.projection") else pieces[0]


def _mlp(_spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    if part.endswith("gate_up"):
        return jnp.moveaxis(jnp.stack(pieces), 2, 0)
    if part.endswith("gate_up_bias"):
        return jnp.stack(pieces)
    if part in ("mlp.shared_gate", "mlp.router.correction"):
        return pieces[0].reshape(-1)
    return pieces[0].T


def _attention(spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    attn, h = spec.attention, spec.attention.head_dim
    if part in ("attn.qkv", "attn.qkv_bias"):
        queries = _of_heads(attn, pieces[0], attn.heads * h, 0)
        heads = [x.reshape(attn.kv_heads, -1, h, *x.shape[1:]) for x in (queries, *pieces[1:])]
        turned = [_half_split(x, attn.rope, axis=2) for x in heads[:2]]  # queries and keys
        both = jnp.concatenate([*turned, *heads[2:]], axis=1)  # [K, G + 2, h, D]
        return jnp.moveaxis(both, 3, 0) if part == "attn.qkv" else both
    if part in ("attn.v", "attn.v_bias"):
        v = pieces[0].reshape(attn.kv_heads, attn.value_dim, *pieces[0].shape[1:])
        return jnp.moveaxis(v, 2, 0) if part == "attn.v" else v
    if part == "attn.o":
        return pieces[0].T.reshape(attn.kv_heads, attn.group, attn.value_dim, -1)
    if part == "attn.sinks":
        return pieces[0].reshape(attn.kv_heads, attn.group)
    if part == "attn.gate":
        size = () if attn.gate.per_head else (attn.value_dim,)
        gate = _of_heads(attn, pieces[0], attn.heads * (size[0] if size else 1), 1)
        return gate.T.reshape(-1, attn.kv_heads, attn.group, *size)
    if part in ("attn.q_norm", "attn.k_norm"):
        weight = pieces[0]
        if attn.qk_norm == "full":
            weight = weight.reshape(attn.kv_heads, *((attn.group,) if part == "attn.q_norm" else ()), h)
        return _half_split(weight, attn.rope, axis=weight.ndim - 1)
    return pieces[0]


def _of_heads(attn: AttentionSpec, x: jax.Array, rows: int, which: int) -> jax.Array:
    """x [rows, ...], or of a tensor of each head's query and gate in turn the former or the latter."""
    if x.shape[0] == rows:
        return x
    return x.reshape(attn.heads, 2, -1, *x.shape[1:])[:, which].reshape(rows, *x.shape[1:])


def _latent_attention(spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    attn = spec.attention
    if part in ("attn.down", "attn.down_bias"):
        *q, kv = pieces
        kv = jnp.concatenate([kv[: attn.kv_rank], _half_split(kv[attn.kv_rank :], attn.rope, axis=0)])
        return jnp.concatenate([*q, kv]).T
    if part == "attn.q":
        heads = pieces[0].reshape(attn.heads, attn.head_dim, -1)
        rotated = _half_split(heads[:, attn.nope_dim :], attn.rope, axis=1)
        return jnp.moveaxis(jnp.concatenate([heads[:, : attn.nope_dim], rotated], axis=1), 2, 0)
    if part in ("attn.k", "attn.v"):
        heads = pieces[0].reshape(attn.heads, attn.nope_dim + attn.value_dim, -1)  # [H, n + v, R]
        return heads[:, : attn.nope_dim] if part == "attn.k" else jnp.moveaxis(heads[:, attn.nope_dim :], 1, 2)
    return pieces[0].T.reshape(attn.heads, attn.value_dim, -1) if part == "attn.o" else pieces[0]


# Of recurrent layers.
_PIECES = {
    GatedDeltaSpec: delta_pieces,
    Mamba2Spec: mamba_pieces,
    ShortConvSpec: short_conv_pieces,
    LightningSpec: lightning_pieces,
    KimiDeltaSpec: kimi_delta_pieces,
}
_ASSEMBLED = {
    MlaSpec: _latent_attention,
    GatedDeltaSpec: delta_rule,
    Mamba2Spec: mamba_rule,
    ShortConvSpec: short_conv_rule,
    LightningSpec: lightning_rule,
    KimiDeltaSpec: kimi_delta_rule,
}


def _heads(x: jax.Array, axis: int, queries: bool, group: int, layout: HeadLayout, fill: float) -> jax.Array:
    """Rearrange the KV heads, dimension `axis` of x, and with them the slots of their queries in the next one.

    group: G. The next dimension holds G queries, or G queries, the key and the value.
    """
    if layout.plain:
        return x
    source = np.array(layout.source)
    heads = source[:, -2]
    if queries:
        slots = x.shape[axis + 1]
        ends = source[:, -2:] * slots + [group, group + 1]  # key and value
        heads = np.concatenate([source[:, :-2] // group * slots + source[:, :-2] % group, ends], axis=1)
        heads = np.where(source < 0, -1, heads)[:, : layout.queries + slots - group]
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    found = jnp.take(x, np.maximum(heads, 0), axis=axis)
    return jnp.where((heads >= 0).reshape(*heads.shape, *[1] * (x.ndim - axis - 1)), found, jnp.asarray(fill, x.dtype))


def _padded(x: jax.Array, size: int, axis: int, fill: float) -> jax.Array:
    short = size - x.shape[axis]
    return (
        jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)], constant_values=jnp.asarray(fill, x.dtype))
        if short
        else x
    )


def _half_split(x: jax.Array, rope: RopeSpec | None, axis: int) -> jax.Array:
    """Reorder interleaved rotary pairs (2i, 2i+1) to (i, i + dim/2); queries and keys alike, so scores stay."""
    if rope is None or not rope.interleaved:
        return x
    order = np.concatenate([np.arange(0, rope.dim, 2), np.arange(1, rope.dim, 2), np.arange(rope.dim, x.shape[axis])])
    return jnp.take(x, order, axis=axis)
