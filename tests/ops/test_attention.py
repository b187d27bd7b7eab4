"""The attention operations against float64 numpy, query by query; slots that no query may see hold NaN."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.ops.attention import merge_attention
from inferlib.ops.cache_write import cache_write, unfolded
from inferlib.ops.decode_attention import decode_attention as decode
from inferlib.ops.quantized import Scheme
from tests.helpers.attention_calls import decode_attention, prefill_attention
from tests.helpers.packed_experts import dequantized, quantized

TOLERANCE = 3e-6  # absolute, on outputs and log-sum-exps of order 1 in float32
KV, GROUP, SIZE = 2, 3, 4
SCALE = 0.7

SINKS = np.random.default_rng(5).normal(size=(KV, GROUP)).astype(np.float32)
OPTIONS = {
    "dense": {},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": SINKS},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window beyond the cache": {"window": 100},
    "ring": {"window": 5, "ring": True},
    "ring of all options": {"window": 5, "ring": True, "softcap": 1.5, "sinks": SINKS},
}


# A limit is one number of a mask, whatever else there is: it is tried without options, and with all.
LIMITED = ("dense", "ring of all options")
OF_LIMITS = [
    pytest.param(name, limit, marks=[pytest.mark.release] * (limit is not None and name not in LIMITED))
    for name in OPTIONS
    for limit in (None, 17)
]
# One program instead of one for each operation, and of all cases.
merge, whole = jax.jit(merge_attention), jax.jit(partial(decode_attention, scale=SCALE))


def random_queries(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(*shape, KV, GROUP, SIZE)).astype(np.float32)


def random_history(rows: int, length: int) -> np.ndarray:
    """Keys and values of every position: [2, N, K, T, h]."""
    return np.random.default_rng(1).normal(size=(2, rows, KV, length, SIZE)).astype(np.float32)


def attend(q, keys, values, position, window=None, softcap=None, sinks=None, ring=False):
    """One query q [K, G, h] at `position` over keys, values [K, T, h]: out [K, G, h], lse [K, G], float64."""
    first = 0 if window is None else max(position - window + 1, 0)
    keys, values = (x[:, first : position + 1].astype(np.float64) for x in (keys, values))
    s = np.einsum("kgh,kth->kgt", q.astype(np.float64), keys) * SCALE
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    p = np.exp(s)
    total = p.sum(-1) + (0 if sinks is None else np.exp(sinks.astype(np.float64)))
    return np.einsum("kgt,kth->kgh", p, values) / total[..., None], np.log(total)


def cache_of(history, slots, first, stop, ring):
    """A cache [N, K, S, h] that holds positions first[n] .. stop[n] - 1 of each row, and NaN elsewhere."""
    cache = np.full((len(history), KV, slots, history.shape[-1]), np.nan, np.float32)
    for row in range(len(first)):
        for position in range(first[row], stop[row]):
            cache[row, :, position % slots if ring else position] = history[row, :, position]
    return cache


@pytest.mark.parametrize(("name", "limit"), OF_LIMITS)
def test_decode(name, limit):
    """Rows of length 0, 1 and more among more pages than rows; a ring of 9 slots wraps twice."""
    options, lengths = OPTIONS[name], [17, 1, 0, 9, 10, 16]
    history, q = random_history(8, 24), random_queries(len(lengths))
    window, ring = options.get("window", 100), options.get("ring", False)
    first = [max(length - window, 0) for length in lengths]
    k, v = (cache_of(x, 8 if ring else 24, first, lengths, ring) for x in history)
    run = jax.jit(partial(decode_attention, scale=SCALE, limit=limit, **options))
    out, lse = map(np.asarray, run(q, k, v, jnp.array(lengths)))
    assert out.dtype == lse.dtype == np.float32
    for row, length in enumerate(lengths):
        expected = (0, -np.inf)
        if length:
            expected = attend(q[row], *history[:, row], length - 1, **options)
        np.testing.assert_allclose(out[row], np.broadcast_to(expected[0], out[row].shape), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(lse[row], np.broadcast_to(expected[1], lse[row].shape), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "limit"), OF_LIMITS)
def test_prefill(name, limit):
    """Chunks of 4 in rows of any order, at the start, in the middle and behind a wrap; one is absent."""
    options, width = OPTIONS[name], 4
    rows, starts = [3, 0, 1, 6, 2], [0, 13, 5, 0, 11]  # row 6 of 5 is absent
    history, q = random_history(5, 24), random_queries(len(rows), width)
    window, ring = options.get("window", 100), options.get("ring", False)
    first, stop = [0] * 5, [0] * 5
    for row, start in zip(rows, starts, strict=True):
        if row < 5:
            first[row], stop[row] = max(start - window + 1, 0), start + width
    k, v = (cache_of(x, 8 if ring else 24, first, stop, ring) for x in history)
    run = jax.jit(partial(prefill_attention, scale=SCALE, limit=limit, **options))
    out, lse = map(np.asarray, run(q, k, v, jnp.array(rows), np.array(starts)[:, None] + np.arange(width)))
    assert out.dtype == lse.dtype == np.float32
    for chunk, (row, start) in enumerate(zip(rows, starts, strict=True)):
        for i in range(width if row < 5 else 0):
            expected = attend(q[chunk, i], *history[:, row], start + i, **options)
            np.testing.assert_allclose(out[chunk, i], expected[0], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(lse[chunk, i], expected[1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["dense", "ring of all options"])
def test_prefill_over_a_quantised_cache(name, dtype):
    """Written as rows and chunks come; what is read is what the values and scales stand for."""
    options, width, starts = OPTIONS[name], 4, [13, 0]
    ring, q = options.get("ring", False), random_queries(2, width)
    history = random_history(2, 24)
    cached = quantized(history, (4,), Scheme(dtype))
    meant = np.asarray(dequantized(cached, (4,)))
    np.testing.assert_allclose(meant, history, rtol=0, atol=0.02 if dtype == "int8" else 0.15)
    first, stop = [max(start - 5, 0) if ring else 0 for start in starts], [start + width for start in starts]
    values = [cache_of(np.asarray(x, np.float32), 8 if ring else 24, first, stop, ring) for x in cached.values]
    values = [np.where(np.isnan(x) & (dtype == "int8"), 77, x).astype(dtype) for x in values]
    scales = [cache_of(x[..., None], 8 if ring else 24, first, stop, ring)[..., 0] for x in cached.scales]
    options = {**options, "scale": SCALE, "k_scales": jnp.asarray(scales[0]), "v_scales": jnp.asarray(scales[1])}
    positions = np.array(starts)[:, None] + np.arange(width)
    out, lse = jax.jit(partial(prefill_attention, **options))(q, *values, np.arange(2), positions)
    for row, start in enumerate(starts):
        for i in range(width):
            expected = attend(q[row, i], *meant[:, row], start + i, **OPTIONS[name])
            np.testing.assert_allclose(out[row, i], expected[0], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(lse[row, i], expected[1], rtol=0, atol=TOLERANCE)


def test_half_precision_accumulates_in_float32():
    """2000 equal keys: a sum of weights in bfloat16 would stop at 256."""
    q = np.ones((1, KV, GROUP, SIZE), jnp.bfloat16)
    k = np.zeros((1, KV, 2000, SIZE), jnp.bfloat16)
    v = np.broadcast_to(np.array([1.0, 2.0, -3.0, 0.5], jnp.bfloat16), k.shape)
    out, lse = jax.jit(partial(decode_attention, scale=1.0))(q, k, v, np.array([2000]))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(v[:, :, :GROUP], np.float32), rtol=1e-2)
    np.testing.assert_allclose(lse, np.log(2000), atol=1e-3)


@pytest.mark.parametrize("cuts", [[], [1], [7], [3, 3], [2, 5, 5, 11], [12], [0, 4]])
def test_merged_parts_equal_the_whole(cuts):
    """Any split of 12 keys gives the same answer, also with empty parts; a row without any key stays empty."""
    history, q = random_history(2, 12), random_queries(2)
    bounds = [0, *cuts, 12]
    outs, lses = [], []
    for start, stop in itertools.pairwise(bounds):
        k, v = np.full((2, 2, KV, 12, SIZE), np.nan, np.float32)
        k[0, :, : stop - start], v[0, :, : stop - start] = history[:, 0, :, start:stop]
        out, lse = whole(q, k, v, jnp.array([stop - start, 0]))
        outs.append(out)
        lses.append(lse)
    out, lse = map(np.asarray, merge(np.stack(outs), np.stack(lses)))
    expected = attend(q[0], *history[:, 0], 11)
    np.testing.assert_allclose(out[0], expected[0], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(lse[0], expected[1], rtol=0, atol=TOLERANCE)
    assert (out[1] == 0).all()
    assert (lse[1] == -np.inf).all()


def test_merging_is_associative():
    rng = np.random.default_rng(3)
    outs, lses = rng.normal(size=(3, 2, SIZE)).astype(np.float32), rng.normal(size=(3, 2)).astype(np.float32) * 20
    at_once = merge(outs, lses)
    pair = merge(outs[:2], lses[:2])
    by_turns = merge(np.stack([pair[0], outs[2]]), np.stack([pair[1], lses[2]]))
    for a, b in zip(at_once, by_turns, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_sinks_join_a_merger_once():
    """Shares without the sinks, merged with them, are attention with them; where nothing is seen it is zero."""
    history, q = random_history(1, 9)[:, 0], random_queries(1)[0]
    shares = [attend(q, *history[:, :, part::2], 8) for part in (0, 1)]
    outs, lses = (np.stack(x).astype(np.float32) for x in zip(*shares, strict=True))
    merged = merge(outs, lses, sinks=SINKS)
    for a, b in zip(merged, attend(q, *history, 8, sinks=SINKS), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)
    out, _ = merge(outs * 0, np.full_like(lses, -np.inf), sinks=SINKS)
    assert (np.asarray(out) == 0).all()


def test_values_of_another_size():
    """Prefill and decode; the first two of four numbers of a value are the attention of values of two."""
    history, q = random_history(2, 9), random_queries(2)
    k, lengths = jnp.asarray(history[0]), jnp.array([9, 4])
    for run in (
        lambda v: decode_attention(q, k, v, lengths, scale=SCALE),
        lambda v: prefill_attention(q[None], k, v, np.array([1]), np.array([[3, 4]]), scale=SCALE),
    ):
        whole, part = (jax.tree.map(np.asarray, jax.jit(run)(x)) for x in (history[1], history[1][..., :2]))
        np.testing.assert_allclose(part[0], whole[0][..., :2], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(part[1], whole[1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", [None, 1])
def test_cache_write(layer):
    """Tokens land at their page and slot; a page of N or more, or a slot of S or more, writes nothing."""
    pages, slots, rng = 3, 5, np.random.default_rng(4)
    shape = (pages, KV, slots, SIZE) if layer is None else (2, pages, KV, slots, SIZE)
    caches = rng.normal(size=(2, *shape)).astype(np.float32)
    new = rng.normal(size=(2, 7, KV, SIZE)).astype(np.float32)
    at = [(0, 0), (2, 4), (1, 3), (3, 1), (700, 2), (1, 5), (0, 600)]
    expected = caches.copy()
    for token, (page, slot) in enumerate(at[:3]):
        target = expected if layer is None else expected[:, layer]
        target[:, page, :, slot] = new[:, token]
    write = jax.jit(cache_write, donate_argnums=0)
    where = [jnp.array(x) for x in zip(*at, strict=True)]
    layer = None if layer is None else jnp.array(layer)
    for cache, x, after in zip(caches, new, expected, strict=True):
        np.testing.assert_array_equal(write(jnp.array(cache), x, *where, layer=layer), after)


@pytest.mark.parametrize("layer", [None, 1])
def test_a_folded_cache_is_written_and_unfolded(layer):
    """Neighbours, positions that share a row, and what must write nothing; everything else keeps its value."""
    fold, slots, size, rng = 4, 1024, 3, np.random.default_rng(5)
    dense = rng.normal(size=(2, 3, KV, slots, size)).astype(np.float32)
    pages, at = np.mgrid[:3, :slots].reshape(2, -1)
    empty = np.zeros((3, KV, slots // fold, fold * size), np.float32)
    write, unfold = jax.jit(cache_write), jax.jit(unfolded, static_argnums=1)
    folded = np.stack([write(empty, layers[pages, :, at], pages, at) for layers in dense])
    np.testing.assert_array_equal(unfold(folded, fold), dense)
    where = [(0, 0), (0, 1), (0, 128), (0, 256), (2, 1023), (1, 600), (3, 1), (1, 1024), (1, 5000)]
    new = rng.normal(size=(len(where), KV, size)).astype(np.float32)
    folded, dense = (folded[0], dense[0]) if layer is None else (folded, dense)
    result = write(folded, new, *map(np.array, zip(*where, strict=True)), layer=layer)
    target = dense if layer is None else dense[layer]
    for token, (page, slot) in enumerate(where[:6]):
        target[page, :, slot] = new[token]
    np.testing.assert_array_equal(unfold(result, fold), dense)


def test_cache_write_converts_to_the_type_of_the_cache():
    cache = jnp.zeros((1, KV, 2, SIZE), jnp.bfloat16)
    new = np.full((1, KV, SIZE), 1.001, np.float32)
    k = cache_write(cache, new, jnp.array([0]), jnp.array([1]))
    assert k.dtype == jnp.bfloat16
    assert (k[0, :, 1] == 1).all()
    assert (k[0, :, 0] == 0).all()


@pytest.mark.parametrize("options", [{}, {"window": 200, "softcap": 0.8, "sinks": SINKS}], ids=["dense", "window"])
def test_many_pages_are_read_as_if_they_were_one(options):
    """On a CPU 512 positions at a time, up to the longest row; pages that no row has hold NaN."""
    rows, columns, page, rng = 4, 9, 128, np.random.default_rng(9)
    lengths = jnp.array([0, 1, 512, 513])
    k, v = rng.normal(size=(2, rows, KV, columns * page, SIZE)).astype(np.float32)
    table = rng.permutation(rows * columns + 2)[: rows * columns].reshape(rows, columns)

    def paged(x: np.ndarray) -> np.ndarray:
        pages = np.full((rows * columns + 2, KV, page, SIZE), np.nan, np.float32)
        pages[table] = np.moveaxis(x.reshape(rows, KV, columns, page, SIZE), 2, 1)
        return pages

    q = rng.normal(size=(rows, KV, GROUP, SIZE)).astype(np.float32)
    weighing = AttentionOptions(SCALE, **options)
    caches = KvCache(k, v), KvCache(paged(k), paged(v), pages=jnp.array(table))
    expected, got = (jax.jit(partial(decode, options=weighing))(q, cache, lengths)[:2] for cache in caches)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE)
