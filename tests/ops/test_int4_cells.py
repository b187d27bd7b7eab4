"""Packed cells of keys and values against numpy, and attention to them against attention to the numbers in them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.ops.decode_attention import decode_attention
from inferlib.ops.int4_cells import KEYS, VALUES, decoded_keys, decoded_values, unsupported
from inferlib.ops.prefill_attention import prefill_attention
from tests.helpers.llms import rounded_cells

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("size", [8, 64, 96])
@pytest.mark.parametrize(("which", "cells"), [("k", KEYS), ("v", VALUES)])
@pytest.mark.fast_cases(3)
def test_numbers_are_those_of_numpy(size, which, cells):
    """But for those next to a border of rounding. The error is half a step at most, and a little where bfloat16 has
    rounded the largest magnitude down."""
    x = GENERATOR.standard_normal((50, 3, size)) * np.exp(GENERATOR.standard_normal((50, 3, 1)))
    x[0, 0] = 0
    x = x.astype(np.float32)
    stored = jax.jit(cells.encode)(x)
    assert (stored.shape, stored.dtype) == ((50, 3, cells.nbytes(size)), jnp.uint8)
    assert cells.size(stored.shape[-1]) == size
    numbers, expected = np.asarray(cells.decode(stored, jnp.float32)), rounded_cells(x, which)
    assert np.mean(np.abs(numbers - expected) > 1e-5 * np.abs(expected)) < 1e-3
    groups = x.reshape(50, 3, -1, cells.group or size)
    largest, top = np.abs(groups).max(-1).repeat(groups.shape[-1], -1), np.abs(x).max(-1, keepdims=True)
    steps = (largest + top / 255) / cells.half
    assert np.all(np.abs(numbers - x) <= steps / 2 + top / 256)
    np.testing.assert_array_equal(numbers[0, 0], 0)
    assert np.linalg.norm(numbers - x) < (0.03 if which == "k" else 0.075) * np.linalg.norm(x)


@pytest.mark.parametrize("cells", [KEYS, VALUES])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_cell_alone(cells, bad):
    x = GENERATOR.standard_normal((4, 16)).astype(np.float32)
    through = jax.jit(lambda x: cells.decode(cells.encode(x), jnp.float32))
    good = np.asarray(through(x))
    x[2, 5] = bad
    numbers = np.asarray(through(x))
    assert not np.isfinite(numbers[2]).any()
    np.testing.assert_array_equal(np.delete(numbers, 2, 0), np.delete(good, 2, 0))


@pytest.mark.slow
def test_attention_reads_the_numbers_in_cells():
    """In pages, all at once and block by block, and in chunks; unseen cells may hold anything."""
    heads, size, slots, lengths = 2, 16, 16, jnp.array([600, 0, 37], jnp.int32)
    pages = jnp.asarray(GENERATOR.permutation(3 * 40).reshape(3, 40), jnp.int32)
    cells = [GENERATOR.standard_normal((120, heads, slots, size)).astype(np.float32) for _ in range(2)]
    k, v = (np.asarray(jax.jit(form.encode)(x)) for form, x in zip((KEYS, VALUES), cells, strict=True))
    seen = np.zeros((120, slots), bool)
    for row, length in enumerate([600, 0, 37]):
        for position in range(length):
            seen[pages[row, position // slots], position % slots] = True
    k, v = (jnp.asarray(np.where(seen[:, None, :, None], x, 255).astype(x.dtype)) for x in (k, v))
    packed = KvCache(k, v, pages=pages)
    decode = (jax.jit(partial(form, dtype=jnp.float32)) for form in (decoded_keys, decoded_values))
    numbers = KvCache(*(form(x) for form, x in zip(decode, (k, v), strict=True)), pages=pages)
    options = AttentionOptions(0.25)
    q = GENERATOR.standard_normal((3, heads, 2, size)).astype(np.float32)
    decode = jax.jit(lambda cache: decode_attention(q, cache, lengths, options)[:2])
    results = [decode(cache) for cache in (packed, numbers)]
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.isfinite(results[0][0]).all()
    chunk = GENERATOR.standard_normal((1, 5, heads, 2, size)).astype(np.float32)
    where = jnp.array([2], jnp.int32), jnp.arange(32, 37, dtype=jnp.int32)[None]
    prefill = jax.jit(lambda cache: prefill_attention(chunk, cache, *where, options))
    results = [prefill(cache) for cache in (packed, numbers)]
    jax.tree.map(np.testing.assert_array_equal, *results)
    for backend in ("pallas_gpu", "pallas_tpu", "nki"):
        with pytest.raises(ValueError, match="takes no packed cells; use xla"):
            decode_attention(q, packed, lengths, options, backend=backend)
        with pytest.raises(ValueError, match="takes no packed cells; use xla"):
            prefill_attention(chunk, packed, *where, options, backend=backend)


def test_heads_that_cannot_be_packed():
    assert unsupported(64) is None
    assert "groups of 8" in str(unsupported(12))
    assert "size 184 is known" in str(unsupported(184))
