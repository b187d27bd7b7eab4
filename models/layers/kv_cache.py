"""One layer's cache, as the attention layer sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions
from inferlib.models.layers.joint_cells import joint_cells
from inferlib.ops import int4_cells
from inferlib.ops.attention_mass import add_mass
from inferlib.ops.cache_write import cache_write, chunk_write, folded_rows, rounded
from inferlib.ops.kv_cache import KvCache, LatentCache
from inferlib.ops.recent_queries import write_queries
from inferlib.ops.selected_pages import write_summaries
from inferlib.sharding.stripe import Stripe


class Chunks(NamedTuple):
    """Chunks of consecutive tokens, [P] int32 each: their rows, positions of their first tokens, and how many tokens
    are not padding."""

    rows: jax.Array
    starts: jax.Array
    lengths: jax.Array

    def cut(self, count: int, width: int) -> Chunks:
        """Each chunk as `count` chunks of `width` tokens."""
        rows = jnp.repeat(self.rows, count)
        at = jnp.tile(jnp.arange(0, count * width, width, dtype=jnp.int32), self.rows.size)
        return Chunks(rows, jnp.repeat(self.starts, count) + at, jnp.repeat(self.lengths, count) - at)


def pages_at(table: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The pages in these rows and columns of a table; where there are none, any."""
    return table.at[rows, columns].get(mode="clip")


