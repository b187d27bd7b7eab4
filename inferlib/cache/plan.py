"""The cache as a plan: the arrays of every block. Attention has keys and values, or latents and rotary keys (MLA), in
int8 or fp8 with scales beside them, one for each position and head, made when the cell is written. Recurrent layers
have each row's state.

The cache is contiguous: a row is one page, so arrays are [rows, K, S, h] with S the row's capacity. Layers with a
sliding window or chunks keep a ring if that is smaller. If a mesh deals positions out to several devices, each stores
an equal number of slots, its positions in order (see `inferlib.sharding.stripe`).
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
from inferlib.models.config import AttentionSpec, MlaSpec
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.recurrent import Recurrent
from inferlib.ops.quantized import nbytes
from inferlib.programs.start_functions import run
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# The dtype of scales. In half of that, the few heads of a device would fill half of a TPU's tiles, for the same bytes.
_SCALES = np.dtype(np.float32)
ONE_DEVICE = Shards()


@dataclass(frozen=True)
class CacheArray:
    """One array of the cache: keys, values, latents, their scales, or states. fold: positions per row of the array."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: np.dtype
    fold: int = 1

    def nbytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes on one device."""
        return nbytes(shards.local_shape(self.axes, self.shape), self.dtype)

    def position_bytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes of one position in one layer, on a device that stores it; 0 for a state, which has no positions."""
        if axes.POSITIONS not in self.axes:
            return 0
        return self._bytes_without(shards, axes.LAYERS, axes.PAGES, axes.POSITIONS) // self.fold

    def row_bytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes of one row in one layer, on a device."""
        return self._bytes_without(shards, axes.LAYERS, axes.PAGES)

    def _bytes_without(self, shards: Shards, *left_out: str) -> int:
        local = zip(self.axes, shards.local_shape(self.axes, self.shape), strict=True)
        return nbytes([size for name, size in local if name not in left_out], self.dtype)


@dataclass(frozen=True)
class BlockState:
    """The states of a block of recurrent layers, of one size for each row, however long the row: arrays [N, ...], or
    [L, N, ...] if the block is scanned."""

    arrays: tuple[CacheArray, ...]
    names: tuple[str, ...]

    ring: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    @property
    def owned(self) -> tuple[CacheArray, ...]:
        return self.arrays

    def row_bytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes of one row in one layer, on a device: what a step reads and writes."""
        return sum(array.row_bytes(shards) for array in self.arrays)


@dataclass(frozen=True)
class BlockCache:
    """The cache of a block of attention: the shapes of its values, [N, K, S, h], or [L, N, K, S, h] if it is scanned.

    dtype: of the values; scaled: each array has scales [N, K, S] or [L, N, K, S]. latent: the arrays are latents and
    rotary keys of MLA, which may be folded (see `inferlib.ops.cache_write`). Otherwise two arrays are keys and values,
    and of a single array each cell is a key followed by its value. shared: the block's layers attend to another block's
    arrays; the shapes are those that it would have.
    """

    shapes: tuple[tuple[int, ...], ...]
    ring: bool
    dtype: np.dtype
    scaled: bool = False
    latent: bool = False
    shared: bool = False

    @property
    def owned(self) -> tuple[CacheArray, ...]:
        """The arrays that no other block owns."""
        return () if self.shared else self.arrays

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """The arrays of values, then, if `scaled`, their scales: this block's or those it shares."""
        pairs = zip(self.shapes, self.folds, strict=True)
        values = tuple(CacheArray(shape, self.axes, self.dtype, fold) for shape, fold in pairs)
        scales = tuple(CacheArray(shape[:-1], self.axes[:-1], _SCALES) for shape in self.shapes)
        return values + scales if self.scaled else values

    @property
    def names(self) -> tuple[str, ...]:
        """One name for each of `arrays`."""
        apart = ("latents", "rotary keys") if self.latent else ("k", "v")
        values = apart if len(self.shapes) == 2 else ("k and v",)
        return values + tuple(f"{name} scales" for name in values if self.scaled)

    @property
    def slots(self) -> int:
        return self.shapes[0][-2]

    @property
    def folds(self) -> tuple[int, ...]:
        """For each array of values, positions per row of the array."""
        return tuple(self.slots // shape[-2] for shape in self.shapes)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical axes of values."""
        heads, size = (None, axes.LATENT) if self.latent else (axes.KV_HEADS, axes.HEAD_DIM)
        names = (axes.PAGES, heads, axes.POSITIONS, size)
        return names if len(self.shapes[0]) == 4 else (axes.LAYERS, *names)


@dataclass(frozen=True)
class CachePlan:
    """rows: sequences that the cache has room for; max_len: capacity of a row in tokens."""

    rows: int
    max_len: int
    blocks: tuple[BlockCache | BlockState, ...]

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """The arrays of each block in turn."""
        return tuple(array for block in self.blocks for array in block.owned)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes() for array in self.arrays)

    def allocate(self, shards: Shards = ONE_DEVICE) -> tuple[jax.Array, ...]:
        """Zeroed `arrays`, each part on its device."""
        return tuple(run(jnp.zeros, (x.shape, x.dtype.name), place=shards.sharding(x.axes)) for x in self.arrays)

    def view(self, arrays: Sequence[jax.Array]) -> tuple[LayerCache, ...]:
        """The flat arrays as one `LayerCache` per block, which is empty if the block shares another's arrays."""
        rest = iter(arrays)
        return tuple(LayerCache(tuple(islice(rest, len(b.owned))), b.ring) for b in self.blocks)

    @staticmethod
    def flatten(caches: Sequence[LayerCache]) -> tuple[jax.Array, ...]:
        return tuple(array for cache in caches for array in cache.arrays)


