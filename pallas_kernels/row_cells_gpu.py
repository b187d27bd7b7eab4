"""Where the cells of a row's positions lie, for kernels on NVIDIA GPUs: in one page, or in the pages of a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import KvCache, LatentCache

Cache = TypeVar("Cache", KvCache, LatentCache)

SMALLEST_PAGE = 16  # positions of the smallest block; they have to divide a page of a table


def unsupported_pages(slots: int, columns: int | None) -> str | None:
    """Why kernels do not take a table of `columns` pages of so many slots; None: they do, or there is none."""
    if columns is None or slots % SMALLEST_PAGE == 0:
        return None
    return f"pages of {slots} positions are not a multiple of {SMALLEST_PAGE}"


def of_one_layer(cache: Cache) -> Cache:
    """The layer that a stacked cache with a page table reads, as pages among those of all layers; another cache as it
    is."""
    if cache.layer is None or cache.pages is None:
        return cache
    count = cache.arrays[0].shape[-4]
    pages = jnp.clip(cache.pages, 0, count - 1) + cache.layer * count
    merged = cache.with_arrays([x.reshape(-1, *x.shape[2:]) for x in cache.arrays])
    return replace(merged, layer=None, pages=pages)


def page_specs(cells: jax.Array, pages: jax.Array | None, row: int, head: int | None) -> tuple[pl.BlockSpec, Any]:
    """Blocks of cells [N, K, S, h] and of a page table [B, M] or None: the row's page [S, h] and no table, or all pages
    and the row's pages [M]. row, head: which of the grid's axes count rows and KV heads; head None: there is one."""
    if pages is not None:
        return pl.BlockSpec(), pl.BlockSpec((None, pages.shape[1]), lambda *at: (at[row], 0))
    page = pl.BlockSpec((None, None, *cells.shape[2:]), lambda *at: (at[row], 0 if head is None else at[head], 0, 0))
    return page, None


@dataclass(frozen=True)
class RowCells:
    """One row's cells of a KV head in refs of a cache: [S, h], the row's page; or, with a table, [N, K, S, h].

    table: a ref [M] of the row's pages; ids that do not exist are clipped. slots: S. block: positions that a kernel
    reads at once, which divide S if there is a table. ring: position p lives in slot p mod S, or mod M * S.
    """

    ref: Any
    table: Any
    head: jax.Array | int
    block: int
    ring: bool = False

    @property
    def slots(self) -> int:
        return self.ref.shape[-2]

    def page(self, first: jax.Array) -> tuple[jax.Array, ...]:
        """The page of the block of positions from `first` on, a multiple of `block`; nothing if the row is one page.

        A loop carries the next block's page, so that loads of the block's cells can run ahead. Triton keeps them ahead
        of one block, not of two: with pages of two blocks carried, it copied nothing ahead.
        """
        if self.table is None:
            return ()
        return (jnp.clip(self._entry(first), 0, self.ref.shape[0] - 1),)

    def at(self, first: jax.Array, page: tuple[jax.Array, ...]) -> tuple[jax.Array | int, ...]:
        """The place in the refs of the block from `first` on, but for columns: slots as [block, 1]."""
        if self.table is not None:
            return (*page, self.head, (lax.rem(first, self.slots) + jnp.arange(self.block))[:, None])
        slot = first + jnp.arange(self.block)
        return ((lax.rem(slot, self.slots) if self.ring else slot)[:, None],)

    def cell(self, position: jax.Array) -> tuple[tuple[jax.Array | int, ...], jax.Array]:
        """The place of one position's cell, but for columns, and whether it exists: else nothing may be written."""
        if self.table is None:
            slot = lax.rem(position, self.slots) if self.ring else position
            return (slot,), slot < self.slots
        page, count = self._entry(position), self.ref.shape[0]
        exists = (page >= 0) & (page < count)
        if not self.ring:
            exists = exists & (position < self.table.size * self.slots)
        return (jnp.clip(page, 0, count - 1), self.head, lax.rem(position, self.slots)), exists

    def _entry(self, position: jax.Array) -> jax.Array:
        """The table's entry for a position, unclipped."""
        columns, column = self.table.size, lax.div(position, self.slots)
        return plgpu.load(self.table.at[lax.rem(column, columns) if self.ring else jnp.minimum(column, columns - 1)])
