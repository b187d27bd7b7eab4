"""Load a checkpoint into device arrays, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from inferlib.checkpoint.assemble import Heads, LoadItem, expand, heads_of, layer_assembly, piece_bytes, top_assembly
from inferlib.checkpoint.experts import expert_pieces, load_experts
from inferlib.checkpoint.lanes import lane_assembly, top_lane_assembly
from inferlib.checkpoint.layer_arrays import BASES, TURNS
from inferlib.checkpoint.shipped import QuantizedSource, assemble_stored, form_of, stored_readers
from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.abstract import AbstractModel, WeightSpec, abstract_model
from inferlib.models.config import ModelConfig, MoeSpec
from inferlib.models.families.common import Family
from inferlib.models.pieces import Arrange, Piece
from inferlib.models.quantization import Quantization
from inferlib.models.recurrent import is_absent
from inferlib.ops.quantized import SCHEMES
from inferlib.placement import TABLES, ExpertPlacement
from inferlib.programs.start_functions import run
from inferlib.progress import ByteProgress
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# Endings of tensors that checkpoints contain and no model needs.
_IGNORED = ("freqs_cis", ".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
_IGNORED += tuple(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))


def plan_load(source: TensorSource, family: Family, model: AbstractModel) -> tuple[LoadItem, ...]:
    """Match every weight, except the tables of `inferlib.placement`, with the tensors to read. Raises CheckpointError
    for missing, misshapen or unexpected tensors."""
    present = set(source.names())
    items = _match(family, model, present)
    pieces = (piece for item in items for layer in item.pieces for piece in layer)
    wanted = {piece.tensor: piece.stored for piece in pieces if piece.values is None}
    stored = {name: tuple(source.shape(name)) for name in wanted if name in present}
    _check_types(source, stored)
    problems = {
        "missing": [f"{name} {wanted[name]}" for name in sorted(set(wanted) - present)],
        "wrong shape": [f"{n}: {shape} instead of {wanted[n]}" for n, shape in stored.items() if shape != wanted[n]],
        "unexpected": _unexpected(source, family, model.config, present - set(wanted)),
    }
    if problems := [f"{kind}: {_shortened(texts)}" for kind, texts in problems.items() if texts]:
        raise CheckpointError(
            f"the checkpoint does not hold a {family.name} model of its config.json; " + "; ".join(problems)
        )
    return items


def _match(family: Family, model: AbstractModel, present: set[str]) -> tuple[LoadItem, ...]:
    """The tensors of every weight, by the names that this checkpoint has: fused or not, with the prefix or without."""
    family = as_stored(family, present)
    items = load_items(family, model)
    if family.base and not any(name.startswith(family.base) for name in present):
        return tuple(_without(family.base, item) for item in items)
    return items


def as_stored(family: Family, present: set[str]) -> Family:
    """The family with the names of experts that are fused, if those of layers in this checkpoint are."""
    layers = family.prefix.split("{i}")[0]
    if any(name.startswith(layers) and name.endswith(tuple(family.fused.values())) for name in present):
        return replace(family, layer={**family.layer, **family.fused})
    return family


def load_items(family: Family, model: AbstractModel) -> tuple[LoadItem, ...]:
    """Every weight, except tables, with the tensors that it is made of, by the family's names."""
    return tuple(item_of(family, model, weight) for weight in model.weights if weight.part not in TABLES)


def _check_types(source: TensorSource, names: Iterable[str]) -> None:
    """Raise CheckpointError for tensors of types that need scales."""
    dtypes = {name: source.dtype(name) for name in names}
    if odd := [f"{name} {dtype}" for name, dtype in dtypes.items() if not _needs_no_scales(dtype)]:
        raise CheckpointError(
            "these weights are quantised, which config.json does not describe (it has no quantization_config, or one "
            f"of other tensors): {_shortened(odd)}; fetch the checkpoint's own config.json and all its files again, or "
            "quantise the original again"
        )


