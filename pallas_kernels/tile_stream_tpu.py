"""The blocks of a paged cache that tiles of queries visit, as a stream of copies to a TPU's on-chip memory ahead of
use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import div, rem
from inferlib.pallas_kernels.generations_tpu import cores

SUBLANES = 8
STATE = 3  # the scalars of `TileStream.state`

Place = tuple[Any, Any, Any]  # a tile: its chunk, head and number


def visible(visits: jax.Array, first: jax.Array, last: jax.Array, window: int | None, keys: int) -> list[jax.Array]:
    """The blocks of visits [P, K, T, M] that some query of a tile sees: how many [P, K * T], and these in order
    [P, K * T * M]. first, last [P, T]: positions of the tiles' first and last queries."""
    first, last = first[:, None, :, None], last[:, None, :, None]
    seen = (visits >= 0) & (visits * keys <= last)
    if window is not None:
        seen &= (visits + 1) * keys > first - window + 1
    ordered = jnp.sort(jnp.where(seen, visits, jnp.iinfo(jnp.int32).max), axis=-1)
    return [x.astype(jnp.int32).reshape(visits.shape[0], -1) for x in (jnp.sum(seen, axis=-1), ordered)]


def scale_rows(heads: int) -> int:
    """The number of heads whose scales are copied together: those of a tile of memory, or all if tiles would not be
    whole."""
    return heads if heads % SUBLANES else SUBLANES


