"""Weights in host memory, while an engine sleeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding


@dataclass(frozen=True)
class HostArray:
    """An array's shards on the devices of this process, copied to the host: equal ones once.

    sharding: None for an array of one device. shards: each with its device. lay_out: makes the array that programs take
    of one in the usual layout; None if that is the same.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding | None
    shards: tuple[tuple[Any, np.ndarray], ...]
    lay_out: Callable[[jax.Array], jax.Array] | None

    @staticmethod
    def of(x: jax.Array, place: Format | NamedSharding | None) -> HostArray:
        """place: where the array lives, and in which layout if that is not the usual one."""
        copies: dict[str, np.ndarray] = {}
        shards = tuple((s.device, _once(copies, s)) for s in x.addressable_shards)
        of_layout = isinstance(place, Format)
        sharding: Any = place.sharding if of_layout else place
        lay_out = None
        if of_layout and not _usual(place.layout, x.ndim):
            usual = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            lay_out = jax.jit(_identity, out_shardings=place).lower(usual).compile()
        return HostArray(x.shape, sharding if isinstance(sharding, NamedSharding) else None, shards, lay_out)

    def to_devices(self) -> jax.Array:
        """The array on its devices."""
        if self.sharding is None:
            x = jax.device_put(self.shards[0][1])
        else:
            parts = [jax.device_put(shard, device) for device, shard in self.shards]
            x = jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)
        return x if self.lay_out is None else self.lay_out(x)


def to_host(weights: Sequence[jax.Array], places: Sequence[Format | NamedSharding | None]) -> tuple[HostArray, ...]:
    """Copies of the weights, in host memory."""
    for x in weights:
        for shard in x.addressable_shards:
            shard.data.copy_to_host_async()
    return tuple(HostArray.of(x, place) for x, place in zip(weights, places, strict=True))


def _once(copies: dict[str, np.ndarray], shard: Any) -> np.ndarray:
    """A shard on the host; the same array for equal ones."""
    if (key := str(shard.index)) not in copies:
        host = np.asarray(shard.data)
        copies[key] = host.copy() if shard.device.platform == "cpu" else host  # on CPUs it is a view of the weights
    return copies[key]


def _usual(layout: Any, dims: int) -> bool:
    """True for row-major arrays without tiles. Whether tiles are the usual ones, only the TPU knows."""
    return not layout.tiling and layout.major_to_minor == tuple(range(dims))


def _identity(x: jax.Array) -> jax.Array:
    return x
