"""Compact the caches of rows: each keeps the best of its positions (see `inferlib.ops.cache_policy`).

What stays is moved to the row's first cells, in order. From then on a row's cells are numbered as if it had no others,
by `RowState.length`, and `RowState.dropped` says how far its positions are ahead of these numbers. Pages behind the
budget may be another row's as soon as the program has run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.cache_policy import CachePolicy, retained_positions
from inferlib.programs.row_changes import Arrays, Names
from inferlib.programs.row_state import RowState, axes_of, map_state
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class Compaction(NamedTuple):
    """policy: what stays. keys: for each block of layers with a cache of its own, how many arrays of cells that has,
    and the size of a key, with which the cells of its first array begin. Behind them is the attention that cells got,
    if the policy needs it."""

    policy: CachePolicy
    keys: tuple[tuple[int, int], ...]


def compact_rows(
    shards: Shards, names: Names, how: Compaction, arrays: tuple[Arrays, RowState], entries: jax.Array
) -> tuple[Arrays, RowState]:
    """The cache's arrays of pages, of these logical axes, and the rows' state, after rows were compacted.

    entries: of `Compact`, see `packed`. A row that decodes stays as it is unless it has `CachePolicy.most` cells.
    """

    def local(arrays: tuple[Arrays, RowState], entries: jax.Array) -> tuple[Arrays, RowState]:
        count = jnp.sum(entries[:, 0] < arrays[1].token.size)  # the others are padding, behind them
        return lax.fori_loop(0, count, lambda i, arrays: _compacted(how, names, arrays, entries[i]), arrays)

    if shards.rules is None:
        return local(arrays, entries)
    spec = shards.rules.spec
    specs = tuple(map(spec, names)), map_state(spec, axes_of(arrays[1]))
    taken = specs, spec((axes.ROWS, None))
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=specs, check_vma=False)(arrays, entries)


def _compacted(
    how: Compaction, names: Names, arrays: tuple[Arrays, RowState], entry: jax.Array
) -> tuple[Arrays, RowState]:
    """The same for one row."""
    (cache, state), policy, (row, cells) = arrays, how.policy, entry
    assert state.dropped is not None
    length, pages = state.length[row], state.pages[row]
    due = (cells > 0) | (state.active[row] & (length >= policy.most))
    count, at = jnp.where(cells > 0, cells, length), jnp.where(due, row, state.length.size)
    rest, new = zip(cache, names, strict=True), []
    for number, size in how.keys:
        block = [_Paged.of(*next(rest), pages) for _ in range(number + policy.by_attention)]
        mass = block[-1].cells[..., 0] if policy.by_attention else None
        retained = retained_positions(block[0].cells[..., :size], count, policy, mass)
        new += [array.with_retained(retained, due) for array in block]
    state = state._replace(
        length=state.length.at[at].min(policy.budget, mode="drop"),
        dropped=state.dropped.at[at].add(count - policy.budget, mode="drop"),
    )
    return tuple(new), state


class _Paged(NamedTuple):
    """One row's part of an array of pages. flat [L * N, K, S, h]: the array, or one of one layer, with h 1 if it has
    none. places [L, M]: of the row's pages in it. cells [L, K, M * S, h]."""

    array: jax.Array
    flat: jax.Array
    places: jax.Array
    cells: jax.Array

    @staticmethod
    def of(array: jax.Array, names: tuple[str | None, ...], pages: jax.Array) -> _Paged:
        """The layers are merged with the pages: a TPU's compiler would copy stacked ones as a whole."""
        dim = names.index(axes.PAGES)
        total, each = math.prod(array.shape[: dim + 1]), array.shape[dim]
        flat = array.reshape(total, *array.shape[dim + 1 : dim + 3], -1 if array.ndim > dim + 3 else 1)
        places = jnp.arange(0, total, each, dtype=jnp.int32)[:, None] + jnp.clip(pages, 0, each - 1)
        cells = jnp.moveaxis(flat[places], 1, 2)
        return _Paged(array, flat, places, cells.reshape(*cells.shape[:2], -1, cells.shape[-1]))

    def with_retained(self, retained: jax.Array, due: jax.Array) -> jax.Array:
        """The array with the cells at the positions `retained` [L, K, C] as the row's first ones, if that is due."""
        slots, (layers, heads, budget) = self.flat.shape[-2], retained.shape
        count = -(-budget // slots)  # pages that are written, as a whole
        first = jnp.take_along_axis(self.cells, retained[..., None], axis=2)
        cells = jnp.concatenate([first, self.cells[:, :, budget : count * slots]], axis=2)
        cells = jnp.moveaxis(cells.reshape(layers, heads, count, slots, -1), 2, 1)
        written = jnp.where(due, self.places[:, :count], self.flat.shape[0])
        return self.flat.at[written].set(cells, mode="drop").reshape(self.array.shape)
