"""Attention of rows that share a prefix equals that of each row alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.attention_values import AttentionOptions, KvCache, NewCells, SharedPrefixes
from inferlib.ops.attention import masked_attention
from inferlib.ops.cascade_attention import cascade_attention, takes
from inferlib.ops.decode_attention import decode_attention, write_new
from inferlib.pallas_kernels import cascade_attention_gpu, cascade_attention_hopper_gpu
from inferlib.pallas_kernels.decode_attention_gpu import attend_shares
from inferlib.pallas_kernels.merge_prefixes_gpu import Prefixes, merge_prefixes
from inferlib.pallas_kernels.prefill_attention_hopper_gpu import is_hopper
from inferlib.programs.arguments import prefix_shape

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
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "backend"),
    [
        *((4, "xla"), (48, "pallas_gpu"), (4, "pallas_tpu")),
        *(pytest.param(group, "pallas_tpu", marks=pytest.mark.release) for group in (1, 48)),
        pytest.param(1, "pallas_gpu", marks=pytest.mark.release),
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
    cascade = partial(cascade_attention, options=options, new=it.new, backend=backend)
    got = jax.jit(lambda *x: cascade(*x[:3], prefixes=x[3]))(it.q, it.cache, it.lengths, prefixes)
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)
    for a, b in zip(got[2].arrays, want[2].arrays, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def by_xla(shape, scale, q, k, v, table, of_queries) -> tuple[jax.Array, jax.Array]:
    """What `prefill_attention_hopper_gpu.attend_shares` returns for one program a range."""
    keys, values = (jnp.moveaxis(x[table], 1, 2).reshape(len(table), x.shape[1], -1, x.shape[-1]) for x in (k, v))
    position = jnp.arange(keys.shape[2])
    seen = (position >= of_queries.first[..., None]) & (position <= of_queries.last[..., None])
    out, lse = masked_attention(q, keys, values, seen, AttentionOptions(scale))
    return out[None], jnp.moveaxis(lse, 1, -1).reshape(1, len(q), -1, q.shape[1])


@pytest.mark.slow
def test_rows_as_tokens_of_chunks(monkeypatch):
    """Prefixes dealt to chunks of the kernel of prefill attention, which is XLA's here, and merged with rows' own."""
    it = inputs(4)
    monkeypatch.setattr(cascade_attention_hopper_gpu.prefill, "KEYS", PAGE // 2)
    monkeypatch.setattr(cascade_attention_hopper_gpu.prefill, "PROGRAMS", 6 * 2)
    monkeypatch.setattr(cascade_attention_hopper_gpu.prefill, "attend_shares", by_xla)
    none = ROWS + 3
    members = np.full((2, 32), none, np.int32)
    members[0, :3], members[1, :1] = [4, 0, 1], 3
    shared, options = SharedPrefixes(jnp.asarray(members), jnp.asarray([2, 1], jnp.int32)), AttentionOptions(0.3)
    cache = write_new(it.cache, it.new, it.lengths)
    want = jax.jit(partial(decode_attention, options=options))(it.q, cache, it.lengths)

    @jax.jit
    def cascade(q, cache, lengths):
        places = shared.places(lengths > 0)
        pages = jnp.repeat(shared.pages, 32).at[places].get(mode="fill", fill_value=0)
        columns = jnp.minimum(jnp.arange(COLUMNS) + pages[:, None], COLUMNS - 1)
        behind = replace(cache, pages=jnp.take_along_axis(cache.pages, columns, axis=1))
        rest = attend_shares(q, behind, lengths - pages * PAGE, options, interpret=True)
        prefixes = Prefixes(shared, cache.pages, places)
        shares = cascade_attention_hopper_gpu.attend_prefixes(q, behind, prefixes, options)
        return merge_prefixes(rest, shares, places, q.dtype, True)

    for a, b in zip(cascade(it.q, cache, it.lengths), want[:2], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("blocks", [[61, 0, 0], [0, 0, 0], [1, 1, 1], [5, 0, 90], [7, 8, 9], [1, 100, 1]])
@pytest.mark.parametrize("chunks", [3, 8])
def test_prefixes_are_dealt_whole(blocks, chunks):
    """Chunks hold each block of each prefix once, and none has far more than its part."""
    tiles, first, last = cascade_attention_hopper_gpu.dealt(jnp.asarray(blocks), chunks)
    blocks_of = [
        (int(t), b) for t, f, n in zip(tiles, first, last, strict=True) for b in range(f // 128, (n + 1) // 128)
    ]
    assert sorted(blocks_of) == [(t, b) for t, count in enumerate(blocks) for b in range(count)]
    used = sum(count > 0 for count in blocks)
    assert (last - first + 1).max() <= 128 * -(-sum(blocks) // (chunks - max(used, 1) + 1))


@pytest.mark.slow
def test_hopper_lowers_anywhere(monkeypatch):
    """Sixty-four rows of Llama 3 8B in the tiles that GPUs get, for a GPU that is not there."""
    monkeypatch.setattr(cascade_attention_hopper_gpu.prefill, "is_hopper", lambda: True)
    rows, (tiles, width) = 64, prefix_shape(64, "gpu")
    shape = jax.ShapeDtypeStruct
    cells, table = shape((40, 8, 128, 128), jnp.bfloat16), shape((rows, 64), jnp.int32)
    shared = SharedPrefixes(shape((tiles, width - 1), jnp.int32), shape((tiles,), jnp.int32))
    prefixes = Prefixes(shared, table, shape((rows,), jnp.int32))
    of_rows = shape((rows, 8, 4, 128), jnp.bfloat16), KvCache(cells, cells, pages=table), prefixes
    options = AttentionOptions(0.1)

    @jax.jit
    def run(*x):
        assert cascade_attention_hopper_gpu.unsupported(*x, options) is None
        return cascade_attention_hopper_gpu.attend_prefixes(*x, options)[:2]

    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = run.trace(*of_rows).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    assert [x.shape for x in lowered.out_info] == [(16, 32 * 32, 128), (16, 32 * 32)]  # 128 programs of 8 KV heads


# The numbers of the kernel itself, which only such a GPU computes. What surrounds it is tested above, everywhere.
@pytest.mark.skipif(not is_hopper(), reason="needs Hopper GPUs")
@pytest.mark.parametrize("shared", [[61, 61, 0], [3, 8, 0], [9, 0, 40]])
def test_hopper_equals_rows_alone(shared):
    """Sixty-four rows of Llama 3 8B's heads in bfloat16, some behind each prefix, one behind none."""
    rng, rows, columns, rest = np.random.default_rng(0), 64, 64, 3
    table, lengths = np.zeros((rows, columns), np.int32), np.full(rows, 200, np.int32)
    table[:, :rest] = rng.permutation(rows * rest).reshape(rows, rest)
    k, v, q = (rng.normal(size=(n, 8, m, 128)) for n, m in ((400, 128), (400, 128), (rows, 4)))
    members, order = np.full((3, 32), rows, np.int32), rng.permutation(rows - 1)
    for of, some, pages, start in zip(members, np.split(order, [32, 50]), shared, (300, 300, 240), strict=True):
        of[: len(some)] = some
        last = table[some, :rest]
        table[some, :pages] = start + np.arange(pages)
        table[some, pages : pages + rest] = last
        lengths[some] = 128 * pages + rng.integers(1, 128 * rest + 1, len(some))
    half = partial(jnp.asarray, dtype=jnp.bfloat16)
    cache = KvCache(half(k), half(v), pages=jnp.asarray(table), limit=128 * columns)
    prefixes, options = SharedPrefixes(jnp.asarray(members), jnp.asarray(shared, jnp.int32)), AttentionOptions(0.1)
    of_rows = half(q), cache, jnp.asarray(lengths)
    got = jax.jit(partial(cascade_attention, options=options, prefixes=prefixes, backend="pallas_gpu"))(*of_rows)
    want = jax.jit(partial(decode_attention, options=options, backend="pallas_gpu"))(*of_rows)
    for x, y in zip(got[:2], want[:2], strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) <= 6e-3 * np.linalg.norm(y)


def test_layers_that_cannot():
    it = inputs(1)
    assert takes(it.cache, AttentionOptions(1.0))
    assert not takes(it.cache, AttentionOptions(1.0, window=8))
    assert not takes(KvCache(it.cache.k, it.cache.v), AttentionOptions(1.0))
