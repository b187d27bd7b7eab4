"""Experts, from checkpoint to devices: one after the other, each device taking its part of those that are its own.

A layer's experts can be larger than everything else a device holds beside them, so that they are never read, nor laid
out, together. Letters: E experts, D width, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, SingleDeviceSharding

from inferlib.checkpoint.assemble import LoadItem, Piece, piece_bytes
from inferlib.checkpoint.source import TensorSource
from inferlib.compile.functions import join, run
from inferlib.models.config import MoeSpec
from inferlib.models.families.common import FusedExperts
from inferlib.sharding import axes

_PREFIX = "mlp.experts."
# What the dimensions of one expert's tensors mean, [out, in], in the order of its parts.
_DIMENSIONS = {
    "gate_up": (axes.MLP, axes.EMBED),
    "gate_up_bias": (axes.MLP,),
    "down": (axes.EMBED, axes.MLP),
    "down_bias": (axes.EMBED,),
}


def expert_pieces(
    names: Mapping[str, str], spec: MoeSpec, part: str, dim: int, fused: FusedExperts
) -> tuple[Piece, ...]:
    """The tensors of one layer's `part` ("mlp.experts.gate_up", ...): one of all experts, or each expert's in turn."""
    kind = part.removeprefix(_PREFIX)
    size = {axes.MLP: spec.hidden, axes.EMBED: dim}
    shape = tuple(size[name] for name in _DIMENSIONS[kind])
    if "{e}" not in names.get(part, "{e}"):
        if kind.startswith("gate_up"):
            shape = (2 * shape[0], *shape[1:])
        return (Piece(names[part], (spec.experts, *(shape[::-1] if fused.transposed else shape))),)
    keys = [key + kind.removeprefix("gate_up") for key in ("gate", "up")] if kind.startswith("gate_up") else [kind]
    return tuple(Piece(names[_PREFIX + key].format(e=e), shape) for e in range(spec.experts) for key in keys)


def load_experts(
    source: TensorSource,
    item: LoadItem,
    place: Format | NamedSharding | None,
    advance: Callable[[int], None],
) -> jax.Array:
    """Read a weight of all experts, of one layer or of a stack of them. place: where it goes, None for one device."""
    weight, kind = item.weight, item.weight.part.removeprefix(_PREFIX)
    sharding = place.sharding if isinstance(place, Format) else place
    if sharding is None:
        sharding = SingleDeviceSharding(jax.devices()[0])
    shape, places = sharding.shard_shape(weight.shape), {}
    for device, index in sharding.addressable_devices_indices_map(weight.shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index, weight.shape, strict=True)]
        alone = SingleDeviceSharding(device)
        here = Format(place.layout, alone) if isinstance(place, Format) else alone
        places[here] = dict(zip(weight.axes, bounds, strict=True))
    parts = {here: run(jnp.zeros, (shape, weight.dtype.name), place=here) for here in places}
    for layer, pieces in enumerate(item.pieces):
        for expert in range(item.layer.mlp.experts):
            owners = {here: b for here, b in places.items() if b[axes.EXPERTS][0] <= expert < b[axes.EXPERTS][1]}
            own = _of_expert(pieces, kind, expert)
            tensors = _read(source, own, kind, item.fused_experts) if owners else []
            for here, bounds in owners.items():
                at = np.int32(expert - bounds[axes.EXPERTS][0])
                at = (np.int32(layer), at) if axes.LAYERS in bounds else (at,)
                own_part = _cut(tensors, kind, bounds)
                parts[here] = run(_put, (kind,), parts[here], at, *own_part, place=here, donate=True)
            # Without this the host runs ahead and stages the whole checkpoint in transfer buffers.
            for part in parts.values():
                part.block_until_ready()
            advance(sum(piece_bytes(source, piece) for piece in own))
    return join(weight.shape, sharding, list(parts.values()))


def _of_expert(pieces: Sequence[Piece], kind: str, expert: int) -> Sequence[Piece]:
    """Those of one expert; of a fused tensor, its row."""
    if len(pieces[0].shape) > len(_DIMENSIONS[kind]):
        return [replace(pieces[0], rows=(expert, expert + 1))]
    count = 2 if kind.startswith("gate_up") else 1
    return pieces[expert * count : (expert + 1) * count]


def _read(source: TensorSource, pieces: Sequence[Piece], kind: str, fused: FusedExperts) -> list[np.ndarray]:
    """One expert's tensors, [out, in] each: gate and up, or the one."""
    if pieces[0].rows is None:
        return [source.read(piece.tensor) for piece in pieces]
    whole = source.read(pieces[0].tensor, slice(*pieces[0].rows))[0]
    whole = whole.T if fused.transposed else whole
    if not kind.startswith("gate_up"):
        return [whole]
    return [whole[0::2], whole[1::2]] if fused.interleaved else np.split(whole, 2)


def _cut(tensors: list[np.ndarray], kind: str, bounds: Mapping[str, tuple[int, int]]) -> list[np.ndarray]:
    """What a device holds of one expert's tensors; beyond their ends is padding, which stays zero."""
    cut = tuple(slice(*bounds[name]) for name in _DIMENSIONS[kind])
    return [np.ascontiguousarray(x[cut]) for x in tensors[slice(*bounds.get(axes.GATE_UP, (None,)))]]


def _put(kind: str, array: jax.Array, at: tuple[jax.Array, ...], *tensors: jax.Array) -> jax.Array:
    """Lay one expert out as the decoder wants it, at its place among the others."""
    match kind:
        case "gate_up":
            x = jnp.stack([tensor.T for tensor in tensors])  # [2, D, F]
        case "gate_up_bias":
            x = jnp.stack(tensors)
        case _:
            x = tensors[0].T
    start = (*at, *[0] * x.ndim)
    return lax.dynamic_update_slice(array, x.astype(array.dtype)[(None,) * len(at)], start)
