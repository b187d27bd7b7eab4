"""What a bounded cache keeps equals a plain reading of each paper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions
from inferlib.ops.attention_mass import add_mass
from inferlib.ops.cache_policy import METHODS, SINKS, CachePolicy, retained_positions

HEADS, CELLS, WIDTH, BUDGET, INTERVAL = 2, 48, 8, 12, 4


def h2o(keys: np.ndarray, mass: np.ndarray) -> list[float]:
    return [float(mass[max(p - 3, 0) : p + 4].sum()) / 7 for p in range(len(mass))]


def streaming(keys: np.ndarray, mass: np.ndarray) -> list[float]:
    return list(range(len(keys)))


def knorm(keys: np.ndarray, mass: np.ndarray) -> list[float]:
    return [-float(np.sqrt((key**2).sum())) for key in keys]


def keydiff(keys: np.ndarray, mass: np.ndarray) -> list[float]:
    lengths = [max(float(np.sqrt((key**2).sum())), 1e-12) for key in keys]
    anchor = sum(key / length for key, length in zip(keys, lengths, strict=True)) / len(keys)
    size = max(float(np.sqrt((anchor**2).sum())), 1e-12)
    return [-float(key @ anchor) / (length * size) for key, length in zip(keys, lengths, strict=True)]


ORACLES = {"streaming": streaming, "knorm": knorm, "keydiff": keydiff, "h2o": h2o}


def by_the_paper(method: str, keys: np.ndarray, mass: np.ndarray, budget: int, interval: int) -> list[int]:
    """The positions that stay of keys [P, h] that got so much attention [P]: the first, the newest, and those of the
    highest scores."""
    scores = ORACLES[method](keys.astype(np.float64), mass)
    always = [p for p in range(len(keys)) if p < SINKS or p >= len(keys) - interval]
    others = sorted((p for p in range(len(keys)) if p not in always), key=lambda p: (-scores[p], p))
    return sorted(always + others[: budget - len(always)])


def keys_of(kind: str) -> np.ndarray:
    """[K, P, h] float32."""
    rng = np.random.default_rng(len(kind))
    normal = rng.normal(size=(HEADS, CELLS, WIDTH))
    return {
        "normal": lambda: normal,
        # Many scores are equal, and exact.
        "ties": lambda: np.repeat(np.eye(WIDTH)[rng.integers(0, 2, (HEADS, CELLS // 2))], 2, axis=1),
        "outliers": lambda: normal * np.where(rng.random((HEADS, CELLS, 1)) < 0.1, 50, 1),
        "zeros": lambda: np.zeros((HEADS, CELLS, WIDTH)),
    }[kind]().astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_keeps_what_the_paper_keeps(method):
    """Of rows of different lengths, whatever lies behind their cells."""
    policy = CachePolicy(method, BUDGET, INTERVAL)
    chosen = jax.jit(lambda keys, count, mass: retained_positions(keys, count, policy, mass))
    for kind in ("normal", "ties", "outliers", "zeros"):
        for count in (BUDGET, BUDGET + 1, BUDGET + INTERVAL, CELLS):
            keys = keys_of(kind)
            mass = np.random.default_rng(count).integers(0, 9, (HEADS, CELLS)).astype(np.float32)
            spoiled, unknown = keys.copy(), mass.copy()
            spoiled[:, count:] = unknown[:, count:] = np.nan
            positions = np.asarray(chosen(jnp.asarray(spoiled), jnp.int32(count), jnp.asarray(unknown)))
            for head in range(HEADS):
                expected = by_the_paper(method, keys[head, :count], mass[head, :count], BUDGET, INTERVAL)
                assert positions[head].tolist() == expected, (kind, count, head)


def test_each_query_counts_once():
    """Of decode rows and of chunks of several lengths, in stacked layers; whatever lies behind a row's cells, and in
    new cells. Pages without a query's cells stay."""
    rows, columns, page, width, group, layer = 4, 3, 8, 4, 2, 1
    rng = np.random.default_rng(0)
    first, count = np.array([5, 0, -1, 14], np.int32), np.array([3, 2, 0, 1], np.int32)
    q = rng.normal(size=(rows, width, HEADS, group, WIDTH)).astype(np.float32)
    pages = rng.permutation(rows * columns).reshape(rows, columns).astype(np.int32)
    pages[2] = 1 << 30
    keys = np.full((2, rows * columns, HEADS, page, WIDTH), np.nan, np.float32)
    mass = np.full(keys.shape[:-1], np.nan, np.float32)
    rows_keys, before = rng.normal(size=(rows, HEADS, 24, WIDTH)).astype(np.float32), rng.random((rows, HEADS, 24))
    for row, last in enumerate(first + count):
        for p in range(last):
            keys[layer, pages[row, p // page], :, p % page] = rows_keys[row, :, p]
            if p < first[row]:
                mass[layer, pages[row, p // page], :, p % page] = before[row, :, p]
    options = AttentionOptions(0.3, softcap=5.0, sinks=jnp.asarray(rng.normal(size=(HEADS, group)), jnp.float32))
    new = np.asarray(jax.jit(lambda *x: add_mass(*x[:3], x[3:6], options, layer))(mass, keys, pages, q, first, count))
    for row, head in np.ndindex(rows, HEADS):
        expected = np.where(np.arange(24) < first[row], before[row, head], 0)
        for i, g in np.ndindex(count[row], group):
            seen = rows_keys[row, head, : first[row] + i + 1].astype(np.float64)
            logits = 5 * np.tanh(0.3 * seen @ q[row, i, head, g] / 5)
            total = np.exp(logits).sum() + np.exp(float(options.sinks[head, g]))
            expected[: len(seen)] += np.exp(logits) / total
        for p in range(first[row] + count[row]):
            result = new[layer, pages[row, p // page], head, p % page]
            np.testing.assert_allclose(result, expected[p], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(new[0], mass[0])
    unused = [pages[row, c] for row in (0, 1, 3) for c in range(columns) if c * page >= first[row] + count[row]]
    np.testing.assert_array_equal(new[layer, unused], mass[layer, unused])


def test_options():
    assert CachePolicy.read(None) is None
    for text in ("keydiff:64", "keydiff:64:8"):
        assert str(CachePolicy.read(text)) == text
        assert CachePolicy.read(CachePolicy.read(text)) == CachePolicy.read(text)
    wrong = {
        "text such as 'keydiff:2048'": ["keydiff", "keydiff:", "keydiff:-3", "keydiff:2.5", "", 64, True, ["knorm:64"]],
        "has the methods streaming, knorm, keydiff, h2o": ["newest:64"],
        "budget is 37 or more, got 36": ["keydiff:36"],
        "budget is 13 or more, got 12": ["keydiff:12:8"],
        "after 1 position or more": ["keydiff:64:0"],
    }
    for message, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=message):
                CachePolicy.read(value)
