"""Load a checkpoint into device arrays, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.checkpoint.assemble import Piece, assemble, layer_pieces, top_pieces
from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.config import LayerSpec
from inferlib.models.families.common import Family
from inferlib.progress import ByteProgress
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

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
    shards: Shards = Shards(),  # noqa: B008
    formats: Sequence[Format | NamedSharding | None] | None = None,
    progress: bool = False,
) -> tuple[jax.Array, ...]:
    """The weights of `model` in the order of `model.specs`, read tensor by tensor from `source`.

    Tensors are moved to the device as stored and laid out there, so the host holds a few of them at a
    time. On a mesh each device reads its own part of a tensor. formats: where each weight goes and in which layout;
    None: where `shards` says, in the usual one. progress: show bytes and rate.
    """
    items = plan_load(source, family, model)
    total = sum(source.nbytes(name) for name in {p.tensor for i in items for layer in i.pieces for p in layer})
    weights = []
    with ByteProgress("loading weights", total, show=progress) as bar:
        for i, item in enumerate(items):
            weight, layers = item.weight, []
            format = formats[i] if formats else shards.sharding(weight.axes)
            lay_out = _jit_assemble(shards.sharding(weight.axes[1:]) if len(item.pieces) > 1 else format)
            for pieces in item.pieces:
                arrays = [_read(source, piece, weight.part, shards) for piece in pieces]
                layers.append(lay_out(model.layout, item.layer, weight.part, weight.dtype.name, *arrays))
                bar.advance(sum(_read_bytes(source, p) for p in pieces))
            weights.append(_jit_stack(format)(layers) if len(layers) > 1 else layers[0])
            # Without this the host runs ahead and stages the whole checkpoint in transfer buffers.
            weights[-1].block_until_ready()
    return tuple(weights)


@cache
def _jit_assemble(format: Format | NamedSharding | None):
    return jax.jit(assemble, static_argnums=(0, 1, 2, 3), out_shardings=format)


@cache
def _jit_stack(format: Format | NamedSharding | None):
    return jax.jit(jnp.stack, out_shardings=format)


def _read(source: TensorSource, piece: Piece, part: str, shards: Shards) -> np.ndarray | jax.Array:
    """A piece as stored: a view of the file, or on a mesh an array of which each device reads its part."""
    start, stop = piece.rows or (0, piece.shape[0])
    if shards.mesh is None:
        return source.read(piece.tensor, slice(start, stop) if piece.rows else None)
    shape = (stop - start, *piece.shape[1:])
    # The dimension that the layout splits: inputs of the row-parallel products, outputs of the others.
    split = len(shape) - 1 if part in ("attn.o", "mlp.down") else 0
    names = [None] * len(shape)
    if shape[split] % shards.tensor == 0 and len(shape) > 1:
        names[split] = axes.MLP
    sharding = shards.sharding(tuple(names))

    def part_of(index: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = index[0].indices(shape[0])
        rows = source.read(piece.tensor, slice(start + first, start + last))
        return np.ascontiguousarray(rows[(slice(None), *index[1:])])

    return jax.make_array_from_callback(shape, sharding, part_of)


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
