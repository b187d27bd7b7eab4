"""Writes new cells to a paged cache from within a TPU kernel that has the cells' blocks on chip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import div, rem
from inferlib.pallas_kernels.block_stream_tpu import BlockStream
from inferlib.pallas_kernels.row_stream_tpu import RowStream

LANES, SUBLANES = 128, 8


def tile_of(ndim: int, dtype) -> int:
    """Positions of a tile of memory, for cells [L, N, K, S, h] (ndim 5) or scales [L, N, K, S] (ndim 4)."""
    return LANES if ndim == 4 else SUBLANES * 4 // jnp.dtype(dtype).itemsize


def tiles_of(cells: int, tile: int) -> int:
    """The most tiles that `cells` consecutive positions touch."""
    return (cells + tile - 2) // tile + 1


def writer_scratch(cache: Sequence[jax.Array], buffers: int, cells: int, together: int = 1) -> dict[str, Any]:
    """A `CellWriter`'s scratch, for a cache's arrays [L, N, K, S, ...], `cells` new cells of a row, and `together`
    buffers that are waited for together."""
    tiles = [tile_of(x.ndim, x.dtype) for x in cache]
    staged = tuple(
        pltpu.VMEM((buffers, tiles_of(cells, tile), x.shape[2], tile, *x.shape[4:]), x.dtype)
        for x, tile in zip(cache, tiles, strict=True)
    )
    semaphores = pltpu.SemaphoreType.DMA((len(cache), buffers // together))
    return {"staged": staged, "pending": pltpu.SMEM((buffers,), jnp.int32), "write_semaphores": semaphores}


def quantised(rows: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Quantise float32 rows [R, h] to int8 or fp8, as `inferlib.ops.quantized.quantize` does.

    Returns the rounded values, still in float32, and the scales [R, 1].
    """
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float((jnp.iinfo if whole else jnp.finfo)(dtype).max)
    scales = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / most
    scales = jnp.where(scales == 0, 1.0, scales)
    values = jnp.clip(rows / scales, -most, most)
    return jnp.round(values) if whole else values, scales


