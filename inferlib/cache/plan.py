"""The cache as a plan: for every block, its arrays: keys and values, or latents and rotary keys of MLA; in int8 or fp8
with the scales of each, one for a position and head, made when it is written. Of a recurrent layer, a row's state.

Contiguous mode: one page per row, so the arrays are [rows, K, S, h] with S the row's capacity. Layers
with a sliding window or chunks keep a ring when that is smaller. Where positions are dealt out to several devices, each
holds an equal number of slots, its own positions in order (see `inferlib.sharding.stripe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.config import KV_CACHE_DTYPES, ConfigurationError
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import MlaSpec
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.recurrent import Recurrent
from inferlib.ops.quantized import nbytes
from inferlib.programs.start_functions import run
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# Of scales. In half of that, the few heads of a device would fill a TPU's tiles by half, for the same bytes.
_SCALES = np.dtype(np.float32)


@dataclass(frozen=True)
class CacheArray:
    """One array: of keys, values, latents, or scales of these. fold: how many positions a row holds."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: np.dtype
    fold: int = 1

    def nbytes(self, shards: Shards = Shards()) -> int:  # noqa: B008
        """On a device."""
        return nbytes(shards.local_shape(self.axes, self.shape), self.dtype)

    def position_bytes(self, shards: Shards = Shards()) -> int:  # noqa: B008
        """Of a position in one layer, on a device that holds it; a state has none."""
        if axes.POSITIONS not in self.axes:
            return 0
        local = zip(self.axes, shards.local_shape(self.axes, self.shape), strict=True)
        cell = [size for name, size in local if name not in (axes.LAYERS, axes.PAGES, axes.POSITIONS)]
        return nbytes(cell, self.dtype) // self.fold

    def row_bytes(self, shards: Shards = Shards()) -> int:  # noqa: B008
        """Of a row in one layer, on a device."""
        local = zip(self.axes, shards.local_shape(self.axes, self.shape), strict=True)
        return nbytes([size for name, size in local if name not in (axes.LAYERS, axes.PAGES)], self.dtype)


@dataclass(frozen=True)
class BlockState:
    """One block's states, where it is recurrent: of each row, whatever its length, `arrays` [N, ...], or [L, N, ...] if
    the block is scanned."""

    arrays: tuple[CacheArray, ...]
    names: tuple[str, ...]

    ring: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    @property
    def held(self) -> tuple[CacheArray, ...]:
        return self.arrays

    def row_bytes(self, shards: Shards = Shards()) -> int:  # noqa: B008
        """Of a row in one layer, on a device: what a step reads and writes."""
        return sum(array.row_bytes(shards) for array in self.arrays)


@dataclass(frozen=True)
class BlockCache:
    """One block's cache: the shapes of its values, [N, K, S, h], or [L, N, K, S, h] if the block is scanned.

    dtype: of the values; scaled: there are scales of each, [N, K, S] or [L, N, K, S]. latent: of MLA, the latents and
    the rotary keys, which may be folded (see `inferlib.ops.cache_write`). Otherwise, where there is one array of
    values, a cell is a key with its value. shared: the arrays are another block's, which the block's layers attend to;
    the shapes are those that it would have.
    """

    shapes: tuple[tuple[int, ...], ...]
    ring: bool
    dtype: np.dtype
    scaled: bool = False
    latent: bool = False
    shared: bool = False

    @property
    def held(self) -> tuple[CacheArray, ...]:
        """Its own arrays."""
        return () if self.shared else self.arrays

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """Values, then, if `scaled`, their scales: its own or another's."""
        pairs = zip(self.shapes, self.folds, strict=True)
        values = tuple(CacheArray(shape, self.axes, self.dtype, fold) for shape, fold in pairs)
        scales = tuple(CacheArray(shape[:-1], self.axes[:-1], _SCALES) for shape in self.shapes)
        return values + scales if self.scaled else values

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays."""
        apart = ("latents", "rotary keys") if self.latent else ("k", "v")
        values = apart if len(self.shapes) == 2 else ("k and v",)
        return values + tuple(f"{name} scales" for name in values if self.scaled)

    @property
    def slots(self) -> int:
        return self.shapes[0][-2]

    @property
    def folds(self) -> tuple[int, ...]:
        """How many positions a row of each array holds."""
        return tuple(self.slots // shape[-2] for shape in self.shapes)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Of the values."""
        heads, size = (None, axes.LATENT) if self.latent else (axes.KV_HEADS, axes.HEAD_DIM)
        names = (axes.PAGES, heads, axes.POSITIONS, size)
        return names if len(self.shapes[0]) == 4 else (axes.LAYERS, *names)


