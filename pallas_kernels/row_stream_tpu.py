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

from inferlib.pallas_kernels.arithmetic_tpu import div, rem, seldom
from inferlib.pallas_kernels.block_stream_tpu import Pages

# Traits of groups of rows: rows are pages that are read in the same slots; the first tiles of their new cells lie in
# the same slots, too, and all are written.
ALIKE, WRITTEN_ALIKE = 1, 2


@dataclass
class RowStream:
    """Copies of groups of `together` rows, by a kernel that has a grid step for every group.

    A row is one block of at most T = `pages.block` positions, and a copy has as many tiles of memory as are live. live
    [B], how many positions are read of each row; layer [1]; origin [B], the slot of a row that the first of them is in,
    None if all are read; table [B * M]; traits [groups]: scalars, see `decode_call_tpu.Scalars`.
    arrays, each [L, N, K, S, ...], in HBM; on chip for each array `buffers`, as many refs as there are groups, which
    are a power of two: each is [`together`, K, T, ...] and has the same rows of all groups. They are apart so that the
    compiler knows that a copy to one changes no other, and starts it while rows in the others are computed.
    sums [groups on chip]: positions of a group's rows; semaphores [arrays, groups on chip], each for an array's copies
    of a group, so that waits need not go row by row. in_tiles: copy tile by tile, as Pallas' own interpreter knows no
    copies whose size it learns at run time.
    """

    pages: Pages
    together: int
    live: Any
    layer: Any
    origin: Any
    table: Any
    traits: Any
    arrays: Sequence[Any]
    buffers: Sequence[Sequence[Any]]
    sums: Any
    semaphores: Any
    in_tiles: bool

    @property
    def groups(self) -> int:
        return self.live.shape[0] // self.together

    @property
    def places(self) -> int:
        """Groups that are on chip."""
        return self.sums.shape[0]

    @property
    def ahead(self) -> int:
        """Groups that are copied ahead of use. More cover longer waits for memory, but take longer to start before the
        first group, which shows if there are not many."""
        return min(self.places - 1, max(self.groups // 2, 2))

    def first_row(self, group: jax.Array) -> jax.Array:
        """The first row of a group, or of the last one if there is no such group."""
        return jnp.minimum(group, self.groups - 1) * self.together

    def place(self, group: jax.Array) -> jax.Array:
        """The place of a group on chip."""
        return rem(group, self.places)

    def block(self, n: int, place: jax.Array, number: int) -> Any:
        """The block [K, T, ...] of array n, of the `number`-th row of the group at this place."""
        share = self.together // self.places
        return self.buffers[n][number // share].at[place * share + number % share]

    def has(self, group: jax.Array, trait: int) -> jax.Array:
        """Whether a group has a trait."""
        return self.traits[group] & trait != 0

    def begin(self) -> None:
        """Start the copies of the first groups."""

        def start(group: jax.Array, _: None) -> None:
            if self.pages.columns is not None:
                self._start_each(group)
            else:
                alike = self.has(group, ALIKE)
                seldom(alike, lambda: self._start_alike(group))
                seldom(~alike, lambda: self._start_each(group))

        lax.fori_loop(0, min(self.ahead, self.groups), start, None)

    def _start_each(self, group: jax.Array) -> None:
        """Start the copies of a group row by row."""
        self.started(group, sum(self.start_row(group, number) for number in range(self.together)))

    def _start_alike(self, group: jax.Array) -> None:
        """Start the copies of a group's rows, each in a page of its own, that are read in the same slots: one copy for
        all rows of a buffer."""
        pages, row = self.pages, self.first_row(group)
        count = (self.live[row] + pages.unit - 1) & -pages.unit
        slot = 0 if self.origin is None else self.origin[row]
        first = jnp.minimum(count, pages.slots - slot)
        self._start_rows(group, (slot, 0), first)
        if self._runs > 1:  # behind the end of a ring
            self._start_rows(group, (0, first), count - first)
        self.started(group, count * self.together)

    def _start_rows(self, group: jax.Array, places: tuple[Any, Any], positions: jax.Array) -> None:
        """Start to copy so many positions, if any, of all rows of a group, from a slot to a place in their blocks."""
        (slot, done), place, share = places, self.place(group), self.together // self.places

        def copy(first: Any, count: Any) -> None:
            for n, array in enumerate(self.arrays):
                for part, buffer in enumerate(self.buffers[n]):
                    rows = pl.ds(self.first_row(group) + part * share, share)
                    here = array.at[self.layer[0], rows, :, self._positions(slot + first, count)]
                    mine = pl.ds(pl.multiple_of(place * share, share), share)
                    there = buffer.at[mine, :, self._positions(done + first, count)]
                    pltpu.make_async_copy(here, there, self.semaphores.at[n, place]).start()

        self.at_once(positions, copy, self.pages.unit)

    def start_row(self, group: jax.Array, number: int) -> jax.Array:
        """Start the copies of the `number`-th row of a group, if there is one, and return how many positions they have.

        It avoids branches, so that the compiler can mix it with vector instructions.
        """
        pages, unit, first = self.pages, self.pages.unit, self.first_row(group)
        row = first + number
        count = jnp.where(group < self.groups, (self.live[row] + unit - 1) & -unit, 0)
        slot = 0 if self.origin is None else self.origin[row]
        at = rem(slot, pages.slots) if pages.columns is not None else slot
        column, room = div(slot, pages.slots), pages.slots - at
        for n in range(self._runs):
            # Not a running sum, as places that are known beforehand cost the scalar unit nothing.
            done = room + (n - 1) * pages.slots if n else 0
            positions = count - done
            if n + 1 < self._runs:
                positions = jnp.minimum(positions, pages.slots if n else room)
            page = (
                row if pages.columns is None else self.table[first * pages.columns + (number * pages.columns + column)]
            )
            self._start_run((page, 0 if n else at), (self.place(group), number, done), positions)
            if pages.columns is not None and n + 1 < self._runs:
                column = column + 1
                if pages.seen is not None:  # the row may begin at any page
                    column = jnp.where(column == pages.columns, 0, column)
        return count

    def started(self, group: jax.Array, positions: Any) -> None:
        """Tell the stream how many positions the copies of a group's rows have."""
        self.sums[self.place(group)] = positions

    def wait(self, group: jax.Array) -> None:
        """Wait for the rows of a group, of each array for all together.

        Only the number of bytes matters in the copies that waits are given.
        """
        place = self.place(group)

        def wait_for(part: Callable[[Any], Any]) -> None:
            for n, copies in enumerate(self.buffers):
                these = part(copies[0])
                pltpu.make_async_copy(these, these, self.semaphores.at[n, place]).wait()

        def blocks(first: Any, count: Any) -> None:
            wait_for(lambda copies: copies.at[pl.ds(first, count)])

        def positions(first: Any, count: Any) -> None:
            wait_for(lambda copies: copies.at[0, :, self._positions(first, count)])

        pages = self.pages
        whole = div(self.sums[place], pages.block)
        self.at_once(whole, blocks)
        self.at_once(self.sums[place] - whole * pages.block, positions, pages.unit)

    def at_once(self, count: jax.Array, act: Callable[[Any, Any], None], unit: int = 1) -> None:
        """Call act(first, number) for `count` things, a multiple of `unit`, if that is more than 0: for all at once if
        the interpreter knows how."""
        if self.in_tiles:
            lax.fori_loop(0, div(jnp.maximum(count, 0), unit), lambda i, _: act(i * unit, unit), None)
        else:
            pl.when(count > 0)(lambda: act(0, count))

    @property
    def _runs(self) -> int:
        """The most pages that a row's positions lie in."""
        pages = self.pages
        if pages.seen is None:
            return pages.columns or 1
        return min(pl.cdiv(pages.block - pages.unit, pages.slots) + 1, (pages.columns or 1) + pages.ring)

    def _start_run(self, source: tuple[Any, Any], target: tuple[Any, Any, Any], positions: jax.Array) -> None:
        """Start to copy so many positions, if any, from a page and a slot of it to the `number`-th row at a place, from
        its `done`-th position on."""
        (page, slot), (place, number, done) = source, target

        def copy(first: Any, count: Any) -> None:
            for n, array in enumerate(self.arrays):
                here = array.at[self.layer[0], page, :, self._positions(slot + first, count)]
                there = self.block(n, place, number).at[:, self._positions(done + first, count)]
                pltpu.make_async_copy(here, there, self.semaphores.at[n, place]).start()

        self.at_once(positions, copy, self.pages.unit)

    def _positions(self, first: Any, count: Any) -> Any:
        first, count = (x if isinstance(x, int) else pl.multiple_of(x, self.pages.unit) for x in (first, count))
        return pl.ds(first, count)
