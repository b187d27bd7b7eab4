"""Load experts one after the other; each device takes its part of the experts that it stores.

A layer's experts can be larger than everything else on a device, so they are never read or laid out together. Letters:
E experts, D width, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from inferlib.checkpoint.assemble import LoadItem, piece_bytes
from inferlib.checkpoint.shipped import assemble_stored, stored_readers
from inferlib.checkpoint.source import TensorSource
from inferlib.models.abstract import ArraySpec
from inferlib.models.config import MoeSpec
from inferlib.models.families.common import FusedExperts
from inferlib.models.pieces import Piece
from inferlib.ops.packed import Packing
from inferlib.ops.quantized import Scheme, quantize
from inferlib.programs.start_functions import fetched, join, run
from inferlib.sharding import axes

_PREFIX = "mlp.experts."
# The logical axes of one expert's tensors, [out, in].
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
    halves = ("gate", "up") if spec.gated else ("up",)
    keys = [half + kind.removeprefix("gate_up") for half in halves] if kind.startswith("gate_up") else [kind]
    return tuple(Piece(names[_PREFIX + key].format(e=e), shape) for e in range(spec.experts) for key in keys)


def load_experts(
    source: TensorSource,
    item: LoadItem,
    places: Sequence[Format | NamedSharding | None],
    advance: Callable[[int], None],
) -> tuple[jax.Array, ...]:
    """Read the arrays of a weight of all experts, of one layer or of a stack of them.

    places: where each array goes, None for one device.
    """
    weight, kind = item.weight, item.weight.part.removeprefix(_PREFIX)
    arrays = tuple(_Parts.of(spec, place) for spec, place in zip(weight.arrays, places, strict=True))
    spec = item.layer.mlp if item.layer is not None else None
    assert isinstance(spec, MoeSpec)  # only mixtures have weights of all experts
    for layer, pieces in enumerate(item.pieces):
        for expert in range(spec.experts):
            tensors_of_expert, slots = _of_expert(pieces, kind, spec, expert), [expert]
            if item.slot_experts:
                slots = [slot for slot, e in enumerate(item.slot_experts[layer]) if e == expert]
            if slots := [slot for slot in slots if arrays[0].owners(slot)]:
                if weight.scheme is None:
                    tensors = _read(source.read, tensors_of_expert, kind, item.fused_experts)
                    cut = lambda bounds, tensors=tensors: _cut(tensors, kind, bounds)  # noqa: E731
                    for slot in slots:
                        arrays[0].put(layer, slot, kind, cut)
                else:
                    for parts, whole in zip(arrays, _quantized(source, item, tensors_of_expert), strict=True):
                        for slot in slots:
                            parts.put(layer, slot, "", partial(parts.share, whole))
            # Without this the host runs ahead and stages the whole checkpoint in transfer buffers.
            for part in (part for parts in arrays for part in parts.arrays.values()):
                part.block_until_ready()
            advance(sum(piece_bytes(source, piece) for piece in tensors_of_expert))
    return tuple(parts.whole() for parts in arrays)


@dataclass
class _Parts:
    """The parts of an array of all experts while it is read. bounds: the range of each device's part, by logical axis,
    or by dimension if that has no name; arrays: the parts. On one device there is one part, whose place is None."""

    spec: ArraySpec
    sharding: Sharding | None
    bounds: dict[Format | SingleDeviceSharding | None, dict[str | int, tuple[int, int]]]
    arrays: dict[Format | SingleDeviceSharding | None, jax.Array]

    @staticmethod
    def of(spec: ArraySpec, place: Format | NamedSharding | None) -> _Parts:
        sharding = place.sharding if isinstance(place, Format) else place
        names, places = [name or i for i, name in enumerate(spec.axes)], {}
        parts: Mapping[Any, Any] = {None: (slice(None),) * len(spec.shape)}
        parts = sharding.addressable_devices_indices_map(spec.shape) if sharding else parts
        for device, index in parts.items():
            bounds = [part.indices(size)[:2] for part, size in zip(index, spec.shape, strict=True)]
            alone = device and SingleDeviceSharding(device)
            here = Format(place.layout, alone) if isinstance(place, Format) else alone
            places[here] = dict(zip(names, bounds, strict=True))
        shape = sharding.shard_shape(spec.shape) if sharding else spec.shape
        fill = float(spec.part.endswith(".scales"))
        return _Parts(
            spec, sharding, places, {here: run(jnp.full, (shape, fill, spec.dtype.name), place=here) for here in places}
        )

    def owners(self, slot: int) -> list[Format | SingleDeviceSharding | None]:
        bounds = {here: b[axes.EXPERTS] for here, b in self.bounds.items()}
        return [here for here, (first, last) in bounds.items() if first <= slot < last]

    def put(self, layer: int, slot: int, kind: str, cut: Callable[[Mapping], list[np.ndarray]]) -> None:
        """Write one expert into each device's part: `cut` gives its tensors within a device's bounds (see `_put`)."""
        for here in self.owners(slot):
            bounds = self.bounds[here]
            at = np.int32(slot - bounds[axes.EXPERTS][0])
            at = (np.int32(layer), at) if axes.LAYERS in bounds else (at,)
            self.arrays[here] = run(_put, (kind,), self.arrays[here], at, *cut(bounds), place=here, donate=True)

    def share(self, whole: np.ndarray, bounds: Mapping[str | int, tuple[int, int]]) -> list[np.ndarray]:
        """Cut one expert's array, which is laid out already, to a device's bounds."""
        cut = tuple(slice(*b) for name, b in bounds.items() if name not in (axes.LAYERS, axes.EXPERTS))
        return [np.ascontiguousarray(whole[cut])]

    def whole(self) -> jax.Array:
        return join(self.spec.shape, self.sharding, list(self.arrays.values())) if self.sharding else self.arrays[None]


def _quantized(source: TensorSource, item: LoadItem, pieces: Sequence[Piece]) -> list[np.ndarray]:
    """Quantise one whole expert: a device stores a part of its arrays, but scales are of whole channels."""
    weight, kind = item.weight, item.weight.part.removeprefix(_PREFIX)
    lead = sum(name in (axes.LAYERS, axes.EXPERTS) for name in weight.axes)
    how = kind, tuple(i - lead for i in weight.contracting), weight.scheme, weight.packed, weight.float4
    if readers := stored_readers(source, weight, pieces):
        stored = (_read(reader, pieces, kind, item.fused_experts) for reader in readers)
        return fetched(run(_arrange_stored, how, *stored))
    return fetched(run(_quantize, how, *_read(source.read, pieces, kind, item.fused_experts)))


def _quantize(
    kind: str, contracting: tuple[int, ...], scheme: Scheme, packed: bool, float4: bool, *tensors: jax.Array
) -> tuple[jax.Array, ...]:
    arrays = tuple(jax.tree.leaves(quantize(_laid_out(kind, tensors), contracting, scheme)))
    return _packed(scheme, contracting, float4, arrays) if packed else arrays


def _arrange_stored(
    kind: str, contracting: tuple[int, ...], scheme: Scheme, packed: bool, float4: bool, *stored: list[jax.Array]
) -> tuple[jax.Array, ...]:
    # Nothing is padded yet.
    arrays = assemble_stored(scheme, contracting, lambda tensors, _: _laid_out(kind, tensors), *stored)
    return _packed(scheme, contracting, float4, arrays) if packed else arrays


def _packed(
    scheme: Scheme, contracting: tuple[int, ...], float4: bool, arrays: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The arrays of a scheme in groups, in the layout that the TPU kernel reads."""
    *lead, groups, group, columns = arrays[0].shape
    shape = (*lead, groups * group, columns)
    return Packing(scheme, shape, (None,) * len(shape), contracting, float4=float4).pack(*arrays)