def _unexpected(source: TensorSource, family: Family, config: ModelConfig, unread: set[str]) -> list[str]:
    """Tensors, with their shapes, that no weight reads and that no checkpoint of the family has for other purposes."""
    ignored = {*_identity_experts(family, config), *_shared_cache_keys(family, config)}
    ignored |= {family.top["head"] + ".weight"} if config.tied else set()
    drafts = tuple(name.format(layers=len(config.layers)) for name in family.drafts)
    spare = source.spare if isinstance(source, QuantizedSource) else lambda _: False
    left_out = lambda name: name.endswith(_IGNORED) or name.startswith(drafts + family.senses) or spare(name)  # noqa: E731
    return [f"{name} {tuple(source.shape(name))}" for name in sorted(unread - ignored) if not left_out(name)]


def load_weights(
    source: TensorSource,
    family: Family,
    model: AbstractModel,
    *,
    placement: ExpertPlacement | None = None,
    shards: Shards = Shards(),  # noqa: B008
    formats: Sequence[Format | NamedSharding | None] | None = None,
    progress: bool = False,
) -> tuple[jax.Array, ...]:
    """Read the arrays of `model` tensor by tensor from `source`, in the order of `model.specs`.

    Tensors go to the device as stored, and are laid out there and quantised if the model says so; the host has only a
    few of them at a time. On a mesh each device reads its part of a tensor. placement: which expert is in which slot,
    if the model has slots. formats: the device and memory layout of each array; None: as `shards` says, in the default
    layout. progress: show bytes and rate.
    """
    items = {item.weight.name: item for item in plan_load(source, family, model)}
    total = sum(piece_bytes(source, piece) for item in items.values() for layer in item.pieces for piece in layer)
    rest, arrays = iter(formats or [None] * len(model.specs)), []
    with ByteProgress("loading weights", total, show=progress) as bar:
        for weight in model.weights:
            item, places = items.get(weight.name), tuple(islice(rest, len(weight.arrays)))
            if item is None:
                assert placement is not None  # only models with slots have tables
                arrays += placement.place(model, weight, shards, places)
                continue
            if placement is not None and axes.EXPERTS in weight.axes:
                item = replace(item, slot_experts=placement.of(model, weight))
            arrays += load_item(source, item, model, shards, bar.advance, places)
    return tuple(arrays)


def load_each(
    source: TensorSource,
    items: Iterable[LoadItem],
    model: AbstractModel,
    shards: Shards,
    formats: Sequence[Format | NamedSharding | None] | None,
) -> tuple[jax.Array, ...]:
    """The arrays of these weights, which are all of a model's. formats: see `load_weights`."""
    rest, arrays = iter(formats or [None] * len(model.specs)), []
    for item in items:
        places = tuple(islice(rest, len(item.weight.arrays)))
        arrays += load_item(source, item, model, shards, lambda _: None, places)
    return tuple(arrays)


def load_item(
    source: TensorSource,
    item: LoadItem,
    model: AbstractModel,
    shards: Shards,
    advance: Callable[[int], None],
    formats: Sequence[Format | NamedSharding | None],
) -> tuple[jax.Array, ...]:
    """Read the arrays of one weight. advance: called with the bytes read. formats: see `load_weights`."""
    weight, stacked = item.weight, len(item.pieces) > 1
    if axes.EXPERTS in weight.axes:
        places = layer_places(weight, shards, formats, stacked=False)
        return load_experts(source, item, places, advance)
    # Nothing that tells weights of one layout apart: they share a program.
    one = replace(weight.of_layer, name="", block=None, part="", init="")
    sharding = placement(shards, one.axes, one.shape)
    split = dict(zip(one.axes, sharding.spec, strict=True)) if sharding else {}
    carriers = tuple(split.get(name) for name in _tensor_axes(weight))
    static = item.arrange, heads_of(model.layout, item.layer, one), one
    places = layer_places(one, shards, formats, stacked=stacked)
    arrays: Any = None
    for number, pieces in enumerate(item.pieces):
        if readers := stored_readers(source, weight, pieces):
            values = [_read(readers[0], piece, carriers, shards) for piece in pieces]
            rows = [slice(*piece.rows) if piece.rows else None for piece in pieces]
            shared = [[read(p.tensor, part) for p, part in zip(pieces, rows, strict=True)] for read in readers[1:]]
            layer = run(lay_out_stored, static, values, *shared, place=places)
        else:
            tensors = [_read(source.read, piece, carriers, shards) for piece in pieces]
            layer = run(lay_out, static, *tensors, place=places)
        arrays = into_stack(weight, shards, formats, arrays, number, layer) if stacked else layer
        # Without this the host runs ahead and stages the whole checkpoint in transfer buffers.
        jax.block_until_ready(arrays)
        advance(sum(piece_bytes(source, p) for p in pieces))
    return arrays


