"""From checkpoint tensors ([out, in], one per projection) to the decoder's weights: which tensors each weight is made
of, with the shapes they must have, and where their axes go. Letters: D width, F feed-forward, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.checkpoint.attention import attention_assembly, fused_rows, latent_assembly
from inferlib.checkpoint.looped import loop_assembly
from inferlib.checkpoint.source import TensorSource
from inferlib.models.abstract import WeightSpec
from inferlib.models.config import AttentionSpec, LayerSpec, MlaSpec, ModelConfig, MoeSpec
from inferlib.models.families.common import FusedExperts
from inferlib.models.heads import HeadLayout
from inferlib.models.layout import Layout
from inferlib.models.pieces import Assembly, Piece, assembly
from inferlib.sharding import axes


@dataclass(frozen=True)
class LoadItem:
    """One weight and the tensors it is made of: a tuple of pieces per layer (several if it is stacked).

    arrange: lays out the pieces of a layer (see `Assembly`); None for experts. slot_experts: for each layer, the expert
    in each slot, if a file places experts.
    """

    weight: WeightSpec
    layer: LayerSpec | None
    pieces: tuple[tuple[Piece, ...], ...]
    fused_experts: FusedExperts
    arrange: Callable[..., jax.Array] | None = None
    slot_experts: tuple[tuple[int, ...], ...] | None = None


# Parts of a layer that are vectors named in full, and parts that are the checkpoint's tensors, matrices transposed.
_NAMED_IN_FULL = ("scalar", "altup.scale", "mlp.router.norm", "mlp.router.expert_scale")
_TRANSPOSED = ("altup.", "laurel.", "per_layer.")


def layer_assembly(names: Mapping[str, str], spec: LayerSpec, part: str, dim: int, shape: tuple[int, ...]) -> Assembly:
    """How one layer's `part` is made ("attn.qkv", "mlp.down_bias", "pre_attn_norm", ...).

    names: the family's map of parts to modules, prefix included. shape: of the layer's weight.
    """
    if part in _NAMED_IN_FULL:
        return assembly(Piece(names[part], shape), "d -> d")
    if part.startswith(_TRANSPOSED):
        return _transposed(names[part] + ".weight", shape[::-1])
    if part.startswith("attn."):
        return _mixer_assembly(names, spec, part.removeprefix("attn."), dim)
    if part.startswith("mlp."):
        return _mlp_assembly(names, spec, part, dim)
    module = part.removesuffix(".bias")  # a norm's
    return assembly(Piece(names[module] + (".weight" if module == part else ".bias"), (dim,)), "d -> d")


def _mixer_assembly(names: Mapping[str, str], spec: LayerSpec, parameter: str, dim: int) -> Assembly:
    mixer = spec.attention
    if isinstance(mixer, AttentionSpec):
        return attention_assembly(names, mixer, parameter, dim)
    if isinstance(mixer, MlaSpec):
        return latent_assembly(names, mixer, parameter, dim)
    return mixer.assemblies(names, dim)[parameter]


def _mlp_assembly(names: Mapping[str, str], spec: LayerSpec, part: str, dim: int) -> Assembly:
    if part == "mlp.router.correction":
        return _correction(names[part], _mixture(spec).router.experts)
    module = part.removesuffix("_bias").removesuffix(".bias")
    suffix, columns = (".weight", (dim,)) if module == part else (".bias", ())

    def piece(key: str, *shape: int) -> Piece:
        return Piece(names[key] + suffix, shape)

    match module.removeprefix("mlp.").removeprefix("shared."):
        case "gate_up":
            mlp = _mixture(spec).shared if module.startswith("mlp.shared.") else spec.mlp
            assert mlp is not None
            gate, up = (module.removesuffix("gate_up") + key for key in ("gate", "up"))
            if not mlp.gated:
                return assembly(piece(module if module in names else up, mlp.hidden, *columns), "f ... -> ... 1 f")
            if module in names:
                halves = fused_rows(piece(module, 2 * mlp.hidden, *columns), (mlp.hidden, mlp.hidden))
            else:
                halves = piece(gate, mlp.hidden, *columns), piece(up, mlp.hidden, *columns)
            return assembly(halves, "two f ... -> ... two f")
        case "down" if suffix == ".weight":
            mlp = _mixture(spec).shared if module.startswith("mlp.shared.") else spec.mlp
            assert mlp is not None
            return assembly(piece(module, dim, mlp.hidden), "d f -> f d")
        case "router":
            return assembly(piece(module, _mixture(spec).router.experts, *columns), "e ... -> ... e")
        case "shared_gate":
            return assembly(piece(module, 1, dim), "1 d -> d")
        case _:
            return assembly(piece(module, dim), "d -> d")


def _mixture(spec: LayerSpec) -> MoeSpec:
    assert isinstance(spec.mlp, MoeSpec)  # only mixtures have routers and shared experts
    return spec.mlp


def _correction(name: str, experts: int) -> Assembly:
    """A vector, or "...[0]": the only row of a matrix."""
    if name.endswith("[0]"):
        return assembly(Piece(name.removesuffix("[0]"), (1, experts)), "1 e -> e")
    return assembly(Piece(name, (experts,)), "e -> e")


def _transposed(name: str, shape: tuple[int, ...]) -> Assembly:
    """A matrix transposed, or a vector."""
    return assembly(Piece(name, shape), "row column -> column row" if len(shape) == 2 else "d -> d")


def top_assembly(names: Mapping[str, str], config: ModelConfig, part: str) -> Assembly:
    """How a part outside the layers is made: `embed`, `positions`, `final_norm`, `head`, the bias of one of the latter
    two, `per_layer.table`, `.projection` or `.norm`, `streams.split` or `.merge`, in whose names "{n}" is a number, or
    what a loop has around its layers (see `loop_assembly`)."""
    module = part.removesuffix("_bias").removesuffix(".bias")
    if module != part:
        size = config.vocab if module == "head" else config.dim
        return assembly(Piece(names[module] + ".bias", (size,)), "v -> v")
    if part.startswith("streams."):
        tensors = tuple(names[part].format(n=n) + ".weight" for n in range(config.streams - 1))
        pieces = tuple(Piece(tensor, (config.dim, config.dim)) for tensor in tensors)
        return assembly(pieces, "n row column -> n column row" if len(pieces) > 1 else "row column -> 1 column row")
    if part.startswith("loop."):
        return loop_assembly(names, config, part)
    tensor = names[part] + ".weight"
    if part.startswith("per_layer."):
        spec = config.per_layer
        assert spec is not None  # only models that have it name its parts
        width = len(config.layers) * spec.dim
        shapes = {"table": (spec.vocab, width), "projection": (width, config.dim), "norm": (spec.dim,)}
        shape, kind = shapes[part.removeprefix("per_layer.")], "projection"
        return _transposed(tensor, shape) if part.endswith(kind) else assembly(Piece(tensor, shape), "... -> ...")
    if part == "final_norm":
        return assembly(Piece(tensor, (config.dim,)), "d -> d")
    rows = config.context if part == "positions" else config.vocab
    return assembly(Piece(tensor, (rows, config.dim)), "v d -> d v" if part == "head" else "v d -> v d")


def piece_bytes(source: TensorSource, piece: Piece) -> int:
    """Bytes of a piece's rows on disk."""
    if piece.values is not None:
        return 0
    fraction = 1.0 if piece.rows is None else (piece.rows[1] - piece.rows[0]) / piece.shape[0]
    return int(source.nbytes(piece.tensor) * fraction)


