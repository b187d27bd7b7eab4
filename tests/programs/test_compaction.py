"""`compact_rows` by itself: rows one after the other, and together as on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions
from inferlib.ops.cache_policy import CachePolicy, best_positions, position_scores
from inferlib.programs.compaction import Compaction, Keys, compact_rows
from inferlib.programs.row_state import RowState
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

LAYERS, ROWS, COLUMNS, HEADS, SLOTS, SIZE = 2, 6, 4, 3, 4, 8
POLICY = CachePolicy("keydiff", 10, 4)
NAMES = ((None, axes.PAGES, axes.KV_HEADS, None, None),) * 2
ENTRIES = ((4, 15), (1, 0), (0, 0), (2, 14), (3, 0), (ROWS, 0), (ROWS, 0), (ROWS, 0))
LENGTH = (14, 14, 16, 13, 15, 14)  # row 0 does not decode, and row 3 is not far enough


def random_state() -> RowState:
    """Rows with pages in random order; the last row has what is due, but nobody asks for it."""
    pages = np.random.default_rng(0).permutation(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    state = RowState(**dict.fromkeys(RowState._fields))
    active = jnp.arange(ROWS) > 0
    return state._replace(
        token=jnp.zeros(ROWS, jnp.int32),
        length=jnp.array(LENGTH),
        dropped=jnp.full(ROWS, 7),
        active=active,
        pages=jnp.asarray(pages, jnp.int32),
    )


def cells_of(array: np.ndarray, state: RowState, row: int) -> np.ndarray:
    """[L, K, M * S, h]."""
    return np.moveaxis(array[:, np.asarray(state.pages)[row]], 1, 2).reshape(LAYERS, HEADS, -1, SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(("together", "fast"), [(1, True), (2, True), (8, True), (1, False)])
def test_due_rows_alone_are_compacted(together, fast):
    state = random_state()
    shape = LAYERS, ROWS * COLUMNS, HEADS, SLOTS, SIZE
    cache = tuple(jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0)))
    how = Compaction(POLICY, (Keys(2, SIZE, AttentionOptions(1.0)),), together=together, fast_gathers=fast)
    entries = jnp.array(ENTRIES, jnp.int32)
    run = jax.jit(compact_rows, static_argnums=(0, 1, 2))
    new, after = run(Shards(), NAMES, how, (cache, state), (), entries)
    counts = {4: 15, 1: 14, 2: 14}  # of these rows; the host says it of rows that are prefilled
    for row in range(ROWS):
        before, now = ([cells_of(np.asarray(x), state, row) for x in arrays] for arrays in (cache, new))
        count = counts.get(row)
        length, dropped = int(after.length[row]), int(after.dropped[row]) - 7
        if count is None:
            assert (length, dropped) == (LENGTH[row], 0)
            np.testing.assert_array_equal(now, before)
            continue
        assert (length, dropped) == (POLICY.budget, count - POLICY.budget)
        scores = position_scores(jnp.asarray(before[0]), jnp.array(count), POLICY)
        retained = np.asarray(best_positions(scores, POLICY.budget))
        for x, y in zip(before, now, strict=True):
            expected = np.take_along_axis(x, retained[..., None], axis=2)
            np.testing.assert_array_equal(y[:, :, : POLICY.budget], expected)


@pytest.mark.parametrize(("platform", "together"), [("gpu", 8), ("tpu", 1), ("cpu", 1)])
def test_how_many_rows_are_compacted_at_once(platform, together):
    assert Compaction.rows_together(platform, 8) == together


MOVING = CachePolicy("keydiff", 20, 3, levels=(20, 36))  # rows have a page more at most, in layers of both levels
FULL = tuple(budget + SLOTS for budget in MOVING.levels)
COUNTS = (20, 21, 23, 24, 22, 23)  # of the rows, in level 0; the last one is not due, and row 4 is active and too short
COMPACTED = ((3, 24), (1, 21), (0, 20), (2, 0), (4, 0), (ROWS, 0), (ROWS, 0), (ROWS, 0))


class Filled(NamedTuple):
    """Rows of pages in both levels, with NaN wherever a row has no cell. arrays: of a block of layers of each level,
    stacked or not: keys, values and numbers of cells. counts [R, 2]: the rows' cells."""

    arrays: tuple[np.ndarray, ...]
    names: tuple[tuple[str | None, ...], ...]
    state: RowState
    counts: np.ndarray

    def cells(self, array: np.ndarray, level: int, row: int) -> np.ndarray:
        """[L, K, P, ...]: of a row, with layers also where there is one."""
        first = sum(FULL[:level]) // SLOTS
        pages = np.asarray(self.state.pages)[row, first : first + FULL[level] // SLOTS]
        stacked = array if array.ndim == 5 - (array.shape[-1] == SLOTS) else array[None]
        cells = np.moveaxis(stacked[:, np.minimum(pages, stacked.shape[1] - 1)], 1, 2)
        return cells.reshape(*cells.shape[:2], -1, *cells.shape[4:])


def filled(stacked: bool) -> Filled:
    rng, pages, arrays, names, count = np.random.default_rng(1), [], [], [], ROWS + 1
    counts = np.array(COUNTS)[:, None] + [0, MOVING.levels[1] - MOVING.levels[0]]
    for level, most in enumerate(FULL):
        columns = most // SLOTS
        table = rng.permutation(count * columns)[: ROWS * columns].reshape(ROWS, columns)
        shape = (*((LAYERS,) if stacked else ()), count * columns, HEADS, SLOTS)
        block = [np.full((*shape, *size), np.nan, np.float32) for size in ((SIZE,), (5,), ())]
        for array, row in np.ndindex(3, ROWS):
            for p in range(counts[row, level]):
                at = (*(slice(None),) * stacked, table[row, p // SLOTS], slice(None), p % SLOTS)
                block[array][at] = rng.normal(size=block[array][at].shape)
        table[np.arange(columns) >= -(-counts[:, level, None] // SLOTS)] = 1 << 30
        pages, arrays = [*pages, table], [*arrays, *block]
        names += [(*((None,) if stacked else ()), axes.PAGES, axes.KV_HEADS, *(None,) * n) for n in (2, 2, 1)]
    state = random_state()._replace(
        length=jnp.array(COUNTS),
        ahead=jnp.asarray(counts[:, 1:] - counts[:, :1], jnp.int32),
        pages=jnp.asarray(np.concatenate(pages, axis=1), jnp.int32),
    )
    return Filled(tuple(arrays), tuple(names), state, counts)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("together", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_few_cells_move_where_their_order_does_not_count(together, stacked):
    """They are those that all move to in order. What stays in place is not moved, the newest are last and in order, and
    nothing else is written."""
    rows, options = filled(stacked), AttentionOptions(1.0)
    keys = tuple(Keys(3, SIZE, options, level) for level in range(2))
    columns = tuple(most // SLOTS for most in FULL)
    results = []
    for fast in (True, False):
        how = Compaction(MOVING, keys, (), together, columns, fast)
        assert how.moves_fewest(20, 24) == fast
        run = jax.jit(compact_rows, static_argnums=(0, 1, 2))
        taken = tuple(map(jnp.asarray, rows.arrays)), rows.state
        results.append(run(Shards(), rows.names, how, taken, (), jnp.array(COMPACTED, jnp.int32)))
    jax.tree.map(np.testing.assert_array_equal, results[0][1], results[1][1])
    new, ordered = ([np.asarray(x) for x in result[0]] for result in results)
    assert results[0][1].length.tolist() == [20, 20, 20, 20, 22, 23]
    assert results[0][1].ahead.tolist() == [[16]] * ROWS
    for level, number, row in np.ndindex(2, 3, ROWS):
        before, after, expected = (rows.cells(x[3 * level + number], level, row) for x in (rows.arrays, new, ordered))
        count, budget = int(rows.counts[row, level]), MOVING.levels[level]
        if row > 3 or count == budget:
            np.testing.assert_array_equal(after, before)
            continue
        older = budget - MOVING.interval
        np.testing.assert_array_equal(after[:, :, older:budget], before[:, :, count - MOVING.interval : count])
        for layer, head in np.ndindex(*before.shape[:2]):
            cells, was, inorder = (x[layer, head].reshape(x.shape[2], -1) for x in (after, before, expected))
            order = np.lexsort(inorder[:budget].T)
            np.testing.assert_array_equal(cells[:budget][np.lexsort(cells[:budget].T)], inorder[:budget][order])
            stay = [p for p in range(older) if (inorder[:budget] == was[p]).all(axis=1).any()]
            np.testing.assert_array_equal(cells[stay], was[stay])
            assert len(stay) >= older - (count - budget)
    free = ~np.isin(np.arange(7 * columns[0]), np.asarray(rows.state.pages)[:, : columns[0]])
    for before, after in zip(rows.arrays[:3], new[:3], strict=True):
        pages = (slice(None), free) if stacked else free
        np.testing.assert_array_equal(after[pages], before[pages])


def test_arrays_of_a_block_move_together():
    """A cell's key, value and number come from the same position."""
    rows = filled(stacked=True)
    keys, values, numbers = (x[..., :1] if x.ndim == 5 else x[..., None] for x in rows.arrays[:3])
    block = keys, values * 0 + keys, numbers * 0 + keys
    arrays = tuple(jnp.asarray(x if n < 2 else x[..., 0]) for n, x in enumerate(block))
    state = rows.state._replace(ahead=None, pages=rows.state.pages[:, : FULL[0] // SLOTS])
    how = Compaction(CachePolicy("knorm", 20, 3), (Keys(3, 1, AttentionOptions(1.0)),))
    run = jax.jit(compact_rows, static_argnums=(0, 1, 2))
    new, _ = run(Shards(), rows.names[:3], how, (arrays, state), (), jnp.array(COMPACTED, jnp.int32))
    np.testing.assert_array_equal(new[0], new[1])
    np.testing.assert_array_equal(new[0][..., 0], new[2])
    assert (np.asarray(new[0]) != np.asarray(arrays[0]))[~np.isnan(arrays[0])].any()


@pytest.mark.parametrize(("platform", "fast"), [("gpu", True), ("tpu", False), ("cpu", True)])
def test_where_single_cells_are_moved(platform, fast):
    assert Compaction.gathers_fast(platform) == fast


def test_all_move_where_most_would():
    how = Compaction(CachePolicy("keydiff", 2048), ())
    assert how.moves_fewest(2048, 2560)
    assert not how.moves_fewest(2048, 4096)
    assert not how.moves_fewest(2048, 2048)
    assert not Compaction(CachePolicy("h2o", 2048), ()).moves_fewest(2048, 2560)
