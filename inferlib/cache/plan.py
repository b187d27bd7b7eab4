"""The cache as a plan: for every block, the shapes of its arrays: keys and values, or the latents of MLA alone.

Contiguous mode: one page per row, so the arrays are [rows, K, S, h] with S the row's capacity. Layers
with a sliding window or chunks keep a ring when that is smaller. Where positions are dealt out to several devices, each
holds an equal number of slots, its own positions in order (see `inferlib.sharding.stripe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.compile.functions import run
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import MlaSpec
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class BlockCache:
    """One block's cache: the shapes of its arrays, [N, K, S, h], or [L, N, K, S, h] if the block is scanned.

    latent: there is one, of MLA, which has one head. Otherwise, where there is one, a cell is a key with its value.
    shared: the arrays are another block's, which the block's layers attend to; the shapes are those that it would have.
    """

    shapes: tuple[tuple[int, ...], ...]
    ring: bool
    latent: bool = False
    shared: bool = False

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its own arrays."""
        return () if self.shared else self.shapes

    @property
    def slots(self) -> int:
        return self.shapes[0][-2]

    @property
    def axes(self) -> tuple[str | None, ...]:
        heads, size = (None, axes.LATENT) if self.latent else (axes.KV_HEADS, axes.HEAD_DIM)
        names = (axes.PAGES, heads, axes.POSITIONS, size)
        return names if len(self.shapes[0]) == 4 else (axes.LAYERS, *names)


@dataclass(frozen=True)
class CachePlan:
    """rows: sequences held at once; max_len: capacity of a row in tokens."""

    rows: int
    max_len: int
    blocks: tuple[BlockCache, ...]
    dtype: np.dtype

    @property
    def arrays(self) -> tuple[tuple[tuple[int, ...], tuple[str | None, ...]], ...]:
        """Shape and logical axes of every array, those of each block in turn."""
        return tuple((shape, block.axes) for block in self.blocks for shape in block.held)

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(shape)) * self.dtype.itemsize for shape, _ in self.arrays)

    def allocate(self, shards: Shards = Shards()) -> tuple[jax.Array, ...]:  # noqa: B008
        """Zeroed `arrays`, each part on its device."""
        dtype = self.dtype.name
        return tuple(run(jnp.zeros, (shape, dtype), place=shards.sharding(names)) for shape, names in self.arrays)

    def view(self, arrays: Sequence[jax.Array]) -> tuple[LayerCache, ...]:
        """The flat arrays as one `LayerCache` per block, without arrays where it shares another's."""
        rest = iter(arrays)
        return tuple(LayerCache(tuple(islice(rest, len(b.held))), b.ring) for b in self.blocks)

    @staticmethod
    def flatten(caches: Sequence[LayerCache]) -> tuple[jax.Array, ...]:
        return tuple(array for cache in caches for array in cache.arrays)


def plan_cache(model: AbstractModel, *, rows: int, max_len: int, chunk: int, dtype, platform: str = "cpu") -> CachePlan:
    """Plan the cache of `rows` sequences of up to `max_len` tokens, prefilled in chunks of at most `chunk`.

    A cell on a "tpu" is a multiple of 128 numbers, by which its memory is tiled in any case; for other sizes its
    compiler would choose another order of the dimensions, and copy the cache to it at every step. So where heads are of
    other sizes, 64 above all, a value lies behind its key in one cell. A device's slots are such multiples too, as
    kernels read whole tiles.

    A ring must hold what a chunk's first query sees and the chunk itself: window + chunk slots.
    """
    blocks, lanes = [], 128 if platform == "tpu" else 1
    for layers in model.blocks():
        spec = model.config.layers[layers[0]].attention
        ring = spec.reach is not None and spec.reach + chunk < max_len
        slots = model.layout.positions(spec.reach + chunk if ring else max_len, lanes)
        stack = (len(layers),) if len(layers) > 1 else ()
        page = (*stack, rows, model.layout.cache_heads(spec), slots)
        sizes = spec.cache_sizes
        if any(size % lanes for size in sizes):
            sizes = (-(-sum(sizes) // lanes) * lanes,)
        shapes = tuple((*page, size) for size in sizes)
        blocks.append(BlockCache(shapes, ring, isinstance(spec, MlaSpec), shared=spec.cache_of is not None))
    return CachePlan(rows, max_len, tuple(blocks), np.dtype(dtype))
