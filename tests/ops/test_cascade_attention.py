"""Attention of rows that share a prefix equals that of each row alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions, KvCache, NewCells, SharedPrefixes
from inferlib.ops.cascade_attention import cascade_attention, takes
from inferlib.ops.decode_attention import decode_attention
from inferlib.pallas_kernels import cascade_attention_gpu

PAGE, COLUMNS, ROWS, SIZE = 16, 6, 5, 16
LENGTHS = [40, 33, 50, 0, 90]  # the second has one position behind the shared pages, the fourth is inactive


@dataclass(frozen=True)
class Inputs:
    q: jax.Array
    cache: KvCache
    lengths: jax.Array
    new: NewCells


def inputs(group: int, dtype: str = "float32") -> Inputs:
    """Rows 0, 1, 3 and 4 have the same first two pages; cells that no row sees are NaN."""
    rng = np.random.default_rng(group)
    kv_heads, pages = 2, ROWS * COLUMNS
    table = rng.permutation(pages).reshape(ROWS, COLUMNS).astype(np.int32)
    table[[1, 3, 4], :2] = table[0, :2]
    k, v = (np.full((pages, kv_heads, PAGE, SIZE), np.nan, np.float32) for _ in "kv")
    for row, length in enumerate(LENGTHS):
        for position in range(length):
            page, slot = table[row, position // PAGE], position % PAGE
            k[page, :, slot], v[page, :, slot] = rng.normal(size=(2, kv_heads, SIZE))
    q, *new = (rng.normal(size=(ROWS, kv_heads, n, SIZE)).astype(dtype) for n in (group, 1, 1))
    cache = KvCache(jnp.asarray(k, dtype), jnp.asarray(v, dtype), pages=jnp.asarray(table), limit=PAGE * COLUMNS)
    return Inputs(
        jnp.asarray(q), cache, jnp.asarray(LENGTHS, jnp.int32), NewCells([jnp.asarray(x[:, :, 0]) for x in new])
    )


# With 48, tiles are cut to one row each.
@pytest.mark.parametrize(
    ("group", "backend"),
    [
        *((group, backend) for group in (1, 4, 48) for backend in ("xla", "pallas_gpu")),
        *((4, "pallas_tpu"), pytest.param(1, "pallas_tpu", marks=pytest.mark.slow)),
        pytest.param(48, "pallas_tpu", marks=pytest.mark.slow),
    ],
)
def test_equals_rows_alone(backend, group, monkeypatch):
    if backend == "pallas_gpu":
        kernels = partial(cascade_attention_gpu.cascade_attention, interpret=True)
        monkeypatch.setattr(cascade_attention_gpu, "cascade_attention", kernels)
    it = inputs(group)
    none = ROWS + 3
    prefixes = SharedPrefixes(
        jnp.asarray([[4, 0, 1, none], [3, none, none, none], [none] * 4], jnp.int32), jnp.asarray([2, 1, 0], jnp.int32)
    )
    sinks = jnp.asarray(np.random.default_rng(0).normal(size=(2, group)), jnp.float32)
    options = AttentionOptions(0.3, softcap=5.0, sinks=sinks)
    want = jax.jit(partial(decode_attention, options=options, new=it.new))(it.q, it.cache, it.lengths)
    got = jax.jit(
        lambda q, cache, lengths, prefixes: cascade_attention(
            q, cache, lengths, options, prefixes, new=it.new, backend=backend
        )
    )(it.q, it.cache, it.lengths, prefixes)
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)
    for a, b in zip(got[2].arrays, want[2].arrays, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_layers_that_cannot():
    it = inputs(1)
    assert takes(it.cache, AttentionOptions(1.0))
    assert not takes(it.cache, AttentionOptions(1.0, window=8))
    assert not takes(KvCache(it.cache.k, it.cache.v), AttentionOptions(1.0))
