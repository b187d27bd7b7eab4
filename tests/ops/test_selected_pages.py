"""Decode attention that selects blocks equals a plain reading of the paper on the cells that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions, KvCache, NewCells
from inferlib.ops import selected_pages
from inferlib.ops.decode_attention import decode_attention
from inferlib.ops.selected_pages import (
    PageSelection,
    Selector,
    selected_attention,
    selects,
    wanted_pages,
    write_summaries,
)

PAGE, COLUMNS, HEADS, GROUP, WIDTH, BLOCK = 32, 5, 2, 2, 16, 16
COUNT, SCALE = 4, 0.3  # 10 blocks of a row, of which four are read
EDGE = COUNT * BLOCK  # so many positions are read whole
# Around the ends of blocks, of pages and of what is read whole; an inactive row; all slots.
LENGTHS = [1, 15, 16, 17, 32, 33, EDGE - 1, EDGE, EDGE + 1, 0, 95, 96, 97, 128, 129, PAGE * COLUMNS]
# Interpreted kernels for TPUs compile in a time that grows with the rows: of each kind one.
ONE_OF_EACH = [1, 33, EDGE + 1, 0, PAGE * COLUMNS]


class Inputs(NamedTuple):
    """lengths: of the rows. A row's cells in order of their positions, keys and values [B, K, M * S, h]; the cache has
    NaN elsewhere. bases [K, h, d]: of what summaries are."""

    lengths: list[int]
    q: np.ndarray
    rows: tuple[np.ndarray, np.ndarray]
    cache: KvCache
    summaries: jax.Array
    new: NewCells | None
    bases: np.ndarray

    @property
    def selector(self) -> Selector:
        whole = self.bases.shape[2] == WIDTH
        return Selector(self.summaries, COUNT, None if whole else jnp.asarray(self.bases))


def inputs(kind: str, queries: int = 1, directions: int = WIDTH, lengths: list[int] = LENGTHS) -> Inputs:
    """Of a single query the cell is not in the cache yet. directions: of the bases, if they are
    fewer than WIDTH."""
    rng, rows = np.random.default_rng(len(kind)), len(lengths)
    draw = {
        "normal": lambda *shape: rng.normal(size=shape),
        # Many blocks have the same bound, and the sums are exact.
        "ties": lambda *shape: rng.integers(-1, 2, shape),
        # A block's bound is set by single cells, and most dimensions have one sign.
        "outliers": lambda *shape: rng.normal(size=shape) * (rng.random(shape) < 0.05) * 30 + 0.1,
        "zeros": lambda *shape: np.zeros(shape),
    }[kind]
    k, v = (draw(rows, HEADS, COLUMNS * PAGE, WIDTH).astype(np.float32) for _ in "kv")
    q = draw(rows, queries, HEADS, GROUP, WIDTH).astype(np.float32)
    table = rng.permutation(rows * COLUMNS).reshape(rows, COLUMNS).astype(np.int32)
    table[lengths.index(0)] = 1 << 30  # a free row's may be any
    arrays = [np.full((rows * COLUMNS, HEADS, PAGE, WIDTH), np.nan, np.float32) for _ in "kv"]
    summaries = np.full((rows * COLUMNS, PAGE // BLOCK, HEADS, 2 * directions), np.nan, np.float32)
    bases = np.stack([np.eye(WIDTH, dtype=np.float32)] * HEADS)
    if directions < WIDTH:
        bases = np.linalg.qr(rng.normal(size=bases.shape))[0][..., :directions].astype(np.float32)
    for row, length in enumerate(lengths):
        for p in range(max(length - (queries == 1), 0)):
            page, slot = table[row, p // PAGE], p % PAGE
            arrays[0][page, :, slot], arrays[1][page, :, slot] = k[row, :, p], v[row, :, p]
        for first in range(0, length - BLOCK + 1, BLOCK):
            keys = k[row, :, first : first + BLOCK] @ bases
            place = table[row, first // PAGE], first % PAGE // BLOCK
            summaries[place] = np.concatenate([keys.min(1), keys.max(1)], axis=-1)
    last = np.maximum(np.array(lengths) - 1, 0)
    new = NewCells([jnp.asarray(x[np.arange(rows), :, last]) for x in (k, v)]) if queries == 1 else None
    cache = KvCache(*map(jnp.asarray, arrays), pages=jnp.asarray(table), limit=PAGE * COLUMNS)
    return Inputs(lengths, q, (k, v), cache, jnp.asarray(summaries), new, bases)


def blocks_by_the_paper(
    q: np.ndarray, keys: np.ndarray, length: int, there: Callable[[int], bool] = lambda block: True
) -> list[int]:
    """The blocks that queries [G, h] of one head read of keys [P, h], as they are or in the directions of a basis: the
    first, the newest, and those that are there whose largest possible product with a query is the highest."""
    newest, bounds = (length - 1) // BLOCK, {}
    for block in filter(there, range(1, newest)):
        cells = keys[block * BLOCK : (block + 1) * BLOCK]
        products = np.maximum(q * cells.min(0), q * cells.max(0)).sum(axis=-1, dtype=np.float64)
        bounds[block] = products.max()
    best = sorted(bounds, key=lambda block: (-bounds[block], block))[: COUNT - 2]
    return sorted({0, newest, *best})


def by_the_paper(
    it: Inputs, row: int, head: int, query: int, sinks: np.ndarray | None, there: Any = lambda block: True
) -> np.ndarray:
    """The output [G, h] of one query of a row, of those blocks that are there."""
    length = it.lengths[row] - it.q.shape[1] + query + 1
    if length <= 0:
        return np.zeros((GROUP, WIDTH))
    q, (k, v) = it.q[row, query, head], (x[row, head].astype(np.float64) for x in it.rows)
    blocks = blocks_by_the_paper(q @ it.bases[head], k @ it.bases[head], length, there)
    positions = [p for block in blocks for p in range(block * BLOCK, (block + 1) * BLOCK)]
    positions = [p for p in positions if p < length]
    logits = SCALE * q @ k[positions].T
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[head][:, None] - top))
    return weights @ v[positions] / total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "queries", "backend", "directions"),
    [
        *((kind, 1, "xla", WIDTH) for kind in ("normal", "ties")),
        pytest.param("zeros", 1, "xla", WIDTH, marks=pytest.mark.release),
        pytest.param("ties", 3, "pallas_gpu", WIDTH, marks=pytest.mark.release),
        *(("zeros", 1, "pallas_gpu", WIDTH), ("ties", 1, "pallas_tpu", WIDTH)),
        *(("outliers", 3, "xla", 4), ("normal", 3, "pallas_gpu", 4)),
    ],
)
def test_reads_what_the_paper_reads(kind, queries, backend, directions):
    it = inputs(kind, queries, directions, ONE_OF_EACH if backend == "pallas_tpu" else LENGTHS)
    sinks = np.random.default_rng(1).normal(size=(HEADS, GROUP)).astype(np.float32) if kind == "normal" else None
    options = AttentionOptions(SCALE, sinks=None if sinks is None else jnp.asarray(sinks))
    q = jnp.asarray(it.q if queries > 1 else it.q[:, 0])
    attend = partial(selected_attention, options=options, backend=backend)
    lengths = jnp.asarray(it.lengths, jnp.int32)
    out, lse, cache = jax.jit(lambda *x: attend(*x, new=it.new))(q, it.cache, it.selector, lengths)
    out = np.asarray(out).reshape(it.q.shape)
    for row, query, head in np.ndindex(len(it.lengths), queries, HEADS):
        expected = by_the_paper(it, row, head, query, sinks)
        np.testing.assert_allclose(out[row, query, head], expected, rtol=2e-5, atol=2e-5, err_msg=f"{row} {head}")
    inactive = np.asarray(lse).reshape(len(it.lengths), -1)[it.lengths.index(0)]
    assert np.all(inactive == -np.inf)
    for new, x in zip(cache.arrays, it.rows, strict=True):  # all cells are in their places
        for row, length in enumerate(it.lengths):
            cells = np.concatenate([new[page] for page in np.clip(it.cache.pages[row], 0, new.shape[0] - 1)], axis=1)
            np.testing.assert_array_equal(cells[:, :length], x[row, :, :length])


@pytest.mark.parametrize(
    ("kind", "directions", "backend"),
    [("normal", WIDTH, "xla"), ("ties", WIDTH, "xla"), ("outliers", 4, "xla"), ("normal", WIDTH, "pallas_gpu")],
)
@pytest.mark.fast_cases(2)
def test_pages_that_are_not_there(kind, directions, backend):
    """The best of the others are read, whatever is in their place, and they are counted as wanted."""
    it, rng = inputs(kind, directions=directions), np.random.default_rng(2)
    table, (k, v) = np.array(it.cache.pages), (np.array(x) for x in it.cache.arrays)
    newest = (np.maximum(it.lengths, 1) - 1) // PAGE
    absent = (rng.random(table.shape) < 0.5) & (np.arange(COLUMNS) > 0) & (np.arange(COLUMNS) < newest[:, None])
    absent[-1, 1:-1] = True  # fewer blocks than are read
    k[table[absent]] = v[table[absent]] = np.nan
    cache = replace(it.cache.with_arrays([jnp.asarray(k), jnp.asarray(v)]), pages=jnp.where(absent, -1, table))
    selector, lengths = replace(it.selector, places=jnp.asarray(table)), jnp.asarray(it.lengths, jnp.int32)

    @jax.jit
    def both(q, cache, selector):
        how: Any = dict(options=AttentionOptions(SCALE), new=it.new, backend=backend)
        out = selected_attention(q, cache, selector, lengths, **how)[0]
        return out, wanted_pages(q, cache, selector, lengths)

    out, wanted = map(np.asarray, both(jnp.asarray(it.q[:, 0]), cache, selector))
    for row, length in enumerate(it.lengths):
        counts = np.zeros(COLUMNS, int)
        there = [not absent[row, block * BLOCK // PAGE] for block in range(COLUMNS * PAGE // BLOCK)].__getitem__
        for head in range(HEADS):
            expected = by_the_paper(it, row, head, 0, None, there)
            np.testing.assert_allclose(out[row, head], expected, rtol=2e-5, atol=2e-5, err_msg=f"{row} {head}")
            of_head = it.q[row, 0, head] @ it.bases[head], it.rows[0][row, head].astype(np.float64) @ it.bases[head]
            for block in blocks_by_the_paper(*of_head, length) if length else ():
                counts[block * BLOCK // PAGE] += block not in (0, (length - 1) // BLOCK)
        assert wanted[row].tolist() == [*counts, counts[absent[row]].sum()]
    assert wanted[:, -1].sum() > 5


def test_rows_within_what_is_read_attend_in_full():
    """The same positions in the same order; of longer rows something is left out."""
    it, options, lengths = inputs("normal"), AttentionOptions(SCALE), jnp.asarray(LENGTHS, jnp.int32)

    @jax.jit
    def both(q, cache, selector):
        selected = selected_attention(q, cache, selector, lengths, options, new=it.new)[0]
        return selected, decode_attention(q, cache, lengths, options, new=it.new)[0]

    out, full = map(np.asarray, both(jnp.asarray(it.q[:, 0]), it.cache, it.selector))
    short = np.array(LENGTHS) <= EDGE
    np.testing.assert_allclose(out[short], full[short], rtol=0, atol=1e-6)
    assert np.abs(out - full)[~short].max(axis=(1, 2, 3)).min() > 1e-3
    assert selects(COLUMNS, it.summaries, COUNT)
    assert not selects(COLUMNS, it.summaries, COLUMNS * PAGE // BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5, 39])
def test_many_blocks_are_sorted_and_few_are_counted(count, monkeypatch):
    """Both find the same blocks, of equal bounds the first; bounds that count for nothing may be anything."""
    rng = np.random.default_rng(count)
    bounds, lengths = rng.integers(-2, 3, (60, 40)).astype(np.float32), rng.integers(0, 40 * BLOCK + 1, 60)
    for row, length in enumerate(lengths):
        bounds[row, max(length - 1, 0) // BLOCK :] = np.nan
    results = []
    for most in (40, 39):
        monkeypatch.setattr(selected_pages, "_COUNTED", most)
        inputs = jnp.asarray(bounds), jnp.asarray(lengths, jnp.int32)
        choose = jax.jit(lambda *x: selected_pages.selected_blocks(*x, BLOCK, count))
        results.append([np.asarray(x) for x in choose(*inputs)])
    for counted, ordered in zip(*results, strict=True):
        np.testing.assert_array_equal(counted, ordered)
    for blocks, row, length in zip(results[0][0], bounds, lengths, strict=True):
        newest = max(int(length) - 1, 0) // BLOCK
        best = sorted(range(1, newest), key=lambda i: (-row[i], i))[: max(count - 2, 0)]
        assert set(blocks.tolist()) == {0, newest, *best}


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("scaled", [False, True])
def test_summaries_are_of_the_cells_alone(layer, scaled):
    """Whatever a page had, NaN included; pages that do not exist are dropped, and others stay."""
    rng = np.random.default_rng(0)
    keys, scales = rng.integers(-9, 9, (2, 4, HEADS, PAGE, WIDTH)), rng.random((2, 4, HEADS, PAGE), np.float32)
    keys = keys.astype(np.int8 if scaled else np.float32)
    old = np.full((2, 4, PAGE // BLOCK, HEADS, 2 * WIDTH), np.nan, np.float32)
    arrays = [keys, scales] if scaled else [keys]
    arrays, of = ([x[1] for x in arrays], old[1]) if layer is None else (arrays, old)
    pages, places = jnp.asarray([3, 5, 0]), jnp.asarray([1, 0, 0])
    new = write_summaries(jnp.asarray(of), [jnp.asarray(x) for x in arrays], pages, places, layer)
    numbers = keys[1] * (scales[1][..., None] if scaled else 1)
    expected = old.copy()
    for page, place in ((3, 1), (0, 0)):
        cells = numbers[page, :, place * BLOCK : (place + 1) * BLOCK]
        expected[1, page, place] = np.concatenate([cells.min(1), cells.max(1)], axis=-1)
    np.testing.assert_array_equal(new, expected[1] if layer is None else expected)


@pytest.mark.slow
def test_summaries_in_the_directions_of_bases():
    """Of cells that hold a value behind the key, too."""
    rng = np.random.default_rng(0)
    cells = rng.normal(size=(4, HEADS, PAGE, WIDTH + 3)).astype(np.float32)
    bases = rng.normal(size=(HEADS, WIDTH, 4)).astype(np.float32)
    old = jnp.full((4, PAGE // BLOCK, HEADS, 8), jnp.nan)
    new = write_summaries(old, [jnp.asarray(cells)], jnp.asarray([3]), jnp.asarray([1]), basis=jnp.asarray(bases))
    keys = cells[3, :, BLOCK:, :WIDTH] @ bases
    np.testing.assert_allclose(new[3, 1], np.concatenate([keys.min(1), keys.max(1)], axis=-1), rtol=0, atol=1e-5)


def test_options():
    assert PageSelection.read(None) is None
    for text in ("quest:64", "quest:64:16", "loki:64", "quest:64:resident=96", "loki:64:16:resident=9"):
        assert str(PageSelection.read(text)) == text
        assert PageSelection.read(PageSelection.read(text)) == PageSelection.read(text)
    wrong = {
        "text such as 'quest:64'": [
            "quest",
            "quest:",
            "quest:-3",
            "quest:2.5",
            "",
            64,
            True,
            "quest:1:2:3",
            "quest:2:resident",
            "quest:2:resident=-1",
            "quest:resident=4",
            ["quest:2"],
        ],
        "has the methods quest, loki": ["sparq:64"],
        "reads 2 pages or more": ["quest:1", "quest:0:16"],
        "a power of two": ["quest:4:24", "quest:4:0"],
        "2 resident pages or more": ["quest:4:resident=1", "quest:4:16:resident=0"],
    }
    for message, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=message):
                PageSelection.read(value)
