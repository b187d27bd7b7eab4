"""The factors of an adapter in the layout of a model's products, for `inferlib.ops.adapted_matmul`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from inferlib.checkpoint.adapter import Adapter, Factors, names_of
from inferlib.checkpoint.assemble import LoadItem, expand, heads_of
from inferlib.checkpoint.load import load_items
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.abstract import AbstractModel
from inferlib.models.adapters import Adaptable, of_slot
from inferlib.models.families.common import Family
from inferlib.models.pieces import Piece
from inferlib.sharding import axes

_INSTEAD = "train it without that, or merge it for good: inferlib convert --merge-adapter"


@dataclass(frozen=True)
class AdapterValues:
    """An adapter as a slot takes it.

    key: of its factors and scales; equal ones change a model alike. arrays: one slot of each of
    `AbstractModel.factors`, zeros where the adapter changes nothing. nbytes: of all of them.
    """

    key: str
    rank: int
    arrays: tuple[np.ndarray, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class _Place:
    """The place of a tensor of the checkpoint in a weight.

    number: that of the weight among those that adapters change; None: they do not change it. layer: the layer in a
    stack; None: the weight has one layer. piece: which of the weight's pieces the tensor is.
    """

    item: LoadItem
    number: int | None
    layer: int | None
    piece: int


class AdapterReader:
    """Reads adapters for a model with room for them."""

    def __init__(self, family: Family, model: AbstractModel):
        self.model, self._family, self._adapted = model, family, model.adapted
        self._orders: dict[int, tuple[_Order, ...]] = {}

    def read(self, adapter: Adapter) -> AdapterValues:
        """Raises CheckpointError for an adapter of another model, one of a higher rank than there is room for, and one
        that changes what cannot be changed at run time."""
        assert self.model.adapters is not None
        most = self.model.adapters.rank
        if adapter.rank > most:
            raise CheckpointError(
                f"{adapter.path} has rank {adapter.rank}, and there is room for {most}: give max_adapter_rank="
                f"{adapter.rank}"
            )
        # All is checked before anything is read.
        places = {module: self._checked(adapter, module, factors) for module, factors in adapter.modules.items()}
        digest = hashlib.blake2b(digest_size=16)
        arrays = tuple(np.zeros(of_slot(x.shape, x.axes).shape, x.dtype) for x in self.model.factors)
        for module, factors in adapter.modules.items():
            a, b = adapter.factors(factors)
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise CheckpointError(f"{adapter.path} is damaged: factors of {module} are not finite")
            digest.update(f"{module} {a.shape} {b.shape}\n".encode() + a.tobytes() + b.tobytes())
            for place in places[module]:
                self._put(arrays, place, a, b)
        return AdapterValues(digest.hexdigest(), adapter.rank, arrays)

    def targets(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint that adapters may change, with their shapes, [out, in]."""
        changed = {name: places for name, places in self._places.items() if all(x.number is not None for x in places)}
        return {name: _piece(places[0]).shape for name, places in changed.items()}

    @cached_property
    def _places(self) -> Mapping[str, tuple[_Place, ...]]:
        """The places of each tensor of the checkpoint, by its name."""
        numbers = {weight.name: number for number, (weight, _) in enumerate(self._adapted)}
        places: dict[str, tuple[_Place, ...]] = {}
        for item in load_items(self._family, self.model):
            number = numbers.get(item.weight.name)
            stacked = item.weight.axes[0] == axes.LAYERS
            for layer, pieces in enumerate(item.pieces):
                for index, piece in enumerate(pieces):
                    place = _Place(item, number, layer if stacked else None, index)
                    places[piece.tensor] = (*places.get(piece.tensor, ()), place)
        return places

    def _checked(self, adapter: Adapter, module: str, factors: Factors) -> tuple[_Place, ...]:
        """The places of a module's weight, all of which adapters may change."""
        base = self._family.base
        names = [name for m in (module, base + module, module.removeprefix(base)) for name in names_of(m)]
        if (name := next((name for name in names if name in self._places), None)) is None:
            raise CheckpointError(
                f"{adapter.path} changes {module}, and the model has no such weight: take an adapter of this model"
            )
        places = self._places[name]
        if any(place.number is None for place in places):
            weight, slots = places[0].item.weight, self.model.adapters
            if slots is not None and weight.name in {adaptable.name for adaptable, _ in self.model.adaptable}:
                raise CheckpointError(
                    f"{adapter.path} changes {module}, and there is room for changes of {', '.join(slots.parts)} "
                    f"alone: give adapter_parts {weight.part} too, or leave it out"
                )
            experts = any(axes.EXPERTS in place.item.weight.axes for place in places)
            what = "an expert's projection" if experts else "which is no projection that adapters change at run time"
            raise CheckpointError(f"{adapter.path} changes {module}, {what}: {_INSTEAD}")
        _, inputs, outputs = adapter.sizes(factors)
        piece = _piece(places[0])
        if (outputs, inputs) != piece.shape:
            raise CheckpointError(
                f"{adapter.path} changes {module} as {(outputs, inputs)}, and the model's weight is {piece.shape}: "
                "take an adapter of this model"
            )
        return places

    def _put(self, arrays: tuple[np.ndarray, ...], place: _Place, a: np.ndarray, b: np.ndarray) -> None:
        """Write the factors a [r, in] and b [out, r] of one tensor to their places."""
        assert place.number is not None
        how, order = self._adapted[place.number][1], self._order(place)
        to_a, to_b = arrays[2 * place.number : 2 * place.number + 2]
        if place.layer is not None:
            to_a, to_b = to_a[place.layer], to_b[place.layer]
        part, first = (place.piece, 0) if how.apart else (0, place.piece * (to_b.shape[1] // how.pieces))
        ranks = slice(first, first + len(a))
        to_a, to_b = to_a.reshape(-1, *to_a.shape[-2:])[:, part, ranks], to_b[part, ranks].reshape(len(a), -1)
        if how.by_input:
            to_a[order.places], to_b[:] = a.T[order.sources], b.T
        else:
            to_a[:], to_b[:, order.places] = a.T, b.T[:, order.sources]

    def _order(self, place: _Place) -> _Order:
        """How the rows or columns of a place's tensor are laid out in the weight."""
        assert place.number is not None
        if place.number not in self._orders:
            self._orders[place.number] = _orders(place.item, self.model, self._adapted[place.number][1])
        return self._orders[place.number][place.piece]


@dataclass(frozen=True)
class _Order:
    """Numbers `places` among a weight's inputs or results, or those of one of their parts, that are numbers `sources`
    of a checkpoint's columns or rows."""

    places: np.ndarray
    sources: np.ndarray


def _piece(place: _Place) -> Piece:
    return place.item.pieces[place.layer or 0][place.piece]


def _orders(item: LoadItem, model: AbstractModel, how: Adaptable) -> tuple[_Order, ...]:
    """The order of each piece: the weight is laid out with the number of each row or column, from 1 on, in its place;
    heads that are padded get none, and those that are copied several."""
    weight, pieces, numbered, first = item.weight.of_layer, item.pieces[0], [], 1
    for piece in pieces:
        start, stop = piece.rows or (0, piece.shape[0])
        count = piece.shape[1] if how.by_input else stop - start
        numbers = np.arange(first, first + count, dtype=np.int32)
        numbered.append(numbers[None] if how.by_input else numbers[:, None])
        first += count
    assert item.arrange is not None
    shape = (*weight.shape[: how.inputs], 1) if how.by_input else (1, *weight.shape[how.inputs :])
    heads, orders = heads_of(model.layout, item.layer, weight), []
    laid_out = np.asarray(expand(item.arrange(*numbered), weight.axes, shape, heads))
    parts = laid_out.reshape(shape[1] if how.apart else 1, -1)
    for number, (piece, numbers) in enumerate(zip(pieces, numbered, strict=True)):
        part = parts[number if how.apart else 0]
        places = np.flatnonzero((part >= numbers.min()) & (part <= numbers.max()))
        start = 0 if how.by_input else (piece.rows or (0, 0))[0]
        orders.append(_Order(places, part[places] - numbers.min() + start))
    return tuple(orders)