def _of_expert(pieces: Sequence[Piece], kind: str, spec: MoeSpec, expert: int) -> Sequence[Piece]:
    """The pieces of one expert: its tensors, or its row of a fused tensor."""
    if len(pieces[0].shape) > len(_DIMENSIONS[kind]):
        return [replace(pieces[0], rows=(expert, expert + 1))]
    return of_expert(pieces, expert, spec.experts)


def of_expert(pieces: Sequence[Piece], expert: int, experts: int) -> Sequence[Piece]:
    """The pieces of one of the experts, which have tensors of their own."""
    count = len(pieces) // experts
    return pieces[expert * count : (expert + 1) * count]


def _read(
    reader: Callable[[str, slice | None], np.ndarray], pieces: Sequence[Piece], kind: str, fused: FusedExperts
) -> list[np.ndarray]:
    """Read one expert's tensors, [out, in] each: gate and up, or a single one."""
    if pieces[0].rows is None:
        return [reader(piece.tensor, None) for piece in pieces]
    whole = reader(pieces[0].tensor, slice(*pieces[0].rows))[0]
    whole = whole.T if fused.transposed else whole
    if not kind.startswith("gate_up"):
        return [whole]
    return [whole[0::2], whole[1::2]] if fused.interleaved else np.split(whole, 2)


def _cut(tensors: list[np.ndarray], kind: str, bounds: Mapping[str, tuple[int, int]]) -> list[np.ndarray]:
    """Cut one expert's tensors to a device's part. Bounds may reach into the padding, which stays zero."""
    cut = tuple(slice(*bounds[name]) for name in _DIMENSIONS[kind])
    return [np.ascontiguousarray(x[cut]) for x in tensors[slice(*bounds.get(axes.GATE_UP, (None,)))]]


def _put(kind: str, array: jax.Array, at: tuple[jax.Array, ...], *tensors: jax.Array) -> jax.Array:
    """Lay one expert out as the decoder wants it, and write it to its place. kind: "" if it is laid out already."""
    x = _laid_out(kind, tensors)
    start = (*at, *[0] * x.ndim)
    return lax.dynamic_update_slice(array, x.astype(array.dtype)[(None,) * len(at)], start)


def _laid_out(kind: str, tensors: Sequence[jax.Array]) -> jax.Array:
    match kind:
        case "gate_up" | "gate_up_bias":  # one or two, stacked
            return rearrange(list(tensors), "halves f ... -> halves ... f")
        case "":
            return tensors[0]
        case _:
            return rearrange(tensors[0], "d ... -> ... d")
