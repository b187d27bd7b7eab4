"""Short rows of a paged cache, copied to a TPU's on-chip memory whole, some rows at a time, ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import div, rem
from inferlib.pallas_kernels.block_stream_tpu import Pages


@dataclass
class RowStream:
    """Copies of groups of `together` rows, by a kernel that has a grid step for every group.

    A row is one block of at most T = `pages.block` positions, and a copy has as many tiles of memory as are live.
    lengths [B], layer [1]; of a ring `origin` [B], the slot that a row's first position is in; table [B * M]: scalars.
    queries [B, ...] and arrays, each [L, N, K, S, ...], in HBM; on chip `query_buffers` [n, ...] and `buffers`, each
    [n, K, T, ...], for n rows: a power of two groups. counts [n]: tiles of the row in a buffer; owners, each [n]: row
    and first position of it, apart, as an index of two numbers costs the scalar unit several instructions. sums, each
    [groups on chip]: tiles of a group's rows, as whole blocks and tiles beyond them; semaphores [1 + arrays, groups on
    chip], each for an array's copies of a group, so that waits need not go row by row. in_tiles: copy tile by tile, as
    Pallas' own interpreter knows no copies whose size it learns at run time.
    """

    pages: Pages
    together: int
    lengths: Any
    layer: Any
    origin: Any
    table: Any
    queries: Any
    arrays: Sequence[Any]
    query_buffers: Any
    buffers: Sequence[Any]
    counts: Any
    owners: Sequence[Any]
    sums: Sequence[Any]
    semaphores: Any
    in_tiles: bool

    @property
    def groups(self) -> int:
        return self.lengths.shape[0] // self.together

    @property
    def places(self) -> int:
        """Groups that are on chip."""
        return self.counts.shape[0] // self.together

    @property
    def most(self) -> int:
        """Tiles of a block."""
        return self.pages.block // self.pages.unit

    def length(self, row: jax.Array) -> jax.Array:
        return self.lengths[row] if self.pages.ring else jnp.minimum(self.lengths[row], self.pages.capacity)

    def first_buffer(self, group: jax.Array) -> jax.Array:
        """The buffer of a group's first row; those of the others follow."""
        return pl.multiple_of(self.place(group) * self.together, self.together)

    def place(self, group: jax.Array) -> jax.Array:
        """The place of a group on chip."""
        return rem(group, self.places)

    def begin(self) -> None:
        """Start the copies of as many groups as there are places, but one."""
        lax.fori_loop(0, self.places - 1, lambda group, _: self.start(group), None)

    def start_next(self, group: jax.Array) -> None:
        """Start the copies to the place of the group before this one, which has been used."""
        self.start(group + self.places - 1)

    def start(self, group: jax.Array) -> None:
        """Start the copies of a group, if there is one.

        It avoids branches, so that the compiler can mix it with vector instructions.
        """
        left, place, buffer = group < self.groups, self.place(group), self.first_buffer(group)
        first = jnp.minimum(group, self.groups - 1) * self.together
        blocks: Any = 0
        tiles: Any = 0
        for i in range(self.together):
            tiles += self._start_row(first + i, place, buffer + i, left)
            full = tiles >= self.most  # a sum and not a quotient: the scalar unit is slow at divisions
            blocks, tiles = blocks + full.astype(jnp.int32), jnp.where(full, tiles - self.most, tiles)
        self.sums[0][place], self.sums[1][place] = blocks, tiles
        pl.when(left)(self._queries(first, place).start)

    def wait(self, group: jax.Array) -> None:
        """Wait for the rows of a group, of each array for all together.

        Only the number of bytes matters in the copies that waits are given.
        """
        place = self.place(group)
        self._queries(group * self.together, place).wait()

        def wait_for(part: Callable[[Any], Any]) -> None:
            for n, copies in enumerate(self.buffers):
                these = part(copies)
                pltpu.make_async_copy(these, these, self.semaphores.at[1 + n, place]).wait()

        def blocks(first: Any, count: Any) -> None:
            wait_for(lambda copies: copies.at[pl.ds(first, count)])

        def tiles(first: Any, count: Any) -> None:
            wait_for(lambda copies: copies.at[0, :, self._positions(first, count)])

        self.at_once(self.sums[0][place], blocks)
        self.at_once(self.sums[1][place], tiles)

    def at_once(self, count: jax.Array, act: Callable[[Any, Any], None]) -> None:
        """Call act(first, number) for `count` tiles or blocks, of all at once if the interpreter knows how."""
        if self.in_tiles:
            lax.fori_loop(0, count, lambda i, _: act(i, 1), None)
        else:
            pl.when(count > 0)(lambda: act(0, count))

    def _queries(self, row: jax.Array, place: jax.Array):
        """The copy of the queries of a group that begins with this row."""
        source = self.queries.at[pl.ds(row, self.together)]
        first = pl.multiple_of(place * self.together, self.together)
        target = self.query_buffers.at[pl.ds(first, self.together)]
        return pltpu.make_async_copy(source, target, self.semaphores.at[0, place])

    def _start_row(self, row: jax.Array, place: jax.Array, buffer: jax.Array, there: jax.Array) -> jax.Array:
        """Start the copies of a row, none if it is not there, and return how many tiles they have."""
        pages, unit = self.pages, self.pages.unit
        length = self.length(row)
        start = pages.first(length)
        count = jnp.where(there, div(length - start + unit - 1, unit), 0)
        self.counts[buffer], self.owners[0][buffer], self.owners[1][buffer] = count, row, start
        slot = self.origin[row] if pages.ring else start
        slots = pages.slots // unit  # in tiles
        at = rem(slot, pages.slots) if pages.columns is not None else slot
        column, room = div(slot, pages.slots), div(pages.slots - at, unit)
        for n in range(self._runs):
            # Not a running sum, as places that are known beforehand cost the scalar unit nothing.
            done = room + (n - 1) * slots if n else 0
            tiles = jnp.maximum(count - done, 0) if n else count
            if n + 1 < self._runs:
                tiles = jnp.minimum(tiles, slots if n else room)
            page = row if pages.columns is None else self.table[row * pages.columns + column]
            self._start_run((page, 0 if n else at), (place, buffer, done), tiles)
            if pages.columns is not None and n + 1 < self._runs:
                column = column + 1
                if pages.seen is not None:  # the row may begin at any page
                    column = jnp.where(column == pages.columns, 0, column)
        return count

    @property
    def _runs(self) -> int:
        """The most pages that a row's positions lie in."""
        pages = self.pages
        if pages.seen is None:
            return pages.columns or 1
        return min(pl.cdiv(pages.block - pages.unit, pages.slots) + 1, (pages.columns or 1) + pages.ring)

    def _start_run(self, source: tuple[Any, Any], target: tuple[Any, Any, Any], tiles: jax.Array) -> None:
        """Start to copy so many tiles, from a page and a slot of it to a place's buffer from its `done`-th tile on."""
        (page, slot), (place, buffer, done) = source, target

        def copy(first: Any, count: Any) -> None:
            for n, (array, copies) in enumerate(zip(self.arrays, self.buffers, strict=True)):
                here = array.at[self.layer[0], page, :, self._positions(first, count, slot)]
                there = copies.at[buffer, :, self._positions(done + first, count)]
                pltpu.make_async_copy(here, there, self.semaphores.at[1 + n, place]).start()

        self.at_once(tiles, copy)

    def _positions(self, first: Any, count: Any, behind: Any = 0):
        unit = self.pages.unit
        some = count * unit if isinstance(count, int) else pl.multiple_of(count * unit, unit)
        return pl.ds(pl.multiple_of(behind + first * unit, unit), some)
