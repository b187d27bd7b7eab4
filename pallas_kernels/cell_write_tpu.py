"""Writes new cells to a paged cache from within a TPU kernel that has the cells' blocks on chip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import Shaped
from inferlib.pallas_kernels.arithmetic_tpu import div, rem, seldom
from inferlib.pallas_kernels.block_stream_tpu import BlockStream
from inferlib.pallas_kernels.row_stream_tpu import WRITTEN_ALIKE, RowStream

LANES, SUBLANES = 128, 8
ABSENT = -(1 << 20)  # the place of cells that are not in a block


def tile_of(ndim: int, dtype) -> int:
    """Positions of a tile of memory, for cells [L, N, K, S, h] (ndim 5) or scales [L, N, K, S] (ndim 4)."""
    return LANES if ndim == 4 else SUBLANES * 4 // jnp.dtype(dtype).itemsize


def tiles_of(cells: int, tile: int) -> int:
    """The most tiles that `cells` consecutive positions touch."""
    return (cells + tile - 2) // tile + 1


def writer_scratch(cache: Sequence[Shaped], buffers: int, cells: int, together: int = 1) -> dict[str, Any]:
    """A `CellWriter`'s scratch, for a cache's arrays [L, N, K, S, ...], `cells` new cells of a row, and `together`
    buffers that are waited for together."""
    tiles = [tile_of(x.ndim, x.dtype) for x in cache]
    staged = tuple(
        pltpu.VMEM((buffers, tiles_of(cells, tile), x.shape[2], tile, *x.shape[4:]), x.dtype)
        for x, tile in zip(cache, tiles, strict=True)
    )
    groups = buffers // together
    return {
        "staged": staged,
        "pending": (pltpu.SMEM((groups,), jnp.int32),) * (1 + len(cache)),
        "write_semaphores": pltpu.SemaphoreType.DMA((len(cache), groups)),
    }


class CellPlace(NamedTuple):
    """Where the new cells of a row are. row: its number. there: whether its block has any that are written. slot: the
    slot of the row that the block begins in; of a ring it may lie behind the end. first: the place in the block at
    which they begin, less than the block's size; `ABSENT` if they are not there. last: that of the row's last position,
    if it is known."""

    row: jax.Array
    there: jax.Array
    slot: jax.Array | int
    first: jax.Array
    last: jax.Array | None = None


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
    buffer to the cache, [n, tiles, K, tile, ...], because the block itself changes once it is used. Buffers come in
    groups of `stream.together`, and a buffer is the `number`-th of a group. semaphores [arrays, groups]. pending, each
    [groups]: how many tiles of a group are on their way to the cache: blocks' first ones, of every array, and then of
    each array all others. For rows of a `RowStream`, trimmed: the arrays in whose blocks zeros follow a row's last
    position in its tile; later: first tiles are copied to the cache by `send`.
    """

    stream: BlockStream | RowStream
    new: int
    width: int
    scaled: bool
    written: Any
    staged: Sequence[Any]
    semaphores: Any
    pending: Sequence[Any]
    trimmed: Sequence[int] = ()
    later: bool = False

    def begin(self) -> None:
        for pending in self.pending:
            for group in range(pending.shape[0]):
                pending[group] = 0

    def put(self, group: jax.Array, number: int, queries: Any, blocks: Sequence[Any], at: CellPlace) -> jax.Array:
        """Put the new cells behind a row's queries into the blocks of all arrays, each [K, T, ...], which have arrived
        in a buffer, and start to copy their tiles to the cache. Returns how many first tiles these are, for `sent`.

        The code of the first tile has no branches, so that the compiler can mix it with other instructions. In a block
        without new cells it writes the old contents again.
        """
        stream, arrays = self.stream, len(self.staged) // (1 + self.scaled)
        heads, buffer = queries.shape[0], group * stream.together + number
        targets: dict[tuple[int, int], tuple[Any, Any]] = {}  # of tiles in the cache, by their size and number
        cells = [self._cells(queries[head].astype(jnp.float32), arrays) for head in range(heads)]

        def put_tile(n: int, j: int, start: jax.Array) -> None:
            block, staged = blocks[n], self.staged[n]
            tile = staged.shape[3]
            inside = [self._place(at.row, c, at.first - start) for c in range(self.new)]
            mine = slice(n % arrays * self.new, (n % arrays + 1) * self.new)
            for head in range(heads):
                cell = cells[head][n // arrays][mine]
                if n < arrays:
                    here = head, pl.ds(start, tile)
                    merged = _merged(block[here], cell, inside)
                    staged[buffer, j, head] = merged
                    if n in self.trimmed and at.last is not None:
                        merged = until(merged, at.last - start)
                else:
                    here = pl.ds(head, 1), pl.ds(start, tile)
                    merged, lane = block[here], lax.broadcasted_iota(jnp.int32, (1, tile), 1)
                    for x, place in zip(cell, inside, strict=True):
                        merged = jnp.where(lane == place, x, merged)
                    staged[buffer, j, pl.ds(head, 1)] = merged
                block[here] = merged
            if j == 0 and self.later:
                return
            # Found once for arrays with the same tiles, and before the condition: under it, every scalar that is read
            # costs instructions to choose its address.
            target = targets.get((tile, j)) or self._place_in_cache(at, start)
            if j == 0:  # what is found in the branch of another tile is not known outside it
                targets[tile, j] = target
            else:
                self.pending[1 + n][group] += at.there.astype(jnp.int32)
            pl.when(at.there)(self._copy(n, j, group, buffer, *target).start)

        self._each_tile(at, put_tile)
        return at.there.astype(jnp.int32)

    def sent(self, group: jax.Array, count: jax.Array) -> None:
        """Tell the writer how many first tiles of a group have been put."""
        self.pending[0][group] = count

    def send(self, group: jax.Array, place: jax.Array) -> None:
        """Start to copy the first tiles of a group of a `RowStream`, at a place on chip, if they are copied `later`: as
        one if they go to the same slots, each in a page of its own."""
        stream, together = self.stream, self.stream.together
        assert isinstance(stream, RowStream)

        def target(row: jax.Array, n: int) -> tuple[Any, tuple[Any, Any]]:
            at = self.of_row(row)
            return at.there, self._place_in_cache(at, self._first_tile(at, self.staged[n].shape[3]))

        def send_each() -> None:
            for number in range(together):
                for n in range(len(self.staged)):
                    there, to = target(stream.first_row(group) + number, n)
                    pl.when(there)(self._copy(n, 0, place, place * together + number, *to).start)

        def send_alike() -> None:
            for n, staged in enumerate(self.staged):
                _, (row, slot) = target(stream.first_row(group), n)
                tiles = staged.at[pl.ds(place * together, together), 0]
                self._to_cache(n, place, tiles, (pl.ds(row, together), slot)).start()

        if self.later:
            alike = stream.has(group, WRITTEN_ALIKE)
            seldom(alike, send_alike)
            seldom(~alike, send_each)

    def end(self) -> None:
        """Wait until all cells are in the cache."""
        for group in range(self.pending[0].shape[0]):
            self.wait(group)

    def of_buffer(self, buffer: jax.Array) -> CellPlace:
        """The new cells of the block in a buffer of a `BlockStream`. The compiler reads scalars as often as it is told
        to, so this does once."""
        stream, pages = self.stream, self.stream.pages
        assert isinstance(stream, BlockStream)
        row, begin = (owner[buffer] for owner in stream.owners)
        length, slot = stream.length(row), begin
        if pages.ring:
            slot = stream.origin[row] + begin - pages.first(length)
        first = length - self.new - begin
        there = (stream.counts[buffer] > 0) & (first < pages.block)
        return self._unless_written(CellPlace(row, there, slot, jnp.where(there, first, ABSENT)))

    def of_row(self, row: jax.Array) -> CellPlace:
        """The new cells of a row of a `RowStream`."""
        assert isinstance(self.stream, RowStream)
        live, origin = self.stream.live[row], self.stream.origin
        slot = 0 if origin is None else origin[row]
        return self._unless_written(CellPlace(row, live > 0, slot, live - self.new, live - 1))

    def _unless_written(self, at: CellPlace) -> CellPlace:
        if self.written is None:
            return at
        there = at.there & (self.written[at.row] > 0)
        return at._replace(there=there, first=jnp.where(there, at.first, ABSENT))

    def wait(self, group: jax.Array | int) -> None:
        """Wait until the tiles that were last sent from a group are in the cache."""

        def wait_for(n: int, tiles: Any) -> None:
            """Only the number of bytes matters in the copy that a wait is given."""
            pltpu.make_async_copy(tiles, tiles, self.semaphores.at[n, group]).wait()

        def wait_for_first_tiles(first: Any, count: Any) -> None:
            for n, staged in enumerate(self.staged):
                wait_for(n, staged.at[pl.ds(first, count), 0])

        self.stream.at_once(self.pending[0][group], wait_for_first_tiles)
        self.pending[0][group] = 0
        for n, (staged, pending) in enumerate(zip(self.staged, self.pending[1:], strict=True)):
            if staged.shape[1] > 1:
                lax.fori_loop(0, pending[group], lambda _, c, n=n: wait_for(n, self.staged[n].at[0, 0]), None)
                pending[group] = 0

    def _place(self, row: jax.Array, cell: int, first: jax.Array) -> jax.Array:
        """The place of a row's new cell in a tile in which its first one is at `first`; -1 if it is not written."""
        if self.written is None or self.new == 1:  # `CellPlace.there` decides
            return first + cell
        return jnp.where(cell < self.new - self.written[row], -1, first + cell)

    def _first_tile(self, at: CellPlace, tile: int) -> jax.Array:
        """Where the first tile with new cells begins in the block, or with what would be one if any were written."""
        first = at.first if at.last is None else at.last - (self.new - 1)
        return pl.multiple_of(jnp.maximum(first, 0) & -tile, tile)

    def _each_tile(self, at: CellPlace, act: Callable) -> None:
        """Call act(n, j, start) for array n's j-th tile with new cells, which begins at `start` in the block."""
        for n, staged in enumerate(self.staged):
            tile = staged.shape[3]
            for j in range(staged.shape[1]):
                start = pl.multiple_of(self._first_tile(at, tile) + j * tile, tile)
                if j == 0:
                    act(n, j, start)
                else:
                    end = at.first + self.new if at.last is None else at.last + 1
                    inside = (start < end) & (start < self.stream.pages.block)
                    pl.when(inside)(lambda n=n, j=j, start=start: act(n, j, start))

    def _cells(self, rows: jax.Array, arrays: int) -> tuple[list[jax.Array], ...]:
        """The cells of a head behind its queries, [1, h] each, and if the cache is quantised their scales, [1, 1]."""
        each = [slice(self.width + c, self.width + c + 1) for c in range(arrays * self.new)]
        if not self.scaled:
            return ([rows[at] for at in each],)
        values, scales = quantised(rows, self.staged[0].dtype)
        return [values[at] for at in each], [scales[at] for at in each]

    def _place_in_cache(self, cells: CellPlace, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page and the slot there of what lies at `start` in a block."""
        stream, pages, row, at = self.stream, self.stream.pages, cells.row, cells.slot + start
        if pages.ring:
            at = jnp.where(at >= pages.capacity, at - pages.capacity, at)
        if pages.columns is None:
            return row, at
        column = jnp.minimum(div(at, pages.slots), pages.columns - 1)  # of a block without new cells, too
        return stream.table[row * pages.columns + column], rem(at, pages.slots)

    def _copy(self, n: int, j: int, group: jax.Array, buffer: jax.Array, page: jax.Array, slot: jax.Array):
        """The copy of array n's j-th staged tile to a page of the cache, from a slot on."""
        return self._to_cache(n, group, self.staged[n].at[buffer, j], (page, slot))

    def _to_cache(self, n: int, group: jax.Array, tiles: Any, place: tuple[Any, jax.Array]):
        """The copy of a tile of array n, or of several, to a page of the cache, or to several, from a slot on."""
        (page, slot), tile = place, self.staged[n].shape[3]
        target = self.stream.arrays[n].at[self.stream.layer[0], page, :, pl.ds(pl.multiple_of(slot, tile), tile)]
        return pltpu.make_async_copy(tiles, target, self.semaphores.at[n, group])


def _merged(tile: jax.Array, cells: Sequence[jax.Array], places: Sequence[jax.Array]) -> jax.Array:
    """tile [t, h] with float32 cells [1, h] put at places, in words of 32 bits; places outside the tile are skipped."""
    words = pltpu.bitcast(tile, jnp.int32)
    packed = tile.shape[0] // words.shape[0]
    for cell, place in zip(cells, places, strict=True):
        new = pltpu.bitcast(jnp.broadcast_to(cell, tile.shape).astype(tile.dtype), jnp.int32)
        mask = fields(words.shape, packed, lambda position, place=place: position == place)
        words = (words & ~mask) | (new & mask)
    return pltpu.bitcast(words, tile.dtype)


def until(tile: jax.Array, last: jax.Array) -> jax.Array:
    """tile [t, h] with zeros behind position `last`."""
    words = pltpu.bitcast(tile, jnp.int32)
    mask = fields(words.shape, tile.shape[0] // words.shape[0], lambda position: position <= last)
    return pltpu.bitcast(words & mask, tile.dtype)


def fields(shape: tuple[int, ...], packed: int, chosen: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A mask of words, `packed` positions each, that says which of the positions are chosen."""
    position, bits = packed * lax.broadcasted_iota(jnp.int32, shape, 0), 32 // packed
    mask = jnp.zeros(shape, jnp.int32)
    for n in range(packed):
        field = ((1 << bits) - 1) << n * bits
        field = jnp.int32(field - (1 << 32) if field >> 31 else field)
        mask |= jnp.where(chosen(position + n), field, 0)
    return mask
