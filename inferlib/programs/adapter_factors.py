"""The factors of adapters on the devices: programs take them behind the weights, and a slot is written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.models.abstract import AbstractModel
from inferlib.models.adapters import of_slot
from inferlib.programs.start_functions import run
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

Arrays = tuple[jax.Array, ...]
Places = tuple[Format | NamedSharding | None, ...]


@dataclass(frozen=True)
class AdapterFactors:
    """The arrays of a model's factors. places: of the arrays that programs take: the weights, then the factors, and
    behind them perhaps the weights of a model that drafts."""

    model: AbstractModel
    shards: Shards
    places: Places

    @property
    def which(self) -> slice:
        """The factors among the arrays."""
        return slice(len(self.model.base_specs), len(self.model.specs))

    def empty(self) -> Arrays:
        """The factors of no adapter."""
        pairs = zip(self.model.factors, self.places[self.which], strict=True)
        return tuple(run(jnp.zeros, (factor.shape, factor.dtype.name), place=place) for factor, place in pairs)

    def put(self, weights: Arrays, slot: int, values: Sequence[np.ndarray]) -> Arrays:
        """The weights with an adapter in a slot, 1 or more, in place: the factors before are donated.

        values: one slot of each array of factors, on the host.
        """
        names = (of_slot(factor.shape, factor.axes).axes for factor in self.model.factors)
        arrays = tuple(self.shards.place(x, of_one) for x, of_one in zip(values, names, strict=True))
        return self.replaced(weights, self.write(weights[self.which], arrays, np.int32(slot - 1)))

    def replaced(self, weights: Arrays, factors: Arrays) -> Arrays:
        """The weights with other factors."""
        return weights[: self.which.start] + factors + weights[self.which.stop :]

    @cached_property
    def write(self) -> Callable[..., Arrays]:
        """The program `(factors, values of one slot, number of the slot from 0 on) -> factors`."""
        factors, values, places = [], [], self.places[self.which]
        for factor, place in zip(self.model.factors, places, strict=True):
            factors.append(jax.ShapeDtypeStruct(factor.shape, factor.dtype, sharding=place))
            shape, names = of_slot(factor.shape, factor.axes)
            values.append(jax.ShapeDtypeStruct(shape, factor.dtype, sharding=self.shards.sharding(names)))
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        jitted = jax.jit(write_slot, static_argnums=0, donate_argnums=1, out_shardings=places if any(places) else None)
        dims = tuple(factor.axes.index(axes.ADAPTERS) for factor in self.model.factors)
        return jitted.lower(dims, tuple(factors), tuple(values), slot).compile()


def write_slot(dims: tuple[int, ...], factors: Arrays, values: Arrays, slot: jax.Array) -> Arrays:
    """Arrays of factors with these values in a slot. dims: which dimension of each array counts slots."""
    triples = zip(factors, values, dims, strict=True)
    return tuple(lax.dynamic_update_index_in_dim(array, value, slot, dim) for array, value, dim in triples)