def layer_places(
    weight: WeightSpec, shards: Shards, formats: Sequence[Format | NamedSharding | None], *, stacked: bool
) -> tuple[Format | NamedSharding | None, ...]:
    """The places where the arrays of one layer's weight are made: where they stay, unless they are stacked later."""
    places = [placement(shards, array.axes, array.shape) for array in weight.arrays]
    return tuple(place if stacked else format or place for place, format in zip(places, formats, strict=True))


def placement(shards: Shards, names: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding | None:
    """The sharding by which an array with these logical axes is stored.

    A dimension that does not divide over its mesh axis stays whole, and the largest dimension that does is split.
    """
    sharding = shards.sharding(names)
    if sharding is None:
        return None
    split = [axis if n % _size(shards, axis) == 0 else None for n, axis in zip(shape, sharding.spec, strict=True)]
    for axis in (old for old, new in zip(sharding.spec, split, strict=True) if old != new):
        free = [i for i, n in enumerate(shape) if split[i] is None and n % _size(shards, axis) == 0]
        if free:
            split[max(free, key=shape.__getitem__)] = axis
    return NamedSharding(sharding.mesh, PartitionSpec(*split))


def _size(shards: Shards, axis: str | tuple[str, ...] | None) -> int:
    sizes = shards.mesh.shape if shards.mesh is not None else {}
    return math.prod(sizes[name] for name in jax.tree.leaves(axis))


def into_stack(
    weight: WeightSpec,
    shards: Shards,
    formats: Sequence[Format | NamedSharding | None],
    stacks: Sequence[jax.Array] | None,
    number: int,
    layer: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Put the arrays of one layer into the stacks of a scanned weight; stacks None: make them first. The stacks' memory
    is reused, so that the layers never exist twice."""
    places = [format or shards.sharding(spec.axes) for spec, format in zip(weight.arrays, formats, strict=True)]
    if stacks is None:
        pairs = zip(weight.arrays, places, strict=True)
        stacks = [run(jnp.zeros, (spec.shape, spec.dtype.name), place=place) for spec, place in pairs]
    return tuple(
        run(_put_layer, (), stack, part, np.int32(number), place=place, donate=True)
        for stack, part, place in zip(stacks, layer, places, strict=True)
    )


def _put_layer(stack: jax.Array, layer: jax.Array, number: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, layer, number, axis=0)


def lay_out(
    arrange: Callable[..., jax.Array], heads: Heads | None, weight: WeightSpec, *pieces: jax.Array
) -> tuple[jax.Array, ...]:
    """Make the arrays of one layer's weight from the checkpoint's tensors. Traceable."""
    dtype = weight.dtype.name if weight.scheme is None else "float32"
    return weight.stored(expand(arrange(*pieces), weight.axes, weight.shape, heads).astype(dtype))


def lay_out_stored(
    arrange: Callable[..., jax.Array], heads: Heads | None, weight: WeightSpec, *stored: list[jax.Array]
) -> tuple[jax.Array, ...]:
    """Make the arrays of one layer's weight from values, scales and zero points as they are stored. Traceable."""

    def whole(pieces: Sequence[jax.Array], fill: float) -> jax.Array:
        return expand(arrange(*pieces), weight.axes, weight.shape, heads, fill).astype(pieces[0].dtype)

    assert weight.scheme is not None  # see `stored_readers`
    return weight.packed_arrays(*assemble_stored(weight.scheme, weight.contracting, whole, *stored))


def _read(
    reader: Callable[[str, slice | None], np.ndarray],
    piece: Piece,
    carriers: Sequence[str | tuple[str, ...] | None],
    shards: Shards,
) -> np.ndarray | jax.Array:
    """Read a piece as stored: a view of the file, or on a mesh an array of which each device reads its part.

    carriers: the mesh axes that split rows and columns of a matrix, as they do the weight's axes.
    """
    start, stop = piece.rows or (0, piece.shape[0])

    def read(rows: slice | None) -> np.ndarray:
        if piece.values is not None:
            return np.array(piece.values, np.float32)[rows or slice(None)]
        if piece.transposed:
            return reader(piece.tensor, None).T[rows or slice(None)]
        return reader(piece.tensor, rows)

    if shards.mesh is None:
        return read(slice(start, stop) if piece.rows else None)
    shape = (stop - start, *piece.shape[1:])
    carriers = carriers if len(shape) == 2 else [None] * len(shape)
    spec = [axis if n % _size(shards, axis) == 0 else None for n, axis in zip(shape, carriers, strict=True)]

    @cache  # parts that several devices share are read once
    def part_of(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        (first, last), *columns = bounds
        rows = read(slice(start + first, start + last))
        return np.ascontiguousarray(rows[(slice(None), *(slice(*ends) for ends in columns))])

    def of_device(index: Any) -> np.ndarray:
        return part_of(tuple(i.indices(size)[:2] for i, size in zip(index, shape, strict=True)))

    return jax.make_array_from_callback(shape, NamedSharding(shards.mesh, PartitionSpec(*spec)), of_device)


def _tensor_axes(weight: WeightSpec) -> tuple[str, str]:
    """The logical axes that can split rows and columns of a weight's checkpoint tensors, [out, in]."""
    names = weight.of_layer.axes
    if weight.block is None:
        return axes.VOCAB, axes.EMBED
    inner = next((name for name in (axes.KV_HEADS, axes.MLP, axes.LATENT) if name in names), axes.VOCAB)
    return (axes.EMBED, inner) if names[-1] == axes.EMBED else (inner, axes.EMBED)


def shipped_quantization(source: QuantizedSource, family: Family, config: ModelConfig) -> Quantization:
    """How the weights of a quantised checkpoint are stored. Raises CheckpointError if layers differ in whether a part
    is quantised."""
    model, quantized, unquantized = abstract_model(config, "float32"), set(), set()
    for item in plan_load(source, family, model):
        if item.weight.contracting:
            for pieces in item.pieces:
                for piece in pieces:
                    (quantized if source.holds(piece.tensor) else unquantized).add(item.weight.part)
    if mixed := sorted(quantized & unquantized):
        raise CheckpointError(
            f"some tensors of {', '.join(mixed)} are quantised and others are not, which layers cannot mix yet"
        )
    return Quantization(source.form.name, source.form.scheme, tuple(sorted(unquantized)))


def described_quantization(hf: Mapping[str, Any], config: ModelConfig) -> Quantization | None:
    """How a model is shipped by its Hugging Face config alone, for planning without its files; None if unquantised.

    MXFP4 quantises only experts, the other forms everything except the head. Raises CheckpointError for forms that are
    not supported.
    """
    if not (described := hf.get("quantization_config")):
        return None
    form, unquantized = form_of(described), ("head",)
    if form.scheme == SCHEMES["mxfp4"]:
        weights = abstract_model(config, "float32", scan=True).weights
        unquantized = tuple(sorted({w.part for w in weights if w.contracting and axes.EXPERTS not in w.axes}))
    return Quantization(form.name, form.scheme, unquantized)


def _needs_no_scales(dtype: np.dtype) -> bool:
    """True if numbers of this type can be weights without scales."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def item_of(family: Family, model: AbstractModel, weight: WeightSpec) -> LoadItem:
    if weight.block is None:
        made = top_assembly(family.top, model.config, weight.part)
        made = made if model.config.lanes is None else top_lane_assembly(family.top, model.config, weight.part, made)
        return LoadItem(weight, None, (made.pieces,), family.fused_experts, made.arrange)
    layers = model.layers_of(weight.block)
    spec, per_layer, arrange = model.config.layers[layers[0]], [], None
    for i in layers:
        names = _names(family, model.config, i)
        if computed := family.computed.get(weight.part):
            values = computed(spec, i, len(model.config.layers))
            pieces, arrange = (Piece(weight.name, (len(values),), values=values),), Arrange("d -> d")
        elif axes.EXPERTS in weight.axes:
            assert isinstance(spec.mlp, MoeSpec)  # only mixtures have weights of experts
            pieces = expert_pieces(names, spec.mlp, weight.part, model.config.dim, family.fused_experts)
        else:
            made = layer_assembly(names, spec, weight.part, model.config.dim, weight.of_layer.shape)
            made = made if model.config.lanes is None else lane_assembly(model.config.lanes, weight.part, made)
            pieces, arrange = made.pieces, made.arrange
        if family.transposed:
            pieces = tuple(replace(piece, transposed=len(piece.shape) == 2) for piece in pieces)
        per_layer.append(pieces)
    return LoadItem(weight, spec, tuple(per_layer), family.fused_experts, arrange)


def _names(family: Family, config: ModelConfig, layer: int) -> dict[str, str]:
    """One layer's map of parts to modules, prefix included."""
    number, sub = divmod(layer, family.sublayers)
    stage, number = ("", number) if config.loop is None else config.loop.stage(number)
    mixer = feed = family.prefix.format(i=number, stage=stage)
    if family.halves:
        mixes = [not is_absent(spec.attention) for spec in config.layers]
        first = sum(mixes[:layer]) + sum(spec.mlp is not None for spec in config.layers[:layer])
        mixer, feed = (family.prefix.format(i=first + half) for half in (0, mixes[layer]))

    def full(part: str, module: str) -> str:
        if "{layer}" in module:
            return module.format(layer=layer)
        return (feed if part.startswith(("mlp.", "pre_mlp_norm")) else mixer) + module.replace("{sub}", str(sub))

    names = {part: full(part, module) for part, module in family.layer.items()}
    return names | {"attn.key_basis": BASES.name_of(layer), "attn.key_turns": TURNS.name_of(layer)}


def _identity_experts(family: Family, config: ModelConfig) -> Iterator[str]:
    """Unused weights that transformers stores for experts that return their input."""
    for i, layer in enumerate(config.layers):
        if isinstance(layer.mlp, MoeSpec) and layer.mlp.identity:
            for part, module in _names(family, config, i).items():
                if part.startswith("mlp.experts."):
                    yield from (module.format(e=e) for e in range(layer.mlp.experts, layer.mlp.router.experts))


def _shared_cache_keys(family: Family, config: ModelConfig) -> Iterator[str]:
    """Unused weights that checkpoints store for keys and values of layers that attend to another layer's cache."""
    for i, layer in enumerate(config.layers):
        if layer.attention.cache_of is not None:
            names = _names(family, config, i)
            for part in ("attn.k", "attn.v", "attn.k_norm"):
                yield from (names[part] + suffix for suffix in (".weight", ".bias"))


def _without(base: str, item: LoadItem) -> LoadItem:
    """The item for a checkpoint whose names lack the beginning `base`."""
    layers = tuple(tuple(replace(p, tensor=p.tensor.removeprefix(base)) for p in layer) for layer in item.pieces)
    return replace(item, pieces=layers)


def _shortened(lines: list[str], most: int = 5) -> str:
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more