def plan_cache(model: AbstractModel, *, rows: int, max_len: int, chunk: int, dtype, platform: str = "cpu") -> CachePlan:
    """Plan the cache of `rows` sequences of up to `max_len` tokens, prefilled in chunks of at most `chunk`.

    dtype: of keys and values, a float type or a name of KV_CACHE_DTYPES; states keep theirs. Raises ConfigurationError
    for a name of KV_CACHE_DTYPES if no layer has keys and values, or if a "tpu" needs other cells (see `_attention`).
    """
    scaled = dtype in KV_CACHE_DTYPES
    if scaled and all(isinstance(layer.attention, Recurrent) for layer in model.config.layers):
        raise ConfigurationError(
            f"kv_cache_dtype {dtype!r} is of keys and values, and no layer of this model keeps any: leave it out"
        )
    dtype, blocks = KV_CACHE_DTYPES[dtype] if scaled else np.dtype(dtype), []
    for layers in model.blocks():
        spec, stack = model.config.layers[layers[0]].attention, (len(layers),) if len(layers) > 1 else ()
        if isinstance(spec, Recurrent):
            blocks.append(_states(model, spec, (*stack, rows)))
            continue
        # A ring holds what a chunk's first query sees and the chunk itself.
        ring = spec.reach is not None and spec.reach + chunk < max_len
        capacity = spec.reach + chunk if ring else max_len
        shapes = _attention(model, spec, capacity, platform, scaled=scaled)
        latent, shared = isinstance(spec, MlaSpec), spec.cache_of is not None
        blocks.append(BlockCache(tuple((*stack, rows, *x) for x in shapes), ring, dtype, scaled, latent, shared))
    return CachePlan(rows, max_len, tuple(blocks))


def _attention(
    model: AbstractModel, spec: AttentionSpec | MlaSpec, capacity: int, platform: str, *, scaled: bool
) -> list[tuple[int, ...]]:
    """The shapes [K, S, h] of a layer's arrays, without layers and rows, with room for `capacity` positions.

    On a "tpu" a cell is a multiple of 128 numbers, by which its memory is tiled in any case; for other sizes its
    compiler would choose another order of the dimensions, and copy the cache to it at every step. So if heads have
    another size, 64 above all, a value lies behind its key in one cell; and rotary keys of latents, half or a quarter
    of 128 numbers, are folded, so that nothing is padded. A device's slots are such multiples too, as kernels read
    whole tiles.
    """
    latent, sizes, lanes = isinstance(spec, MlaSpec), spec.cache_sizes, 128 if platform == "tpu" else 1
    folds = [lanes // size if latent and size in (lanes // 2, lanes // 4) else 1 for size in sizes]
    if platform == "tpu" and scaled and (latent or any(size % lanes for size in sizes)):
        what = "latent attention" if latent else f"attention with heads of {spec.head_dim}"
        raise ConfigurationError(
            f"{what} keeps its cache in the model's dtype on TPUs, whose compiler would copy one of int8 or fp8 at "
            "every layer: leave kv_cache_dtype out"
        )
    if not latent and any(size % lanes for size in sizes):
        sizes, folds = (sum(sizes),), [1]
    slots, heads = model.layout.positions(capacity, lanes * max(folds)), model.layout.cache_heads(spec)
    pairs = zip(sizes, folds, strict=True)
    return [(heads, slots // fold, -(-size * fold // lanes) * lanes) for size, fold in pairs]


def _states(model: AbstractModel, spec: Recurrent, rows: tuple[int, ...]) -> BlockState:
    """rows: the leading dimensions, [N] or [L, N]."""
    states, names = spec.states(model.layout.heads(spec)), (axes.LAYERS, axes.PAGES)[-len(rows) :]
    wide = np.dtype(np.float32)
    arrays = (CacheArray((*rows, *x.shape), (*names, *x.axes), wide if x.wide else model.dtype) for x in states)
    return BlockState(tuple(arrays), tuple(x.name for x in states))