@dataclass(frozen=True)
class CachePlan:
    """rows: sequences held at once; max_len: capacity of a row in tokens."""

    rows: int
    max_len: int
    blocks: tuple[BlockCache | BlockState, ...]

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """Those of each block in turn."""
        return tuple(array for block in self.blocks for array in block.held)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes() for array in self.arrays)

    def allocate(self, shards: Shards = Shards()) -> tuple[jax.Array, ...]:  # noqa: B008
        """Zeroed `arrays`, each part on its device."""
        return tuple(run(jnp.zeros, (x.shape, x.dtype.name), place=shards.sharding(x.axes)) for x in self.arrays)

    def view(self, arrays: Sequence[jax.Array]) -> tuple[LayerCache, ...]:
        """The flat arrays as one `LayerCache` per block, without arrays where it shares another's."""
        rest = iter(arrays)
        return tuple(LayerCache(tuple(islice(rest, len(b.held))), b.ring) for b in self.blocks)

    @staticmethod
    def flatten(caches: Sequence[LayerCache]) -> tuple[jax.Array, ...]:
        return tuple(array for cache in caches for array in cache.arrays)


def plan_cache(model: AbstractModel, *, rows: int, max_len: int, chunk: int, dtype, platform: str = "cpu") -> CachePlan:
    """Plan the cache of `rows` sequences of up to `max_len` tokens, prefilled in chunks of at most `chunk`.

    dtype: of keys and values, a float type, or a name of KV_CACHE_DTYPES; states keep theirs. Raises ConfigurationError
    for such a name, if there are no keys and values or their cells are made larger on a "tpu".

    A cell on a "tpu" is a multiple of 128 numbers, by which its memory is tiled in any case; for other sizes its
    compiler would choose another order of the dimensions, and copy the cache to it at every step. So where heads are of
    other sizes, 64 above all, a value lies behind its key in one cell; and rotary keys of latents, half or a quarter of
    128 numbers, are folded, so that nothing is padded. A device's slots are such multiples too, as
    kernels read whole tiles.

    A ring must hold what a chunk's first query sees and the chunk itself: window + chunk slots.
    """
    blocks, lanes = [], 128 if platform == "tpu" else 1
    scaled = dtype in KV_CACHE_DTYPES
    if scaled and all(isinstance(layer.attention, Recurrent) for layer in model.config.layers):
        raise ConfigurationError(
            f"kv_cache_dtype {dtype!r} is of keys and values, and no layer of this model keeps any: leave it out"
        )
    dtype = KV_CACHE_DTYPES[dtype] if scaled else np.dtype(dtype)
    for layers in model.blocks():
        spec, stack = model.config.layers[layers[0]].attention, (len(layers),) if len(layers) > 1 else ()
        if isinstance(spec, Recurrent):
            blocks.append(_states(model, spec, (*stack, rows)))
            continue
        ring = spec.reach is not None and spec.reach + chunk < max_len
        latent, sizes = isinstance(spec, MlaSpec), spec.cache_sizes
        folds = [lanes // size if latent and size in (lanes // 2, lanes // 4) else 1 for size in sizes]
        if not latent and any(size % lanes for size in sizes):
            sizes, folds = (sum(sizes),), [1]
        slots = model.layout.positions(spec.reach + chunk if ring else max_len, lanes * max(folds))
        if platform == "tpu" and scaled and (latent or any(size % lanes for size in spec.cache_sizes)):
            what = "latent attention" if latent else f"attention with heads of {spec.head_dim}"
            raise ConfigurationError(
                f"{what} keeps its cache in the model's dtype on TPUs, whose compiler would copy one of int8 or fp8 at "
                "every layer: leave kv_cache_dtype out"
            )
        page = (*stack, rows, model.layout.cache_heads(spec))
        cells = [(slots // fold, -(-size * fold // lanes) * lanes) for size, fold in zip(sizes, folds, strict=True)]
        shapes = tuple((*page, *cell) for cell in cells)
        blocks.append(BlockCache(shapes, ring, dtype, scaled, latent, shared=spec.cache_of is not None))
    return CachePlan(rows, max_len, tuple(blocks))


def _states(model: AbstractModel, spec: Recurrent, lead: tuple[int, ...]) -> BlockState:
    states, names = spec.states(model.layout.heads(spec)), (axes.LAYERS, axes.PAGES)[-len(lead) :]
    wide = np.dtype(np.float32)
    arrays = (CacheArray((*lead, *x.shape), (*names, *x.axes), wide if x.wide else model.dtype) for x in states)
    return BlockState(tuple(arrays), tuple(x.name for x in states))