def divided(numbers: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of numbers that are not negative; of others, any. `//` and `%` are twenty operations each,
    in every layer of a program."""
    return lax.div(numbers, jnp.int32(by)), lax.rem(numbers, jnp.int32(by))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Former:
    """Cells [T, K, h] of each array that a layer wrote at the last step of a loop's core. run, writer: how those of
    chunks are written, see `step_attention.StepPlan`."""

    cells: tuple[jax.Array, ...]
    run: int = field(default=1, metadata={"static": True})
    writer: str | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """arrays: keys and values, or latents and rotary keys, each [N, K, S, h], N pages or, in a ring, rows; in a scanned
    segment [L, N, K, S, h] with `layer` the current one. Rotary keys may be folded, [..., S / f, f * h] (see
    `inferlib.ops.cache_write`). Where keys and values are one array, a cell holds keys, their values behind them, and
    padding. Quantised arrays are followed by their scales, each [N, K, S] or [L, N, K, S]; or they are of packed cells
    (see `inferlib.ops.int4_cells`), of heads that are rotated. K is fewer than the KV heads if these share cells, see
    `inferlib.models.layers.joint_cells`.

    A layer that shares another layer's cache gets the arrays of that layer.

    summaries [N, n, K, 2 * h] or [L, N, n, K, 2 * h]: of the n blocks of each page, if decode steps select what they
    read (see `inferlib.ops.selected_pages`). Where rows' tables may lack pages they are of rows, [R, M, n, K, 2 * h] or
    [L, R, M, ...]. wanted [B, M + 1]: then, how often a step's decode rows would have read each page, see
    `wanted_pages`.

    mass [N, K, S] or [L, N, K, S]: the attention that each cell got, if a bounded cache keeps cells by it (see
    `inferlib.ops.attention_mass`).

    queries [R, K, W, G * h] or [L, R, ...]: those of each row's newest W positions, if a bounded cache keeps cells by
    them (see `inferlib.ops.recent_queries`).

    inputs [B, C, ...] or [L, B, C, ...]: of a step whose tokens may not stand, what a recurrent layer read of each
    row's tokens. Its states do not have them yet: see `inferlib.models.replay`.

    left [T] bool: tokens that take no more steps of a loop's core; former: the cells that the core wrote at its last
    step, see `inferlib.models.early_exit`.

    basis [K, h, d]: the directions that summaries are of, while a layer attends; None: those of keys as they are.

    In a ring (sliding-window layers), position p lives in slot p mod S. Where positions are striped over several
    devices, the arrays hold one device's positions and p is the number among these (see `Stripe`).
    """

    arrays: tuple[jax.Array, ...]
    ring: bool = field(default=False, metadata={"static": True})
    layer: jax.Array | None = None
    summaries: jax.Array | None = None
    wanted: jax.Array | None = None
    mass: jax.Array | None = None
    queries: jax.Array | None = None
    inputs: tuple[jax.Array, ...] = ()
    left: jax.Array | None = None
    former: Former | None = None
    basis: jax.Array | None = None

    @property
    def slots(self) -> int:
        return self.arrays[0].shape[-2]

    @property
    def heads(self) -> int:
        """Cells of a position, K."""
        return self.arrays[0].shape[-3]

    @property
    def folds(self) -> tuple[int, ...]:
        """How many positions one row of each array holds."""
        return tuple(self.slots // x.shape[-2] if x.ndim == self.arrays[0].ndim else 1 for x in self.arrays)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of a cell, h, in each array but the scales."""
        if self.packed:
            keys, values = (x.shape[-1] for x in self.arrays)
            return int4_cells.cells_of_keys(keys).size(keys), int4_cells.VALUES.size(values)
        pairs = zip(self.arrays, self.folds, strict=True)
        return tuple(x.shape[-1] // fold for x, fold in pairs if x.ndim == self.arrays[0].ndim)

    @property
    def packed(self) -> bool:
        return self.arrays[0].dtype == int4_cells.DTYPE

    @property
    def pages(self) -> int:
        return self.arrays[0].shape[-4]

    @property
    def scaled(self) -> bool:
        return self.arrays[-1].ndim < self.arrays[0].ndim

    def latest(self, new: Sequence[jax.Array], run: int, writer: str | None) -> tuple[Sequence[jax.Array], LayerCache]:
        """The cells to write of new ones, which are the former ones where tokens left, and the cache with them. run,
        writer: see `Former`."""
        if self.left is None:
            return new, self
        if self.former is not None:
            new = [jnp.where(self.left[:, None, None], old, x) for old, x in zip(self.former.cells, new, strict=True)]
        return new, replace(self, former=Former(tuple(new), run, writer))

    def write(
        self,
        new: Sequence[jax.Array],
        rows: jax.Array,
        positions: jax.Array,
        stripe: Stripe,
        table: jax.Array | None = None,
        run: int = 1,
    ) -> LayerCache:
        """Write new cells at `positions` [T] of `rows` [T]: [T, K, h] for each array, or for each part of a cell.

        Rows that do not exist, negative positions and those of other devices are dropped. table: see `StepContext`.
        run: every `run` consecutive tokens are of one page.
        """
        new = self.cells(new)
        pages, slots = self.places(rows, positions, stripe, table)
        pairs = zip(self.arrays, rounded(new, self.arrays[0], scaled=self.scaled), strict=True)
        write = partial(cache_write, pages=pages, slots=slots, layer=self.layer, run=run)
        return replace(self, arrays=tuple(write(old, x) for old, x in pairs))

    def places(
        self, rows: jax.Array, positions: jax.Array, stripe: Stripe, table: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The page and the slot of each position [T] of rows [T]; no slot if there is none on this device."""
        if self.ring or table is None:
            return rows, stripe.slots(positions, self.slots, ring=self.ring)
        number, (_, columns) = stripe.number(positions), table.shape
        column, slot = divided(number, self.slots)
        pages = pages_at(table, rows, column)
        there = stripe.owns(positions) & (column < columns) & (rows < table.shape[0])
        # Slots that do not exist differ, as indices must.
        none = self.slots + jnp.arange(rows.size, dtype=jnp.int32)
        return pages, jnp.where(there, slot, none)

    def write_chunks(
        self,
        new: Sequence[jax.Array],
        chunks: Chunks,
        table: jax.Array | None,
        run: int | None,
        backend: str,
    ) -> LayerCache:
        """Write chunks of consecutive positions; new: [P, C, K, h] for each array, as in `write`.

        table, run: see `StepContext`. backend: see `inferlib.ops.cache_write.choose_chunk_write`.
        """
        new, width = self.cells(new), new[0].shape[1]
        if self.ring or table is None:
            pages, slots = chunks.rows, chunks.starts % self.slots if self.ring else chunks.starts
        else:
            width = self.run(width, run)
            new = [x.reshape(-1, width, *x.shape[2:]) for x in new]
            chunks = chunks.cut(new[0].shape[0] // chunks.rows.size, width)
            column, slots = divided(chunks.starts, self.slots)
            pages = pages_at(table, chunks.rows, column)
            there = (chunks.lengths > 0) & (chunks.rows < table.shape[0])
            pages = jnp.where(there, pages, self.pages)
        arrays = chunk_write(self.arrays, new, pages, slots, layer=self.layer, ring=self.ring, backend=backend)
        return replace(self, arrays=arrays)

    def with_summaries(self, rows: jax.Array, ends: jax.Array, table: jax.Array) -> LayerCache:
        """The cache with the summaries of the blocks whose last positions are `ends` [U] of `rows` [U]; negative ones
        are dropped."""
        if self.summaries is None:
            return self
        none = self.pages + jnp.arange(ends.size, dtype=jnp.int32)  # pages that do not exist differ, as indices must
        pages = pages_at(table, rows, jnp.maximum(ends, 0) // self.slots)
        pages = jnp.where((ends >= 0) & (rows < table.shape[0]), pages, none)
        places = jnp.maximum(ends, 0) % self.slots // (self.slots // self.summaries.shape[-3])
        keys = self.arrays[:: len(self.sizes)] if self.scaled else self.arrays[:1]
        summaries, targets = self.flat_summaries, None
        if self.summaries_of_rows:
            targets = jnp.where(
                pages < self.pages, self.summary_places(rows, ends // self.slots), none + summaries.size
            )
        new = write_summaries(summaries, keys, pages, places, self.layer, self.basis, targets)
        return replace(self, summaries=new.reshape(self.summaries.shape))

    @property
    def summaries_of_rows(self) -> bool:
        """True if summaries are of rows, and not of pages."""
        return self.summaries is not None and self.summaries.ndim > self.arrays[0].ndim

    @property
    def flat_summaries(self) -> jax.Array:
        """The summaries [N, n, K, 2 * h] or [L, N, ...] of N pages, or of all rows' pages."""
        assert self.summaries is not None
        if not self.summaries_of_rows:
            return self.summaries
        *lead, rows, columns, _, _, _ = shape = self.summaries.shape
        return self.summaries.reshape(*lead, rows * columns, *shape[-3:])

    def summary_places(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """Where the summaries of pages in these rows and columns lie in `flat_summaries`."""
        assert self.summaries is not None
        return rows * self.summaries.shape[-4] + columns

    def with_wanted(self, counts: jax.Array) -> LayerCache:
        """The cache with more of `wanted`, counts [B, m + 1] of the first m pages of rows."""
        if self.wanted is None:
            return self
        m = counts.shape[1] - 1
        return replace(self, wanted=self.wanted.at[:, :m].add(counts[:, :m]).at[:, -1].add(counts[:, -1]))

    def with_mass(
        self,
        queries: tuple[jax.Array, jax.Array, jax.Array],
        rows: jax.Array,
        table: jax.Array | None,
        options: AttentionOptions,
    ) -> LayerCache:
        """The cache with the attention of queries, see `add_mass`, of these rows [B] of a table of pages."""
        if self.mass is None or table is None:
            return self
        pages = jnp.take(table, rows, axis=0, mode="clip")
        return replace(self, mass=add_mass(self.mass, self.arrays[0], pages, queries, options, self.layer))

    def with_queries(self, new: jax.Array, rows: jax.Array, positions: jax.Array) -> LayerCache:
        """The cache with new queries, see `write_queries`."""
        if self.queries is None:
            return self
        return replace(self, queries=write_queries(self.queries, new, rows, positions, self.layer))

    def run(self, width: int, run: int | None) -> int:
        """How many tokens of chunks of `width` are in one page together. run: see `StepContext`."""
        return width if self.ring or run is None else math.gcd(width, run)

    def cells(self, new: Sequence[jax.Array]) -> list[jax.Array]:
        """The cells of new keys and values, before they are rounded: one array for each of the cache's, padded to its
        size."""
        if len(self.sizes) == 1:
            new = (jnp.concatenate([joint_cells(x, x.shape[-2] // self.heads) for x in new], axis=-1),)
        return list(map(widened, new, self.sizes))

    def keys_and_values(
        self,
        arrays: Sequence[jax.Array] | None = None,
        limit: int | None = None,
        pages: jax.Array | None = None,
    ) -> KvCache:
        """The keys and values that attention reads: of the arrays, in place if they are stacked; or of `arrays` read
        from them before. limit: no position reaches it. pages: of the rows, see `table_of`."""
        arrays = self.arrays if arrays is None else arrays
        cells = [x for x in arrays if x.ndim == arrays[0].ndim]
        scales, layer = arrays[len(cells) :], self.layer if cells[0].ndim == 5 else None
        apart: Any = [None] if len(cells) == 1 else cells[1:]
        return KvCache(cells[0], *apart, *scales, layer=layer, pages=pages, ring=self.ring, limit=limit)

    def latents(
        self,
        arrays: Sequence[jax.Array] | None = None,
        limit: int | None = None,
        pages: jax.Array | None = None,
    ) -> LatentCache:
        """The latents and rotary keys, likewise."""
        latents, keys, *scales = self.arrays if arrays is None else arrays
        layer = self.layer if latents.ndim == 5 else None
        pair = (scales[0], scales[1]) if scales else None
        return LatentCache(latents, keys, pair, layer=layer, pages=pages, limit=limit)

    def table_of(self, table: jax.Array | None, limit: int | None) -> jax.Array | None:
        """The columns of a table that hold positions below `limit`; None if rows are this cache's pages."""
        if self.ring or table is None:
            return None
        return table if limit is None else table[:, : -(-limit // self.slots)]

    def read(self, rows: int, limit: int | None = None, first: jax.Array | int = 0) -> tuple[jax.Array, ...]:
        """The arrays of the current layer, [N, K, S, ...]; of a stacked cache only `rows` pages from page `first` on
        and slots below `limit`: [rows, K, limit, ...]. Folded arrays stay folded.

        XLA fuses one slice of the stacked cache with what reads it, but copies a slice of a slice to memory.
        """
        if (layer := self.layer) is None:
            return self.arrays
        slots = self.slots if self.ring or limit is None else min(limit, self.slots)

        def part(x: jax.Array, fold: int) -> jax.Array:
            sizes = (1, rows, x.shape[2], folded_rows(slots, fold), *x.shape[4:])
            return lax.dynamic_slice(x, (layer, first, *[0] * (x.ndim - 2)), sizes)[0]

        return tuple(map(part, self.arrays, self.folds))


def widened(x: jax.Array, size: int) -> jax.Array:
    """x [..., n], padded with zeros to [..., size]."""
    short = size - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, short),)) if short else x
