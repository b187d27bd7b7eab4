"""Compact the caches of rows: each keeps the best of its positions (see `inferlib.ops.cache_policy`).

What stays is moved to the row's first cells, in order. From then on a row's cells are numbered as if it had no others,
by `RowState.length`, and `RowState.dropped` says how far its positions are ahead of these numbers. Pages behind the
budget may be another row's as soon as the program has run.

Where layers keep more than those of level 0 (see `inferlib.models.cache_levels`), each level has its pages, and all
that have more than their budget are compacted at once. `RowState.length` counts the cells of level 0, and
`RowState.ahead` says how many more the others have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.attention_values import AttentionOptions
from inferlib.models.config import AttentionSpec
from inferlib.ops.cache_policy import CachePolicy, best_positions, position_scores
from inferlib.ops.recent_queries import recent_weights
from inferlib.programs.row_changes import Arrays, Names
from inferlib.programs.row_state import RowState, axes_of, map_state
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class Keys(NamedTuple):
    """The keys of a block of layers with a cache of its own.

    arrays: how many arrays of cells the cache has, keys first. Behind them is the attention that cells got, if the
    policy needs it. size: that of a key, with which a cell of the first array begins. options: how queries weigh keys.
    level: of the layers.
    """

    arrays: int
    size: int
    options: AttentionOptions
    level: int = 0

    @staticmethod
    def of(spec: AttentionSpec, arrays: int) -> Keys:
        options = AttentionOptions(spec.scale, softcap=spec.softcap)
        return Keys(arrays, spec.cache_sizes[0], options, spec.cache_level)


class Compaction(NamedTuple):
    """policy: what stays. keys: of each block of layers that owns a cache. queries: the logical axes of each array of
    the newest queries, one for each of `keys` if the policy needs them. together: how many rows are compacted at once,
    a divisor of the entries of a call. columns: how many of a row's pages are of each level; (): all are of one."""

    policy: CachePolicy
    keys: tuple[Keys, ...]
    queries: Names = ()
    together: int = 1
    columns: tuple[int, ...] = ()

    def pages_of(self, pages: jax.Array, level: int) -> jax.Array:
        """The pages of a level, of all pages [G, M] of rows."""
        first = sum(self.columns[:level])
        return pages[:, first : first + self.columns[level]] if self.columns else pages

    @staticmethod
    def rows_together(platform: str, entries: int) -> int:
        """All entries of a call on a GPU, which takes 1 ms and more to start the kernels of one compaction, several for
        each layer; elsewhere one, so that nothing is read but rows that are due."""
        return entries if platform == "gpu" else 1