@dataclass
class CellWriter:
    """Puts the last `new` cells of rows into the blocks of a stream, and from there into the cache.

    Memory is written tile by tile; the other positions of a cell's tile have just been read with its block. Cells lie
    behind the `width` queries of a row, [K, width + new * n, h]: keys, then values if they are apart. For a quantised
    cache (`scaled`) the writer rounds them. written [B]: how many of a row's new cells are put, the last ones, as the
    others are in the cache already; None: all. staged: for each array of the stream, the tiles on their way from a
    buffer to the cache, [n, tiles, K, tile, ...], because the block itself changes once it is used. semaphores
    [arrays, n / `stream.together`]. pending [n]: where a buffer's cells on their way to the cache begin in its block;
    the size of a block if there are none.
    """

    stream: BlockStream | RowStream
    new: int
    width: int
    scaled: bool
    written: Any
    staged: Sequence[Any]
    semaphores: Any
    pending: Any

    def begin(self) -> None:
        for buffer in range(self.pending.shape[0]):
            self.pending[buffer] = self.stream.pages.block

    def put(self, buffer: jax.Array) -> None:
        """Put the new cells into the block in a buffer, which has arrived, and start to copy their tiles to the cache.

        The code of the first tile has no branches, so that the compiler can mix it with other instructions. In a block
        without new cells it writes the old contents again.
        """
        stream, heads, block = self.stream, self.stream.query_buffers.shape[1], self.stream.pages.block
        arrays = len(self.staged) // (1 + self.scaled)
        row, holds, begin, first = self._new_cells(buffer)
        first = jnp.where(holds, first, block)
        self.pending[buffer] = first
        targets: dict[tuple[int, int], tuple[Any, Any]] = {}  # of tiles in the cache, by their size and number
        cells = [self._cells(buffer, head, arrays) for head in range(heads)]

        def put_tile(n: int, j: int, start: jax.Array) -> None:
            block_copy, staged = stream.buffers[n], self.staged[n]
            tile = staged.shape[3]
            inside = [self._place(row, c, first - start) for c in range(self.new)]
            mine = slice(n % arrays * self.new, (n % arrays + 1) * self.new)
            for head in range(heads):
                cell = cells[head][n // arrays][mine]
                if n < arrays:
                    at = buffer, head, pl.ds(start, tile)
                    merged = _merged(block_copy[at], cell, inside)
                    staged[buffer, j, head] = merged
                else:
                    at = buffer, pl.ds(head, 1), pl.ds(start, tile)
                    merged, lane = block_copy[at], lax.broadcasted_iota(jnp.int32, (1, tile), 1)
                    for x, place in zip(cell, inside, strict=True):
                        merged = jnp.where(lane == place, x, merged)
                    staged[buffer, j, pl.ds(head, 1)] = merged
                block_copy[at] = merged
            # Found once for arrays with the same tiles, and before the condition: under it, every scalar that is read
            # costs instructions to choose its address.
            target = targets.get((tile, j)) or self._place_in_cache(row, begin + start)
            if j == 0:  # what is found in the branch of another tile is not known outside it
                targets[tile, j] = target
            pl.when(holds)(self._copy(n, j, buffer, *target).start)

        self._each_tile(first, put_tile)

    def end(self) -> None:
        """Wait until all cells are in the cache."""
        for buffer in range(0, self.pending.shape[0], self.stream.together):
            self.wait(buffer)

    def has(self, buffer: jax.Array) -> jax.Array:
        """True if the block in a buffer has new cells."""
        return self._new_cells(buffer)[1]

    def wait(self, buffer: jax.Array | int) -> None:
        """Wait until the tiles that were last sent from a buffer are in the cache, and those from the other buffers of
        its group, which it is the first of."""
        none, buffers = self.stream.pages.block, [buffer + i for i in range(self.stream.together)]
        firsts = [self.pending[at] for at in buffers]

        def wait_for(n: int, tiles: Any) -> None:
            """Only the number of bytes matters in the copy that a wait is given."""
            pltpu.make_async_copy(tiles, tiles, self._semaphore(n, buffer)).wait()

        def wait_for_first_tiles(first: Any, count: Any) -> None:
            for n, staged in enumerate(self.staged):
                wait_for(n, staged.at[pl.ds(first, count), 0])

        def wait_for_other_tile(n: int, j: int, _: jax.Array) -> None:
            wait_for(n, self.staged[n].at[0, j])

        sent: Any = sum((first < none).astype(jnp.int32) for first in firsts)
        self.stream.at_once(sent, wait_for_first_tiles)
        for at, first in zip(buffers, firsts, strict=True):
            if any(staged.shape[1] > 1 for staged in self.staged):
                pl.when(first < none)(functools.partial(self._each_tile, first, wait_for_other_tile, 1))
            self.pending[at] = none

    def _place(self, row: jax.Array, cell: int, first: jax.Array) -> jax.Array:
        """The place of a row's new cell in a tile in which its first one is at `first`; -1 if it is not written."""
        if self.written is None or self.new == 1:  # `has` decides
            return first + cell
        return jnp.where(cell < self.new - self.written[row], -1, first + cell)

    def _new_cells(self, buffer: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The row of a buffer, whether its block has new cells, the block's first position, and the place in the block
        at which they begin, which is outside it if they are elsewhere. The compiler reads scalars as often as it is
        told to, so this does once."""
        row, start = (owner[buffer] for owner in self.stream.owners)
        first = self.stream.length(row) - self.new - start
        has = (self.stream.counts[buffer] > 0) & (first < self.stream.pages.block)
        return row, has if self.written is None else has & (self.written[row] > 0), start, first

    def _semaphore(self, n: int, buffer: jax.Array | int) -> Any:
        return self.semaphores.at[n, div(buffer, self.stream.together)]

    def _each_tile(self, first: jax.Array, act: Callable, skipped: int = 0) -> None:
        """Call act(n, j, start) for array n's j-th tile with new cells, which begins at `start` in the block, from the
        `skipped`-th on."""
        for n, staged in enumerate(self.staged):
            tile, begin = staged.shape[3], jnp.clip(first, 0, self.stream.pages.block - 1)
            for j in range(skipped, staged.shape[1]):
                start = pl.multiple_of((div(begin, tile) + j) * tile, tile)
                if j == 0:
                    act(n, j, start)
                else:
                    inside = (start < first + self.new) & (start < self.stream.pages.block)
                    pl.when(inside)(lambda n=n, j=j, start=start: act(n, j, start))

    def _cells(self, buffer: jax.Array, head: int, arrays: int) -> tuple[list[jax.Array], ...]:
        """The cells of a head, [1, h] each, and if the cache is quantised their scales, [1, 1] each."""
        rows = self.stream.query_buffers[buffer, head].astype(jnp.float32)
        each = [slice(self.width + c, self.width + c + 1) for c in range(arrays * self.new)]
        if not self.scaled:
            return ([rows[at] for at in each],)
        values, scales = quantised(rows, self.staged[0].dtype)
        return [values[at] for at in each], [scales[at] for at in each]

    def _place_in_cache(self, row: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page of a row's position and its slot there."""
        stream, pages, at = self.stream, self.stream.pages, position
        if pages.ring:
            at = stream.origin[row] + at - pages.first(stream.length(row))
            at = jnp.where(at >= pages.capacity, at - pages.capacity, at)
        if pages.columns is None:
            return row, at
        column = jnp.minimum(div(at, pages.slots), pages.columns - 1)  # of a block without new cells, too
        return stream.table[row * pages.columns + column], rem(at, pages.slots)

    def _copy(self, n: int, j: int, buffer: jax.Array, page: jax.Array, slot: jax.Array):
        """The copy of array n's j-th staged tile to a page of the cache, from a slot on."""
        tile = self.staged[n].shape[3]
        slots = pl.ds(pl.multiple_of(slot, tile), tile)
        target = self.stream.arrays[n].at[self.stream.layer[0], page, :, slots]
        return pltpu.make_async_copy(self.staged[n].at[buffer, j], target, self._semaphore(n, buffer))


def _merged(tile: jax.Array, cells: Sequence[jax.Array], places: Sequence[jax.Array]) -> jax.Array:
    """tile [t, h] with float32 cells [1, h] put at places, in words of 32 bits; places outside the tile are skipped."""
    words = pltpu.bitcast(tile, jnp.int32)
    packed = tile.shape[0] // words.shape[0]
    bits = 32 // packed
    row = lax.broadcasted_iota(jnp.int32, words.shape, 0)
    for cell, place in zip(cells, places, strict=True):
        new = pltpu.bitcast(jnp.broadcast_to(cell, tile.shape).astype(tile.dtype), jnp.int32)
        mask = jnp.int32(-1) if packed == 1 else jnp.int32((1 << bits) - 1) << (place & (packed - 1)) * bits
        mask = jnp.where(row == place >> packed.bit_length() - 1, mask, 0)
        words = (words & ~mask) | (new & mask)
    return pltpu.bitcast(words, tile.dtype)