# ---- copies and padding for a mesh


@dataclass(frozen=True)
class Heads:
    """How a mesh lays out a mixer's heads. group: G, query heads (or value heads) of each key/value head."""

    layout: HeadLayout
    group: int


def heads_of(layout: Layout, spec: LayerSpec | None, weight: WeightSpec) -> Heads | None:
    """The heads of a layer's weight; None if it has none, or they stay as the checkpoint has them."""
    if spec is None or axes.KV_HEADS not in weight.axes:
        return None
    heads = layout.heads(spec.attention)
    return None if heads.unchanged else Heads(heads, spec.attention.group)


def expand(
    x: jax.Array, names: tuple[str | None, ...], shape: tuple[int, ...], heads: Heads | None, fill: float = 0.0
) -> jax.Array:
    """Copy and pad heads, and pad feed-forward, experts and vocabulary, of a weight laid out for one device, or of its
    values or scales in groups. names, shape: of the result. fill: what padding holds. Traceable."""
    for axis, name in enumerate(names):
        if name in (axes.VOCAB, axes.MLP, axes.EXPERTS) and (short := shape[axis] - x.shape[axis]):
            room = [(0, short if i == axis else 0) for i in range(x.ndim)]
            x = jnp.pad(x, room, constant_values=jnp.asarray(fill, x.dtype))
        elif name == axes.KV_HEADS and heads is not None:
            queries = names[axis + 1 : axis + 2] == (axes.QUERIES,)
            x = _copied_heads(x, axis, queries, heads, fill)
    return x


def _copied_heads(x: jax.Array, axis: int, queries: bool, heads: Heads, fill: float) -> jax.Array:
    """Rearrange the KV heads, dimension `axis` of x, and with them the places of their queries in the next dimension,
    which holds G queries, or G queries, the key and the value."""
    source, group = np.array(heads.layout.source), heads.group
    chosen = source[:, -2]
    if queries:
        places = x.shape[axis + 1]
        ends = source[:, -2:] * places + [group, group + 1]  # key and value
        chosen = np.concatenate([source[:, :-2] // group * places + source[:, :-2] % group, ends], axis=1)
        chosen = np.where(source < 0, -1, chosen)[:, : heads.layout.queries + places - group]
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    taken = jnp.take(x, np.maximum(chosen, 0), axis=axis)
    present = (chosen >= 0).reshape(*chosen.shape, *[1] * (x.ndim - axis - 1))
    return jnp.where(present, taken, jnp.asarray(fill, x.dtype))