def compact_rows(
    shards: Shards,
    names: Names,
    how: Compaction,
    arrays: tuple[Arrays, RowState],
    queries: Arrays,
    entries: jax.Array,
) -> tuple[Arrays, RowState]:
    """The cache's arrays of pages, of these logical axes, and the rows' state, after rows were compacted.

    queries: arrays of the rows' newest queries. entries: of `Compact`, see `packed`. A row that decodes stays as it is
    unless it has `CachePolicy.compacts_at` cells.
    """

    def local(arrays: tuple[Arrays, RowState], queries: Arrays, entries: jax.Array) -> tuple[Arrays, RowState]:
        rows = _Rows(how, names, queries, lambda scores: _mean(scores, shards))
        if how.together == len(entries):
            return rows.compacted(arrays, entries)
        count = jnp.sum(entries[:, 0] < arrays[1].token.size)  # the others are padding, behind them
        groups = entries.reshape(-1, how.together, entries.shape[1])
        return lax.fori_loop(0, -(-count // how.together), lambda i, x: rows.compacted(x, groups[i]), arrays)

    if shards.rules is None:
        return local(arrays, queries, entries)
    spec = shards.rules.spec
    specs = tuple(map(spec, names)), map_state(spec, axes_of(arrays[1]))
    taken = specs, tuple(map(spec, how.queries)), spec((axes.ROWS, None))
    run = jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=specs, check_vma=False)
    return run(arrays, queries, entries)


def _mean(scores: jax.Array, shards: Shards) -> jax.Array:
    """Scores [..., K, P] averaged over the KV heads of all devices: [..., 1, P]."""
    heads = scores.shape[-2] * shards.size(axes.KV_HEADS)
    return shards.sum(jnp.sum(scores, axis=-2, keepdims=True), axes.KV_HEADS) / heads


class _Rows(NamedTuple):
    """What compacts G rows at once. queries: of all rows, one array for each block if the policy needs them.
    over_heads: see `inferlib.ops.cache_policy.Cells`."""

    how: Compaction
    names: Names
    queries: Arrays
    over_heads: Callable[[jax.Array], jax.Array]

    def compacted(self, arrays: tuple[Arrays, RowState], entries: jax.Array) -> tuple[Arrays, RowState]:
        """The arrays and the state after the rows of `entries` [G, 2] were compacted, but for padding."""
        (cache, state), policy, (row, cells) = arrays, self.how.policy, entries.T
        assert state.dropped is not None
        length, pages, rows = state.length[row], state.pages[row], state.length.size
        due = (row < rows) & ((cells > 0) | (state.active[row] & (length >= policy.compacts_at)))
        count, at = jnp.where(cells > 0, cells, length), jnp.where(due, row, rows)
        counts = count[:, None]  # of each level
        if state.ahead is not None:
            counts = counts + jnp.pad(state.ahead[row], ((0, 0), (1, 0)))
        least, budgets = policy.budgets[0], jnp.array(policy.budgets, jnp.int32)
        rest, blocks, scores = zip(cache, self.names, strict=True), [], []
        for number, keys in enumerate(self.how.keys):
            of_level, there = self.how.pages_of(pages, keys.level), counts[:, keys.level]
            blocks.append([_Paged.of(*next(rest), of_level) for _ in range(keys.arrays + policy.counts_mass)])
            scores.append(self.scores(number, blocks[-1], (row, there, count - 1 + state.dropped[row])))
        new: list[jax.Array] = []
        for keys, block, retained in zip(self.how.keys, blocks, self.retained(scores), strict=True):
            over = due & (counts[:, keys.level] > policy.budgets[keys.level])
            for array in block:
                if new:  # one array after the other: the cells that all of them keep would take gigabytes
                    new[-1], retained = lax.optimization_barrier((new[-1], retained))
                new.append(array.with_retained(retained, over))
        if state.ahead is not None:
            ahead = jnp.minimum(counts, budgets)[:, 1:] - least
            state = state._replace(ahead=state.ahead.at[at].set(ahead, mode="drop"))
        assert state.dropped is not None
        state = state._replace(
            length=state.length.at[at].min(least, mode="drop"),
            dropped=state.dropped.at[at].add(count - least, mode="drop"),
        )
        return tuple(new), state

    def retained(self, scores: list[jax.Array]) -> list[jax.Array]:
        """The positions [G, L, K, C] that stay of each block's cells, by their scores [G, L, K, P]. Those of
        a level are sorted at once, so that a GPU starts one sort and not one for each layer."""
        of_block: dict[int, jax.Array] = {}
        for level, budget in enumerate(self.how.policy.budgets):
            numbers = [number for number, keys in enumerate(self.how.keys) if keys.level == level]
            shapes = [scores[number].shape[:3] for number in numbers]
            if not numbers:
                continue
            flat = [einops.rearrange(scores[number], "g l k p -> (g l k) p") for number in numbers]
            best = best_positions(jnp.concatenate(flat), budget)
            parts = jnp.split(best, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
            parts = [part.reshape(*shape, budget) for part, shape in zip(parts, shapes, strict=True)]
            of_block |= dict(zip(numbers, parts, strict=True))
        return [of_block[number] for number in range(len(scores))]

    def scores(self, number: int, block: list[_Paged], place: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """The scores [G, L, K, P] of a block's cells, see `position_scores`. place: each row, how many cells it has,
        and the position of the newest one, all [G]."""
        of = self.how.keys[number]
        policy = self.how.policy.of_level(of.level)
        mass = block[-1].cells[..., 0] if policy.counts_mass else None

        def of_row(keys: jax.Array, mass: jax.Array | None, row: jax.Array, count: jax.Array, position: jax.Array):
            if not policy.queries:
                return position_scores(keys, count, policy, mass)
            queries = self.queries[number]
            recent = jnp.take(queries, row, axis=queries.ndim - 4).reshape(-1, *queries.shape[-3:])
            there = jnp.arange(keys.shape[2]) < count

            def of_layer(layer: tuple[jax.Array, jax.Array]) -> jax.Array:
                keys = jnp.where(there[:, None], layer[0], 0)
                weights = recent_weights(layer[1], keys, count, position, of.options)
                return position_scores(keys, count, policy, weights=weights, over_heads=self.over_heads)

            return lax.map(of_layer, (keys, recent))  # one after the other, as weights are large

        return jax.vmap(of_row)(block[0].cells[..., : of.size], mass, *place)


class _Paged(NamedTuple):
    """Some rows' part of an array of pages. flat [L * N, K, S, h]: the array, or one of one layer, with h 1 if it has
    none. places [G, L, M]: of the rows' pages in it."""

    array: jax.Array
    flat: jax.Array
    places: jax.Array

    @staticmethod
    def of(array: jax.Array, names: tuple[str | None, ...], pages: jax.Array) -> _Paged:
        """pages [G, M]. The layers are merged with the pages: a TPU's compiler would copy stacked ones as a whole."""
        dim = names.index(axes.PAGES)
        total, each = math.prod(array.shape[: dim + 1]), array.shape[dim]
        flat = array.reshape(total, *array.shape[dim + 1 : dim + 3], -1 if array.ndim > dim + 3 else 1)
        layers = jnp.arange(0, total, each, dtype=jnp.int32)[:, None]
        return _Paged(array, flat, layers + jnp.clip(pages, 0, each - 1)[:, None])

    @property
    def cells(self) -> jax.Array:
        """[G, L, K, M * S, h]: all cells of the rows' pages."""
        there = self.flat.at[self.places].get(mode="promise_in_bounds")  # to check it takes a GPU three times as long
        return einops.rearrange(there, "g l m k s h -> g l k (m s) h")

    def cells_at(self, positions: jax.Array) -> jax.Array:
        """[G, L, K, C, h]: the cells at these positions [G, L, K, C], read where they lie."""
        _, heads, slots, _ = self.flat.shape
        pages = jnp.take_along_axis(self.places[:, :, None], positions // slots, axis=-1, mode="promise_in_bounds")
        head = jnp.arange(heads, dtype=jnp.int32)[:, None]
        return self.flat.at[pages, head, positions % slots].get(mode="promise_in_bounds")

    def with_retained(self, retained: jax.Array, due: jax.Array) -> jax.Array:
        """The array with the cells at the positions `retained` [G, L, K, C] as the first ones of rows that are due
        [G]."""
        slots, budget = self.flat.shape[-2], retained.shape[-1]
        count = -(-budget // slots)  # pages that are written, as a whole
        rest = jnp.arange(budget, count * slots, dtype=retained.dtype)
        rest = jnp.broadcast_to(rest, (*retained.shape[:-1], rest.size))
        cells = self.cells_at(jnp.concatenate([retained, rest], axis=-1))
        cells = einops.rearrange(cells, "g l k (m s) h -> g l m k s h", s=slots)
        nowhere = self.flat.shape[0] + jnp.arange(self.places[..., :count].size, dtype=jnp.int32)
        written = jnp.where(due[:, None, None], self.places[..., :count], nowhere.reshape(*self.places.shape[:2], -1))
        new = self.flat.at[written].set(cells, mode="drop", unique_indices=True)
        return new.reshape(self.array.shape)