@dataclass(frozen=True)
class TileGrid:
    """The grid of a kernel that has a step for every chunk, KV head and tile of queries: `chunks`, `heads` and `tiles`
    of them.

    by_head: cores of a device that share the heads of a chunk. by_tile: cores that share the tiles of a head, where the
    heads do not divide. If there are several, the first dimension is the cores, and the others are the part of each.
    """

    chunks: int
    heads: int
    tiles: int
    by_head: int = 1
    by_tile: int = 1

    @staticmethod
    def of(chunks: int, heads: int, tiles: int) -> TileGrid:
        """The grid for the cores of a device."""
        by_head = math.gcd(heads, cores())
        return TileGrid(chunks, heads, tiles, by_head, math.gcd(tiles, cores() // by_head))

    @property
    def each(self) -> tuple[int, int, int]:
        """The chunks, and the heads and tiles of one core."""
        return self.chunks, self.heads // self.by_head, self.tiles // self.by_tile

    @property
    def shared(self) -> bool:
        return self.by_head * self.by_tile > 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.by_head * self.by_tile,) * self.shared + self.each

    @property
    def semantics(self) -> tuple[Literal["parallel", "arbitrary"], ...]:
        return ("parallel",) * self.shared + ("arbitrary",) * 3

    def place(self, core: Any, chunk: Any, head: Any, tile: Any) -> Place:
        """The tile of a core's step. Of tiles each core has the first and the last of a group in turn, as those further
        back see more."""
        if self.by_head > 1:
            head = lax.rem(core, self.by_head) * self.each[1] + head
        if self.by_tile > 1:
            turn = div(core, self.by_head)
            tile = tile * self.by_tile + jnp.where(rem(tile, 2) == 0, turn, self.by_tile - 1 - turn)
        return chunk, head, tile

    def spec(self, block: tuple[int | None, ...], at: Callable[..., tuple]) -> pl.BlockSpec:
        """The block at(chunk, head, tile, scalars)."""

        def index(*ids):
            core, *ids = ids if self.shared else (0, *ids)
            return at(*self.place(core, *ids[:3]), *ids[3:])

        return pl.BlockSpec(block, index)


@dataclass
class TileStream:
    """Copies of blocks in the order in which they are used, by a kernel that has a grid step for every chunk, KV head
    and tile of queries.

    Scalars: rows [P], -1 if absent; layer [1]; positions of the first and the last query of every product
    [P, T * parts]; table [P, M] or None; listed: None, or how many blocks each tile visits [P, K * T] and these
    [P, K * T * M], M being `most_listed`, of `listed_keys` positions each; a visit is to as many as fill a buffer.
    arrays [L, N, K, S, h], folded ones [L, N, K, S / f, f * h] (see `inferlib.ops.cache_write`) behind others,
    and scales [L, N, K, S], in HBM; with K = 1 for all heads; on chip `buffers`,
    [n, keys, h] or [n, keys / f, f * h], of scales [n, `scale_rows`, keys]. state [STATE]: step and block to
    be copied next, and the buffer to be read next; semaphores [arrays, n]. ring: positions wrap at `capacity`. unit:
    positions that are copied together. grid: the kernel's; every core has a stream of its own.
    """

    rows: Any
    layer: Any
    firsts: Any
    lasts: Any
    table: Any
    listed: tuple[Any, Any] | None
    most_listed: int
    arrays: Sequence[Any]
    buffers: Sequence[Any]
    state: Any
    semaphores: Any
    parts: int
    window: int | None
    ring: bool
    capacity: int
    unit: int
    grid: TileGrid
    listed_keys: int = 0

    def __post_init__(self):
        self._steps = math.prod(self.grid.each)
        ids = map(pl.program_id, range(len(self.grid.shape)))
        self._core, *self._ids = ids if self.grid.shared else (0, *ids)
        self.here = self.grid.place(self._core, *self._ids)
        self._count, self._keys = self.semaphores.shape[1], self.buffers[0].shape[1]

    def after(self, buffer: jax.Array) -> jax.Array:
        """The buffer of the next block."""
        return jnp.where(buffer == self._count - 1, 0, buffer + 1)

    # ---- which blocks a tile visits

    def first(self, part: int = 0, at: Place | None = None) -> jax.Array:
        """The position of the first query of a part of a tile, by default this tile."""
        chunk, _, tile = at or self.here
        return self.firsts[chunk, tile * self.parts + part]

    def last(self, part: int = -1, at: Place | None = None) -> jax.Array:
        """The last position that a query of the part sees."""
        chunk, _, tile = at or self.here
        return self.lasts[chunk, tile * self.parts + part % self.parts]

    def lowest(self, at: Place | None = None) -> jax.Array | int:
        """The first position that a query of a tile sees."""
        return 0 if self.window is None else jnp.maximum(self.first(at=at) - self.window + 1, 0)

    def visits(self, at: Place | None = None) -> jax.Array:
        """How many blocks a tile visits, by default this tile."""
        at = at or self.here
        if self.listed is not None:
            count = div(self._listed(at) + self._each - 1, self._each)
        else:
            count = lax.div(self.last(at=at) + self._keys - self.start(0, at), self._keys)
        return jnp.where(self.rows[at[0]] < 0, 0, jnp.maximum(count, 0))

    def start(self, index: jax.Array | int, at: Place | None = None, offset: jax.Array | int = 0) -> jax.Array:
        """The position at an offset in a block that the tile visits."""
        at = at or self.here
        if self.listed is not None:
            first, number = (at[1] * self.grid.tiles + at[2]) * self.most_listed, index * self._each
            number = jnp.minimum(number + div(offset, self.listed_keys), self.most_listed - 1)
            return self.listed[1][at[0], first + number] * self.listed_keys + rem(offset, self.listed_keys)
        return div(self.lowest(at), self.unit) * self.unit + index * self._keys + offset

    def ends_by(self, index: jax.Array, position: jax.Array) -> jax.Array:
        """Whether this tile's block is whole, and none of it lies behind a position."""
        by = self.start(index, offset=self._keys - 1) <= position
        return by if self.listed is None else by & ((index + 1) * self._each <= self._listed(self.here))

    def copied(self, index: jax.Array) -> jax.Array:
        """How many positions of this tile's block there are, in whole units."""
        return self._units(index, self.here) * self.unit

    @property
    def _each(self) -> int:
        """How many listed blocks are visited together."""
        return self._keys // self.listed_keys

    def _listed(self, at: Place) -> jax.Array:
        """How many blocks are listed for a tile."""
        assert self.listed is not None
        return self.listed[0][at[0], at[1] * self.grid.tiles + at[2]]

    # ---- copies

    def begin(self, ahead: int) -> None:
        """Start the copies of the first `ahead` blocks, at the first step."""

        @pl.when((self._ids[0] == 0) & (self._ids[1] == 0) & (self._ids[2] == 0))
        def _():
            self.state[0] = lax.while_loop(self._is_empty, lambda step: step + 1, 0)
            self.state[1] = 0
            self.state[2] = 0
            lax.fori_loop(0, ahead, lambda buffer, _: self.start_next(buffer), None)

    def start_next(self, buffer: jax.Array) -> None:
        """Start the copies of the block whose turn it is, if any is left, to a buffer."""
        step, index = self.state[0], self.state[1]

        @pl.when(step < self._steps)
        def _():
            at = self._place(step)
            self._start_block(at, index, buffer)
            ends = index + 1 == self.visits(at)
            self.state[0] = lax.while_loop(self._is_empty, lambda step: step + 1, step + ends.astype(jnp.int32))
            self.state[1] = jnp.where(ends, 0, index + 1)

    def wait(self, index: jax.Array, buffer: jax.Array) -> None:
        """Wait for a block of this tile."""
        units, most = self._units(index, self.here), self._keys // self.unit

        def wait_for(i, count):
            """Only the number of bytes matters in the copy that a wait is given."""
            for n, copies in enumerate(self.buffers):
                into = self._slice_of(n, i * self.unit, count)
                some = copies.at[buffer, into] if self._of_cells(n) else copies.at[buffer, :, into]
                pltpu.make_async_copy(some, some, self.semaphores.at[n, buffer]).wait()

        whole = units == most
        pl.when(whole)(lambda: wait_for(0, self._keys))
        lax.fori_loop(0, jnp.where(whole, 0, units), lambda i, _: wait_for(i, self.unit), None)

    def _of_cells(self, n: int) -> bool:
        return len(self.arrays[n].shape) == 5

    def _slice_of(self, n: int, position: jax.Array | int, count: int) -> Any:
        """The slice of an array, or of its buffer, with `count` positions from `position` on: multiples of a unit."""
        fold = self.arrays[0].shape[3] // self.arrays[n].shape[3]
        return pl.ds(pl.multiple_of(div(position, fold), self.unit // fold), count // fold)

    def _place(self, step: jax.Array) -> Place:
        _, heads, tiles = self.grid.each
        ids = lax.div(step, heads * tiles), lax.rem(lax.div(step, tiles), heads), lax.rem(step, tiles)
        return self.grid.place(self._core, *ids)

    def _is_empty(self, step: Any) -> Any:
        return (step < self._steps) & (self.visits(self._place(jnp.minimum(step, self._steps - 1))) == 0)

    def _units(self, index: jax.Array, at: Place) -> jax.Array:
        """How many units of a block there are."""
        unit, last = self.unit, self.last(at=at)
        if self.listed is None:
            return jnp.minimum(div(last - self.start(index, at) + unit, unit), self._keys // unit)
        before = jnp.clip(self._listed(at) - index * self._each, 1, self._each) - 1  # all but the last are whole
        start = self.start(index, at, before * self.listed_keys)
        some, each = div(last - start + unit, unit), self.listed_keys // unit
        return before * each + jnp.minimum(some, each)

    def _start_block(self, at: Place, index: jax.Array, buffer: jax.Array) -> None:
        units, most = self._units(index, at), self._keys if self.listed is None else self.listed_keys
        whole = units == self._keys // self.unit

        def start_all():
            """In one straight line: a page has all positions of a listed block."""
            for offset in range(0, self._keys, most):
                self._start_copy(at, self.start(index, at, offset), offset, most, buffer)

        def start_parts():
            for offset in range(0, self._keys, most):
                of_part = jnp.clip(units - offset // self.unit, 0, most // self.unit)
                self._start_part(self.start(index, at, offset), offset, most, of_part, (at, buffer))

        if self.listed is None or self.arrays[0].shape[3] % most:
            return start_parts()
        pl.when(whole)(start_all)
        pl.when(jnp.logical_not(whole))(start_parts)

    def _start_part(
        self, start: jax.Array, offset: int, keys: int, units: jax.Array, place: tuple[Place, jax.Array]
    ) -> None:
        """Start the copies of so many units of `keys` consecutive positions to `offset` in a buffer."""
        (at, buffer), slots, unit = place, self.arrays[0].shape[3], self.unit
        if slots >= keys:
            whole = (units == keys // unit) & (rem(start, slots) + keys <= slots)
            pl.when(whole)(lambda: self._start_copy(at, start, offset, keys, buffer))
            units = jnp.where(whole, 0, units)
        one = lambda i, _: self._start_copy(at, start + i * unit, offset + i * unit, unit, buffer)  # noqa: E731
        lax.fori_loop(0, units, one, None)

    def _start_copy(self, at: Place, position, offset, count: int, buffer: jax.Array) -> None:
        """Start the copies that bring `count` positions of a page to `offset` in a buffer."""
        _, pages, heads, slots = self.arrays[0].shape[:4]
        page, slot = self.rows[at[0]], lax.rem(position, self.capacity) if self.ring else position
        if self.table is not None:
            page, slot = jnp.clip(self.table[at[0], div(slot, slots)], 0, pages - 1), rem(slot, slots)
        for n, (array, copies) in enumerate(zip(self.arrays, self.buffers, strict=True)):
            array = array.at[self.layer[0], page]
            source, into = (self._slice_of(n, x, count) for x in (slot, offset))
            if self._of_cells(n):
                pair = array.at[at[1] if heads > 1 else 0, source], copies.at[buffer, into]
            else:
                some = scale_rows(heads)
                first = 0 if some == heads else pl.multiple_of(div(at[1], some) * some, some)
                pair = array.at[pl.ds(first, some), source], copies.at[buffer, :, into]
            pltpu.make_async_copy(*pair, self.semaphores.at[n, buffer]).start()
