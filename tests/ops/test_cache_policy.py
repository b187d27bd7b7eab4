"""What a bounded cache keeps equals a plain reading of each paper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.cache_policy import METHODS, SINKS, CachePolicy, retained_positions

HEADS, CELLS, WIDTH, BUDGET, INTERVAL = 2, 48, 8, 12, 4


def streaming(keys: np.ndarray) -> list[float]:
    return list(range(len(keys)))


def knorm(keys: np.ndarray) -> list[float]:
    return [-float(np.sqrt((key**2).sum())) for key in keys]


def keydiff(keys: np.ndarray) -> list[float]:
    lengths = [max(float(np.sqrt((key**2).sum())), 1e-12) for key in keys]
    anchor = sum(key / length for key, length in zip(keys, lengths, strict=True)) / len(keys)
    size = max(float(np.sqrt((anchor**2).sum())), 1e-12)
    return [-float(key @ anchor) / (length * size) for key, length in zip(keys, lengths, strict=True)]


ORACLES = {"streaming": streaming, "knorm": knorm, "keydiff": keydiff}


def by_the_paper(method: str, keys: np.ndarray, budget: int, interval: int) -> list[int]:
    """The positions that stay of keys [P, h]: the first, the newest, and those of the highest scores."""
    scores = ORACLES[method](keys.astype(np.float64))
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
    chosen = jax.jit(lambda keys, count: retained_positions(keys, count, policy))
    for kind in ("normal", "ties", "outliers", "zeros"):
        for count in (BUDGET, BUDGET + 1, BUDGET + INTERVAL, CELLS):
            keys = keys_of(kind)
            spoiled = keys.copy()
            spoiled[:, count:] = np.nan
            positions = np.asarray(chosen(jnp.asarray(spoiled), jnp.int32(count)))
            for head in range(HEADS):
                expected = by_the_paper(method, keys[head, :count], BUDGET, INTERVAL)
                assert positions[head].tolist() == expected, (kind, count, head)


def test_options():
    assert CachePolicy.read(None) is None
    for text in ("keydiff:64", "keydiff:64:8"):
        assert str(CachePolicy.read(text)) == text
        assert CachePolicy.read(CachePolicy.read(text)) == CachePolicy.read(text)
    wrong = {
        "text such as 'keydiff:2048'": ["keydiff", "keydiff:", "keydiff:-3", "keydiff:2.5", "", 64, True, ["knorm:64"]],
        "has the methods streaming, knorm, keydiff": ["newest:64"],
        "budget is 37 or more, got 36": ["keydiff:36"],
        "budget is 13 or more, got 12": ["keydiff:12:8"],
        "after 1 position or more": ["keydiff:64:0"],
    }
    for message, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=message):
                CachePolicy.read(value)
