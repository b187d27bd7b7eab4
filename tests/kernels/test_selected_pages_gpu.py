"""The GPU kernel chooses the blocks that XLA's form chooses, over several tiles of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.ops.selected_pages import Selector, selected_attention, selected_blocks, upper_bounds
from inferlib.pallas_kernels.selected_pages_gpu import MOST, TILE, select_blocks

PAGES, EACH, HEADS, GROUP, WIDTH, SIZE = 50, 4, 2, 3, 24, 16  # 200 blocks of a row in tiles of 64
BLOCKS = PAGES * EACH
LENGTHS = [1, SIZE * TILE, SIZE * TILE + 1, 0, SIZE * (BLOCKS - 1) + 1, SIZE * BLOCKS]


@pytest.mark.slow
@pytest.mark.parametrize(("ties", "count"), [(False, 2), (True, 9), (True, BLOCKS - 1)])
def test_chooses_what_xla_chooses(ties, count):
    """Few whole numbers give many equal bounds, of which the first are taken."""
    rng, rows = np.random.default_rng(count), len(LENGTHS)
    draw = (lambda *s: rng.integers(-1, 2, s)) if ties else (lambda *s: rng.normal(size=s))
    q = jnp.asarray(draw(rows, HEADS, GROUP, WIDTH), jnp.float32)
    pages = rng.permutation(rows * PAGES).reshape(rows, PAGES).astype(np.int32)
    keys = draw(rows * PAGES, EACH, HEADS, 2, WIDTH)
    summaries = np.concatenate([keys.min(3), keys.max(3)], axis=-1).astype(np.float32)
    for row, length in enumerate(LENGTHS):  # nobody may read the newest block's, nor those behind it
        for block in range(max(length - 1, 0) // SIZE, BLOCKS):
            summaries[pages[row, block // EACH], block % EACH] = np.nan
    pages[LENGTHS.index(0)] = 1 << 30
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    kernel = partial(select_blocks, size=SIZE, count=count, interpret=True)
    table, seen = jax.jit(kernel)(q, jnp.asarray(summaries), jnp.asarray(pages), lengths)

    @jax.jit
    def by_xla(q, of_rows, lengths):
        bounds = upper_bounds(q[:, None], of_rows)
        return selected_blocks(bounds, jnp.broadcast_to(lengths[:, None, None], (rows, 1, HEADS)), SIZE, count)

    of_rows = summaries[np.minimum(pages, rows * PAGES - 1)].reshape(rows, BLOCKS, HEADS, 2 * WIDTH)
    blocks, expected = by_xla(q, of_rows, lengths)
    blocks = np.asarray(blocks)[:, 0]
    numbers = np.minimum(pages[np.arange(rows)[:, None, None], blocks // EACH], rows * PAGES - 1)
    of_heads = (numbers * HEADS + np.arange(HEADS)[:, None]) * EACH + blocks % EACH
    np.testing.assert_array_equal(np.asarray(seen), np.asarray(expected).reshape(-1))
    np.testing.assert_array_equal(np.asarray(table).reshape(rows, HEADS, count), of_heads)


def test_rows_of_more_blocks_are_left_to_xla():
    """The operation asks first; the kernel itself says why it does not."""
    pages = jnp.zeros((1, MOST + 1), jnp.int32)
    q, lengths = jnp.zeros((1, 1, 1, 16)), jnp.zeros(1, jnp.int32)
    summaries, cells = jnp.zeros((1, 1, 1, 32)), jnp.zeros((1, 1, 16, 16))
    with pytest.raises(ValueError, match=f"{MOST + 1} blocks of a row exceed {MOST}"):
        select_blocks(q, summaries, pages, lengths, size=16, count=2)

    def kernels(pages: jax.Array) -> str:
        attend = partial(selected_attention, options=AttentionOptions(1.0), backend="pallas_gpu")
        return str(jax.make_jaxpr(attend)(q, KvCache(cells, cells, pages=pages), Selector(summaries, 2), lengths))

    assert "select_blocks" in kernels(pages[:, :MOST])
    assert "select_blocks" not in kernels(pages)
