"""Load a checkpoint into device arrays, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from inferlib.checkpoint.assemble import Piece, assemble, layer_pieces, top_pieces
from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.config import LayerSpec
from inferlib.models.families.common import Family
from inferlib.progress import ByteProgress

# Tensors that checkpoints carry and no model needs.
_IGNORED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


@dataclass(frozen=True)
class LoadItem:
    """One weight and the tensors it is made of: a tuple of pieces per layer (several if it is stacked)."""

    weight: WeightSpec
    layer: LayerSpec | None
    pieces: tuple[tuple[Piece, ...], ...]


def plan_load(source: TensorSource, family: Family, model: AbstractModel) -> tuple[LoadItem, ...]:
    """What to read for every weight. Raises CheckpointError for missing, misshapen or unexpected tensors."""
    items = tuple(_item(family, model, weight) for weight in model.specs)
    present = set(source.names())
    wanted = {piece.tensor: piece.shape for item in items for layer in item.pieces for piece in layer}
    missing = sorted(set(wanted) - present)
    wrong = [
        f"{name}: {source.shape(name)} instead of {shape}"
        for name, shape in wanted.items()
        if name in present and tuple(source.shape(name)) != shape
    ]
    ignored = {family.top["head"] + ".weight"} if model.config.tied else set()
    unexpected = sorted(n for n in present - set(wanted) - ignored if not n.endswith(_IGNORED))
    problems = []
    if missing:
        problems.append("missing: " + _some([f"{name} {wanted[name]}" for name in missing]))
    if wrong:
        problems.append("wrong shape: " + _some(wrong))
    if unexpected:
        problems.append("unexpected: " + _some([f"{name} {tuple(source.shape(name))}" for name in unexpected]))
    if problems:
        raise CheckpointError(
            f"the checkpoint does not hold a {family.name} model of its config.json; " + "; ".join(problems)
        )
    return items


def load_weights(
    source: TensorSource,
    family: Family,
    model: AbstractModel,
    *,
    place: Callable[[jax.Array, WeightSpec], jax.Array] | None = None,
    progress: bool = False,
) -> tuple[jax.Array, ...]:
    """The weights of `model` in the order of `model.specs`, read tensor by tensor from `source`.

    Tensors are moved to the device as stored and laid out there, so the host holds a few of them at a
    time. place: moves a finished weight to its devices. progress: show bytes and rate.
    """
    items = plan_load(source, family, model)
    lay_out = jax.jit(assemble, static_argnums=(0, 1, 2))
    total = sum(source.nbytes(name) for name in {p.tensor for i in items for layer in i.pieces for p in layer})
    weights = []
    with ByteProgress("loading weights", total, show=progress) as bar:
        for item in items:
            layers = []
            for pieces in item.pieces:
                arrays = [source.read(p.tensor, slice(*p.rows) if p.rows else None) for p in pieces]
                layers.append(lay_out(item.layer, item.weight.part, item.weight.dtype.name, *arrays))
                bar.advance(sum(_read_bytes(source, p) for p in pieces))
            weight = jnp.stack(layers) if len(layers) > 1 else layers[0]
            del layers
            weights.append(place(weight, item.weight) if place else weight)
            # Without this the host runs ahead and stages the whole checkpoint in transfer buffers.
            weights[-1].block_until_ready()
    return tuple(weights)


def _item(family: Family, model: AbstractModel, weight: WeightSpec) -> LoadItem:
    if weight.block is None:
        return LoadItem(weight, None, (top_pieces(family.top, model.config, weight.part),))
    layers = model.layers_of(weight.block)
    spec = model.config.layers[layers[0]]
    per_layer = []
    for i in layers:
        names = {part: family.prefix.format(i=i) + module for part, module in family.layer.items()}
        per_layer.append(layer_pieces(names, spec, weight.part, model.config.dim))
    return LoadItem(weight, spec, tuple(per_layer))


def _read_bytes(source: TensorSource, piece: Piece) -> int:
    share = 1.0 if piece.rows is None else (piece.rows[1] - piece.rows[0]) / piece.shape[0]
    return int(source.nbytes(piece.tensor) * share)


def _some(lines: list[str], most: int = 5) -> str:
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more
