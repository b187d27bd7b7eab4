"""The cache as a plan: for every block, the shape of its key and value arrays.

Contiguous mode: one page per row, so the arrays are [rows, K, S, h] with S the row's capacity. Layers
with a sliding window keep a ring when that is smaller. Where positions are dealt out to several devices, each holds
an equal number of slots, its own positions in order (see `inferlib.sharding.stripe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.compile.functions import run
from inferlib.models.abstract import AbstractModel
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class BlockCache:
    """One block's cache: k and v have `shape`, [N, K, S, h], or [L, N, K, S, h] if the block is scanned."""

    shape: tuple[int, ...]
    ring: bool

    @property
    def axes(self) -> tuple[str, ...]:
        names = (axes.PAGES, axes.KV_HEADS, axes.POSITIONS, axes.HEAD_DIM)
        return names if len(self.shape) == 4 else (axes.LAYERS, *names)


@dataclass(frozen=True)
class CachePlan:
    """rows: sequences held at once; max_len: capacity of a row in tokens."""

    rows: int
    max_len: int
    blocks: tuple[BlockCache, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return sum(2 * int(np.prod(block.shape)) * self.dtype.itemsize for block in self.blocks)

    def allocate(self, shards: Shards = Shards()) -> tuple[jax.Array, ...]:  # noqa: B008
        """Zeroed arrays (k, v of each block in turn), each part on its device."""
        dtype = self.dtype.name
        return tuple(run(jnp.zeros, (b.shape, dtype), place=shards.sharding(b.axes)) for b in self.blocks for _ in "kv")

    def view(self, arrays: Sequence[jax.Array]) -> tuple[LayerCache, ...]:
        """The flat arrays as one `LayerCache` per block."""
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return tuple(LayerCache(k, v, b.ring) for (k, v), b in zip(pairs, self.blocks, strict=True))

    @staticmethod
    def flatten(caches: Sequence[LayerCache]) -> tuple[jax.Array, ...]:
        return tuple(array for cache in caches for array in (cache.k, cache.v))


def plan_cache(model: AbstractModel, *, rows: int, max_len: int, chunk: int, dtype) -> CachePlan:
    """Plan the cache of `rows` sequences of up to `max_len` tokens, prefilled in chunks of at most `chunk`.

    A ring must hold the window of a chunk's first query and the chunk itself: window + chunk slots.
    """
    blocks = []
    for layers in model.blocks():
        spec = model.config.layers[layers[0]].attention
        ring = spec.window is not None and spec.window + chunk < max_len
        slots = model.layout.positions(spec.window + chunk if ring else max_len)
        shape = (rows, model.layout.heads(spec).groups, slots, spec.head_dim)
        blocks.append(BlockCache(shape if len(layers) == 1 else (len(layers), *shape), ring))
    return CachePlan(rows, max_len, tuple(blocks), np.dtype(dtype))
