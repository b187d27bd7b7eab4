"""Compact the caches of rows: each keeps the best of its positions (see `inferlib.ops.cache_policy`).

What stays is then in the row's first cells: in order where the policy needs that, otherwise by the fewest moves, with
the newest positions last. From then on a row's cells are numbered as if it had no others, by `RowState.length`, and
`RowState.dropped` says how far its positions are ahead of these numbers. Pages behind the budget may be another row's
as soon as the program has run.

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
from jax import lax

from inferlib.attention_values import AttentionOptions
from inferlib.models.config import AttentionSpec
from inferlib.ops.cache_policy import CachePolicy, Moves, best_positions, fewest_moves, position_scores
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
    a divisor of the entries of a call. columns: how many of a row's pages are of each level; (): all are of one.
    fast_gathers: see `gathers_fast`."""

    policy: CachePolicy
    keys: tuple[Keys, ...]
    queries: Names = ()
    together: int = 1
    columns: tuple[int, ...] = ()
    fast_gathers: bool = True

    def pages_of(self, pages: jax.Array, level: int) -> jax.Array:
        """The pages of a level, of all pages [G, M] of rows."""
        first = sum(self.columns[:level])
        return pages[:, first : first + self.columns[level]] if self.columns else pages

    @staticmethod
    def rows_together(platform: str, entries: int) -> int:
        """All entries of a call on a GPU, which takes 1 ms and more to start the kernels of one compaction, several for
        each layer; elsewhere one, so that nothing is read but rows that are due."""
        return entries if platform == "gpu" else 1

    @staticmethod
    def gathers_fast(platform: str) -> bool:
        """True if single cells are gathered and scattered about as fast as whole pages. On TPUs XLA does it one after
        the other, so there cells are selected by a product of matrices: by the listing for v6e, 65,536 cells of 4
        layers are gathered in 596 us and scattered in much more, and selected among 81,920 in 129."""
        return platform != "tpu"

    def moves_fewest(self, budget: int, total: int) -> bool:
        """True if few cells of a row move, of so many that it may have in layers of this budget, and not all that
        stay."""
        moved = total - budget + self.policy.interval
        return self.fast_gathers and not self.policy.ordered and budget < total and 2 * moved <= budget


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
        length, rows = state.length[row], state.length.size
        pages = lax.optimization_barrier(state.pages[row])  # else each thread that reads a key would look for its row
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
        new = self.moved(blocks, scores, jnp.where(due[:, None] & (counts > budgets), counts, 0))
        if state.ahead is not None:
            ahead = jnp.minimum(counts, budgets)[:, 1:] - least
            state = state._replace(ahead=state.ahead.at[at].set(ahead, mode="drop"))
        assert state.dropped is not None
        state = state._replace(
            length=state.length.at[at].min(least, mode="drop"),
            dropped=state.dropped.at[at].add(count - least, mode="drop"),
        )
        return tuple(new), state

    def moved(self, blocks: list[list[_Paged]], scores: list[jax.Array], counts: jax.Array) -> list[jax.Array]:
        """The arrays of all blocks after cells were moved by their scores [G, L, K, P]. counts [G, levels]: the rows'
        cells, 0 of rows that are not compacted."""
        new: list[jax.Array] = []
        moves, done = self.moves(blocks, scores, counts), dict.fromkeys(range(counts.shape[1]), 0)
        for keys, block, of_block in zip(self.how.keys, blocks, scores, strict=True):
            level, shape = keys.level, of_block.shape[:3]
            if new:  # one block after the other: the cells that all of them read would take gigabytes
                new[-1], moves[level] = lax.optimization_barrier((new[-1], moves[level]))
            rows = slice(done[level], done[level] + math.prod(shape))
            done[level] = rows.stop
            part = jax.tree.map(lambda x, rows=rows, shape=shape: x[rows].reshape(*shape, -1), moves[level])
            new += _moved(block, part, counts[:, level], by_number=self.how.fast_gathers)
        return new

    def moves(self, blocks: list[list[_Paged]], scores: list[jax.Array], counts: jax.Array) -> dict[int, Moves]:
        """How the cells of all blocks of a level move: [B, N] of B KV heads of layers of rows, see `moved`. They are by
        their numbers in the arrays if gathers are fast, else by their positions, and sorted at once, so that a GPU
        starts one sort and not one for each layer."""
        of_level: dict[int, Moves] = {}
        for level, budget in enumerate(self.how.policy.budgets):
            numbers = [number for number, keys in enumerate(self.how.keys) if keys.level == level]
            if not numbers:
                continue
            first = [blocks[number][0] for number in numbers]
            of_rows = [jnp.broadcast_to(counts[:, level, None, None], scores[number].shape[:3]) for number in numbers]
            flat, slots = _joined([scores[number] for number in numbers], 1), first[0].slots
            moves = self.positions(flat, _joined(of_rows), budget, slots)
            if self.how.fast_gathers:
                size = max(len(array.by_number) for array in first)
                moves = _numbered(moves, _joined([array.starts for array in first], 1), slots, size)
            of_level[level] = lax.optimization_barrier(moves)  # else numbers are computed again for each value
        return of_level

    def positions(self, scores: jax.Array, counts: jax.Array, budget: int, slots: int) -> Moves:
        """How positions move of which these scores [B, P] and so many [B] are there, in pages of so many slots. In
        order, sources are also those that are behind the budget in its last page."""
        if self.how.moves_fewest(budget, scores.shape[-1]):
            return fewest_moves(scores, counts, budget, self.how.policy.interval)
        best = best_positions(scores, budget)
        rest = jnp.arange(budget, -(-budget // slots) * slots, dtype=best.dtype)
        return Moves(jnp.concatenate([best, jnp.broadcast_to(rest, (len(best), rest.size))], axis=-1))

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
        # To check that pages are there takes a GPU three times as long.
        there = self.flat.at[self.places].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return einops.rearrange(there, "g l m k s h -> g l k (m s) h")

    @property
    def slots(self) -> int:
        """How many cells a page has of a KV head."""
        return self.flat.shape[-2]

    @property
    def starts(self) -> jax.Array:
        """[G, L, K, M]: the number of the first cell of each of the rows' pages, among all cells of the array."""
        head = jnp.arange(self.flat.shape[1], dtype=jnp.int32)[:, None]
        return (self.places[:, :, None] * len(head) + head) * self.slots

    @property
    def by_number(self) -> jax.Array:
        """The array's cells [L * N * K * S, h]."""
        return self.flat.reshape(-1, self.flat.shape[-1])

    def cells_at(self, numbers: jax.Array) -> jax.Array:
        """[G, L, K, C, h]: the cells of these numbers [G, L, K, C], read where they lie."""
        return self.by_number.at[numbers].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def selected(self, positions: jax.Array, counts: jax.Array) -> jax.Array:
        """[G, L, K, C, h]: the cells at these positions [G, L, K, C] of rows, by a product with a matrix of zeros and
        ones, which is exact of finite ones. counts [G]: how many cells the rows have; others count as 0."""
        cells = self.cells
        at = jnp.arange(cells.shape[-2], dtype=jnp.int32)
        there = (at < counts[:, None])[:, None, None, :, None]
        ones = (positions[..., None] == at).astype(cells.dtype)
        both = ones, jnp.where(there, cells, 0)
        product = jnp.einsum("glkcp,glkph->glkch", *both, precision="highest", preferred_element_type=jnp.float32)
        return product.astype(cells.dtype)

    def with_first(self, cells: jax.Array, due: jax.Array) -> jax.Array:
        """The array with these cells [G, L, K, C, h] as the first ones of rows that are due [G]. C is that of whole
        pages."""
        cells = einops.rearrange(cells, "g l k (m s) h -> g l m k s h", s=self.slots)
        count = cells.shape[2]
        nowhere = self.flat.shape[0] + jnp.arange(self.places[..., :count].size, dtype=jnp.int32)
        written = jnp.where(due[:, None, None], self.places[..., :count], nowhere.reshape(*self.places.shape[:2], -1))
        new = self.flat.at[written].set(cells, mode="drop", unique_indices=True)
        return new.reshape(self.array.shape)


def _joined(arrays: list[jax.Array], last: int = 0) -> jax.Array:
    """Arrays as one, whose first dimension has all but the `last` ones of theirs."""
    return jnp.concatenate([x.reshape(-1, *x.shape[x.ndim - last :]) for x in arrays])


def _numbered(moves: Moves, starts: jax.Array, slots: int, size: int) -> Moves:
    """Moves [B, N] of positions as moves of cells, by their numbers. starts [B, M]: the numbers of the first cells of
    the rows' pages, which have so many slots. size: no cell has this number, or one behind it."""

    def numbers(positions: jax.Array) -> jax.Array:
        first = jnp.take_along_axis(starts, lax.div(positions, slots), axis=-1, mode="clip")
        return first + lax.rem(positions, slots)

    sources, targets = numbers(moves.sources), None
    if moves.targets is not None:
        nowhere = size + jnp.arange(sources.size, dtype=jnp.int32).reshape(sources.shape)
        targets = jnp.where(moves.targets < starts.shape[-1] * slots, numbers(moves.targets), nowhere)
    return Moves(sources, targets)


def _moved(block: list[_Paged], moves: Moves, counts: jax.Array, *, by_number: bool) -> list[jax.Array]:
    """A block's arrays after these moves [G, L, K, N], of cells by number or of positions in order. counts [G]: the
    rows' cells, 0 of rows that are not compacted."""
    targets, new = moves.targets, []
    if targets is None:
        for array in block:
            if new:  # one array after the other, as they read all that stays
                new[-1], moves = lax.optimization_barrier((new[-1], moves))
            cells = array.cells_at(moves.sources) if by_number else array.selected(moves.sources, counts)
            new.append(array.with_first(cells, counts > 0))
        return new
    read = lax.optimization_barrier([array.cells_at(moves.sources) for array in block])  # all, before any is written
    for array, cells in zip(block, read, strict=True):
        at = array.by_number.at[targets]
        written = at.set(cells, mode="drop", unique_indices=True, wrap_negative_indices=False)
        new.append(written.reshape(array.array.shape))
    return new
