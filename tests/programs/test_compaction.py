"""`compact_rows` by itself: rows one after the other, and together as on a GPU."""

from __future__ import annotations

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
@pytest.mark.parametrize("together", [1, 2, 8])
def test_due_rows_alone_are_compacted(together):
    state = random_state()
    shape = LAYERS, ROWS * COLUMNS, HEADS, SLOTS, SIZE
    cache = tuple(jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0)))
    how = Compaction(POLICY, (Keys(2, SIZE, AttentionOptions(1.0)),), together=together)
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
