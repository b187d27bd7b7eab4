"""A stream of blocks, the live parts of all rows of a paged cache, which is copied to a TPU's on-chip memory ahead of
use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import div, rem, seldom

LANES = 128
UNROLL = 16  # copies of pages that are started together
MOST_COMPARED = 4  # most blocks of a row that are counted without a division
SCALARS = 3  # the scalars of `BlockStream.state`


@dataclass(frozen=True)
class Pages:
    """The layout of rows in pages of `slots` slots. columns: pages of a row in the table, None if rows are pages.

    ring: positions wrap around a row's pages. seen: the most positions that are read of a row, None for all. unit:
    positions that are copied together. block: positions of a block on chip, a multiple of unit.
    """

    slots: int
    columns: int | None
    ring: bool
    seen: int | None
    unit: int
    block: int

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.slots * (self.columns or 1)

    @property
    def most(self) -> int:
        """Blocks of a row."""
        return pl.cdiv(self.capacity if self.seen is None else span(self.seen, self.unit), self.block)

    @property
    def size(self) -> int:
        """Positions of a row that is one block: whole units for those that are read or, within a window, for those that
        are seen."""
        return self.block if self.seen is None else min(pl.cdiv(self.seen, self.unit) * self.unit, self.block)

    def first(self, length: jax.Array) -> jax.Array | int:
        """The first position that is read of a row of this length."""
        return 0 if self.seen is None else div(jnp.maximum(length - self.seen, 0), self.unit) * self.unit


@dataclass
class BlockStream:
    """Copies of blocks in the order in which they are used, by a kernel that has a grid step for every row.

    lengths [B], layer [1]; of a ring `origin` [B], the slot that a row's first position is in; table [B * M]: scalars.
    queries [B, ...] and arrays, each [L, N, K, S, ...], in HBM; on chip `query_buffers` [n, ...] and `buffers`, each
    [n, K, T, ...], for n blocks of T positions. counts [n]: units of the block in a buffer; state [SCALARS]: row and
    block to be copied next, and the buffer to be read next; following [B + 1]: the first row from each on that is not
    empty; semaphores [1 + arrays, n]. owners, each [n]: row and first position of the block in a buffer, for a kernel
    that asks for them.
    """

    pages: Pages
    lengths: Any
    layer: Any
    origin: Any
    table: Any
    queries: Any
    arrays: Sequence[Any]
    query_buffers: Any
    buffers: Sequence[Any]
    counts: Any
    state: Any
    following: Any
    semaphores: Any
    owners: Any = None

    together: ClassVar[int] = 1  # blocks that are waited for together

    def at_once(self, count: jax.Array, act: Callable[[Any, Any], None]) -> None:
        """Call act(0, count) if count is 1, rather than 0."""
        pl.when(count > 0)(lambda: act(0, 1))

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    def length(self, row: jax.Array) -> jax.Array:
        return self.lengths[row] if self.pages.ring else jnp.minimum(self.lengths[row], self.pages.capacity)

    def blocks(self, length: jax.Array) -> jax.Array:
        """How many blocks a row of this length has."""
        pages, count = self.pages, length - self.pages.first(length)
        if pages.most <= MOST_COMPARED:
            compared: Any = sum((count > i * pages.block).astype(jnp.int32) for i in range(pages.most))
            return compared
        return div(count + pages.block - 1, pages.block)

    def begin(self) -> None:
        """Start the first copies, of as many blocks as there are buffers."""

        def find(i, row):
            row = jnp.where(self.lengths[self.rows - 1 - i] > 0, self.rows - 1 - i, row)
            self.following[self.rows - 1 - i] = row
            return row

        self.following[self.rows] = self.rows
        self.state[0] = lax.fori_loop(0, self.rows, find, self.rows)
        self.state[1] = 0
        self.state[2] = 0
        lax.fori_loop(0, self.counts.shape[0], lambda buffer, _: self.start_next(buffer), None)

    def start_next(self, buffer: jax.Array) -> None:
        """Start the copies of the block whose turn it is, if any is left, to a buffer whose block has been used.

        It avoids branches, so that the compiler can mix it with vector instructions.
        """
        row, index = self.state[0], self.state[1]
        left = row < self.rows
        row = jnp.minimum(row, self.rows - 1)
        length = self.length(row)
        self._start(row, length, index, buffer, left)
        # This copy comes last: where XLA has brought the queries to VMEM, it becomes loads and stores, which wait for
        # stores.
        copy = pltpu.make_async_copy(self.queries.at[row], self.query_buffers.at[buffer], self.semaphores.at[0, buffer])
        copy.start()
        ends = index + 1 == self.blocks(length)
        self.state[0] = jnp.where(left, jnp.where(ends, self.following[row + 1], row), self.rows)
        self.state[1] = jnp.where(ends, 0, index + 1)

    def wait(self, buffer: jax.Array) -> None:
        """Wait for the block in a buffer, if there is one."""
        units, most = self.counts[buffer], self.pages.block // self.pages.unit
        self._wait_for_queries(buffer)

        def wait_for(i, count):
            """Only the number of bytes matters in the copy that a wait is given."""
            for n, copies in enumerate(self.buffers):
                part = copies.at[buffer, :, self._positions(i, count)]
                pltpu.make_async_copy(part, part, self.semaphores.at[1 + n, buffer]).wait()

        pl.when(units == most)(lambda: wait_for(0, most))
        seldom(units < most, lambda: self._in_runs(units, most - 1, wait_for))

    def end(self, ahead: int) -> None:
        """Wait for the last copies of queries, after the last block and waits for `ahead` blocks behind it. To avoid a
        branch, queries are copied even if no block is left."""
        for i in range(ahead, self.counts.shape[0]):
            self._wait_for_queries(rem(self.state[2] + i, self.counts.shape[0]))

    def _wait_for_queries(self, buffer: jax.Array) -> None:
        copy = self.query_buffers.at[buffer]
        pltpu.make_async_copy(copy, copy, self.semaphores.at[0, buffer]).wait()

    def _positions(self, first: Any, count: int):
        """The positions of `count` units in a buffer."""
        unit = self.pages.unit
        return pl.ds(pl.multiple_of(first * unit, unit), count * unit)

    def _in_runs(self, units: jax.Array, most: int, act) -> None:
        """Call act(i, count) for runs that make up `units` units, which are at most `most`; i is the first unit of a
        run of count."""
        done, bit = 0, 1 << most.bit_length() >> 1
        while bit:
            pl.when(units & bit != 0)(lambda done=done, bit=bit: act(done, bit))
            done, bit = done + (units & bit), bit // 2

    def _start(self, row: jax.Array, length: jax.Array, index: jax.Array, buffer: jax.Array, left: jax.Array) -> None:
        pages, unit = self.pages, self.pages.unit
        most = pages.block // unit
        start = pages.first(length) + index * pages.block
        units = jnp.where(left, jnp.minimum(div(length - start + unit - 1, unit), most), 0)
        self.counts[buffer] = units
        if self.owners is not None:
            self.owners[0][buffer], self.owners[1][buffer] = row, start
        slot = start if not pages.ring else self.origin[row] + index * pages.block
        if pages.ring:
            slot = jnp.where(slot >= pages.capacity, slot - pages.capacity, slot)
        if pages.columns is not None and unit == pages.slots:
            self._start_pages(row, div(slot, unit), units, buffer)
            return

        def start_run(i, count, at):
            """Start the copy of `count` consecutive units from the block's i-th on, which begin at slot `at` of a
            row."""
            page = row
            if pages.columns is not None:
                page, at = self.table[row * pages.columns + div(at, pages.slots)], rem(at, pages.slots)
            at = pl.ds(pl.multiple_of(at, unit), count * unit)
            for n, (array, copies) in enumerate(zip(self.arrays, self.buffers, strict=True)):
                source = array.at[self.layer[0], page, :, at]
                target = copies.at[buffer, :, self._positions(i, count)]
                pltpu.make_async_copy(source, target, self.semaphores.at[1 + n, buffer]).start()

        # The number of units before the end of the first page, or before positions wrap.
        before = jnp.minimum(
            units, div(pages.slots - (slot if pages.columns is None else rem(slot, pages.slots)), unit)
        )
        longest = min(most - 1, pages.slots // unit)
        if pages.slots >= pages.block:
            pl.when(before == most)(lambda: start_run(0, most, slot))
        rest = jnp.where(before == most, 0, before)
        self._in_runs(rest, longest, lambda i, count: start_run(i, count, slot + i * unit))
        if pages.columns is not None:

            def start_unit(i, _):
                at = slot + i * unit
                start_run(i, 1, jnp.where(at >= pages.capacity, at - pages.capacity, at) if pages.ring else at)

            lax.fori_loop(before, units, start_unit, None)
        elif pages.ring:
            self._in_runs(units - before, longest, lambda i, count: start_run(before + i, count, i * unit))

    def _start_pages(self, row: jax.Array, column: jax.Array, units: jax.Array, buffer: jax.Array) -> None:
        """Start the copies of `units` pages of a row's table, from this column on."""
        pages, columns = self.pages, self.pages.capacity // self.pages.slots
        first, end = row * columns + column, (row + 1) * columns

        def start_some(at, count):
            into = [copies.at[buffer, :, self._positions(at, count)] for copies in self.buffers]
            for n in range(count):
                entry = first + at + n
                if pages.ring:
                    entry = jnp.where(entry >= end, entry - columns, entry)
                page = self.table[entry]
                for m, (array, copies) in enumerate(zip(self.arrays, into, strict=True)):
                    source, target = array.at[self.layer[0], page], copies.at[:, pl.ds(n * pages.unit, pages.unit)]
                    pltpu.make_async_copy(source, target, self.semaphores.at[1 + m, buffer]).start()

        if (most := pages.block // pages.unit) <= 2 * UNROLL:
            for i in range(most):
                pl.when(i < units)(partial(start_some, i, 1))
            return
        count = min(UNROLL, 1 << most.bit_length() - 1)
        whole = div(units, count)
        lax.fori_loop(0, whole, lambda i, _: start_some(i * count, count), None)
        lax.fori_loop(whole * count, units, lambda i, _: start_some(i, 1), None)


def unit_of(slots: int, columns: int | None, most: int = LANES) -> int:
    """Positions that are copied together: a small page, else a divisor of a page, at most `most`."""
    return slots if columns is not None and slots <= 2 * LANES else math.gcd(slots, most)


def span(seen: int, unit: int) -> int:
    """Positions of all units that any run of `seen` positions touches."""
    return (pl.cdiv(seen - 1, unit) + 1) * unit


def zero_outside(values: Any, first: jax.Array | None, end: jax.Array, unit: int) -> None:
    """Zero the values [K, P, h], on chip, of positions before `first`, which is below `unit` (None: 0), and from `end`
    on."""
    heads, part, size = values.shape
    some = math.gcd(part, LANES)

    def at(i):
        return slice(None), pl.ds(pl.multiple_of(i * some, some), some)

    def zero(i, _):
        values[at(i)] = jnp.zeros((heads, some, size), values.dtype)

    def trim(i):
        position = i * some + lax.broadcasted_iota(jnp.int32, (heads, some, size), 1)
        inside = position < end if first is None else (position >= first) & (position < end)
        values[at(i)] = jnp.where(inside, values[at(i)].astype(jnp.float32), 0).astype(values.dtype)

    def chunk(position):
        return jnp.clip(div(jnp.maximum(position, 0), some), 0, part // some - 1)

    before, after = 0 if first is None or unit <= some else chunk(first), chunk(end)
    lax.fori_loop(after + 1, part // some, zero, None)
    if first is not None:
        lax.fori_loop(0, before, zero, None)
        trim(before)
    trim(after)
