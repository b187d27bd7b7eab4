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
    and first position of it, apart, as an index of two numbers costs the scalar unit several instructions; semaphores
    [1 + arrays, n]. in_tiles: copy tile by tile, as Pallas' own interpreter knows no copies whose size it learns at run
    time.
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
    semaphores: Any
    in_tiles: bool

    @property
    def groups(self) -> int:
        return self.lengths.shape[0] // self.together

    @property
    def places(self) -> int:
        """Groups that are on chip."""
        return self.counts.shape[0] // self.together

    def length(self, row: jax.Array) -> jax.Array:
        return self.lengths[row] if self.pages.ring else jnp.minimum(self.lengths[row], self.pages.capacity)

    def first_buffer(self, group: jax.Array) -> jax.Array:
        """The buffer of a group's first row; those of the others follow."""
        return pl.multiple_of(rem(group, self.places) * self.together, self.together)

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
        left, buffer = group < self.groups, self.first_buffer(group)
        first = jnp.minimum(group, self.groups - 1) * self.together
        for i in range(self.together):
            self._start_row(first + i, buffer + i, left)
        pl.when(left)(self._queries(first, buffer).start)

    def wait(self, group: jax.Array) -> None:
        """Wait for the rows of a group."""
        buffer = self.first_buffer(group)
        self._queries(group * self.together, buffer).wait()
        for i in range(self.together):
            self._wait_for_row(buffer + i)

    def _queries(self, row: jax.Array, buffer: jax.Array):
        """The copy of the queries of a group that begins with this row."""
        source, target = (
            x.at[pl.ds(at, self.together)] for x, at in ((self.queries, row), (self.query_buffers, buffer))
        )
        return pltpu.make_async_copy(source, target, self.semaphores.at[0, buffer])

    def _start_row(self, row: jax.Array, buffer: jax.Array, there: jax.Array) -> None:
        pages, unit = self.pages, self.pages.unit
        length = self.length(row)
        start = pages.first(length)
        count = jnp.where(there, div(length - start + unit - 1, unit), 0)
        self.counts[buffer], self.owners[0][buffer], self.owners[1][buffer] = count, row, start
        slot = self.origin[row] if pages.ring else start
        left, done, at = count, 0, rem(slot, pages.slots) if pages.columns is not None else slot
        column = div(slot, pages.slots)
        for n in range(self._runs):
            tiles = jnp.minimum(left, div(pages.slots - at, unit))
            page = row if pages.columns is None else self.table[row * pages.columns + column]
            self._start_run((page, at), (buffer, done), tiles)
            left, done, at = left - tiles, done + tiles, 0
            if pages.columns is not None and n + 1 < self._runs:
                column = jnp.where(column == pages.columns - 1, 0, column + 1)

    @property
    def _runs(self) -> int:
        """The most pages that a row's positions lie in."""
        pages = self.pages
        if pages.seen is None:
            return pages.columns or 1
        return min(pl.cdiv(pages.block - pages.unit, pages.slots) + 1, (pages.columns or 1) + pages.ring)

    def _start_run(self, source: tuple[Any, Any], target: tuple[Any, Any], tiles: jax.Array) -> None:
        """Start to copy so many tiles, from a page and a slot of it to a buffer from its `done`-th tile on."""
        (page, slot), (buffer, done) = source, target

        def copy(first: Any, count: Any) -> None:
            for n, (array, copies) in enumerate(zip(self.arrays, self.buffers, strict=True)):
                here = array.at[self.layer[0], page, :, self._positions(first, count, slot)]
                there = copies.at[buffer, :, self._positions(done + first, count)]
                pltpu.make_async_copy(here, there, self.semaphores.at[1 + n, buffer]).start()

        self._of_tiles(tiles, copy)

    def _wait_for_row(self, buffer: jax.Array) -> None:
        def wait(first: Any, count: Any) -> None:
            """Only the number of bytes matters in the copy that a wait is given."""
            for n, copies in enumerate(self.buffers):
                part = copies.at[buffer, :, self._positions(first, count)]
                pltpu.make_async_copy(part, part, self.semaphores.at[1 + n, buffer]).wait()

        self._of_tiles(self.counts[buffer], wait)

    def _of_tiles(self, tiles: jax.Array, act: Callable[[Any, Any], None]) -> None:
        """Call act(first, count) for so many tiles."""
        if self.in_tiles:
            lax.fori_loop(0, tiles, lambda i, _: act(i, 1), None)
        else:
            pl.when(tiles > 0)(lambda: act(0, tiles))

    def _positions(self, first: Any, count: Any, behind: Any = 0):
        unit = self.pages.unit
        some = count * unit if isinstance(count, int) else pl.multiple_of(count * unit, unit)
        return pl.ds(pl.multiple_of(behind + first * unit, unit), some)
