"""The GPU decode-attention kernel in interpret mode, against float64 numpy, with unseen slots poisoned."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.pallas_kernels import decode_attention_gpu
from inferlib.pallas_kernels.decode_attention_gpu import decode_attention

TOLERANCE = {jnp.float32: 2e-5, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}


def seen_slots(length, slots, window, ring):
    """Slots of the positions that a query at position length - 1 sees."""
    reach = min(length if window is None else window, slots)
    positions = range(max(length - reach, 0), length)
    return [p % slots if ring else p for p in positions]


def make_case(seed, lengths, *, heads=2, group=4, size=64, slots=300, pages=None, window=None, ring=False,
              dtype=jnp.float32, sinks=False):  # fmt: skip
    """Random q, k, v (NaN or inf in every slot that is not seen), lengths and sinks."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    pages = rows if pages is None else pages
    q = rng.normal(size=(rows, heads, group, size))
    k, v = np.full((2, pages, heads, slots, size), np.nan)
    v[:, :, ::2] = np.inf
    for row, length in enumerate(lengths):
        at = seen_slots(length, slots, window, ring)
        k[row][:, at], v[row][:, at] = rng.normal(size=(2, heads, len(at), size))
    extra = jnp.asarray(rng.normal(size=(heads, group)), jnp.float32) if sinks else None
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(lengths, jnp.int32), extra


def oracle(q, k, v, lengths, *, scale, window=None, softcap=None, sinks=None, ring=False):
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for row, length in enumerate(np.asarray(lengths)):
        if length == 0:
            continue
        at = seen_slots(length, k.shape[2], window, ring)
        s = np.einsum("kgh,ksh->kgs", q[row], k[row][:, at]) * scale
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        p = np.exp(s)
        total = p.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
        out[row] = np.einsum("kgs,ksh->kgh", p, v[row][:, at]) / total[..., None]
        lse[row] = np.log(total)
    return out, lse


def check(case, **options):
    """Compare the jitted kernel with the oracle; returns its (out, lse)."""
    q, k, v, lengths, sinks = case
    limit = options.pop("limit", None)
    options.setdefault("scale", q.shape[-1] ** -0.5)
    run = jax.jit(partial(decode_attention, limit=limit, interpret=True, **options))
    out, lse = run(q, k, v, lengths, sinks=sinks)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    want_out, want_lse = oracle(q, k, v, lengths, sinks=sinks, **options)
    tolerance = TOLERANCE[k.dtype.type]
    np.testing.assert_allclose(out.astype(jnp.float32), want_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)
    return out, lse


def test_rows_of_every_length():
    out, lse = check(make_case(0, [0, 1, 2, 64, 299, 300], pages=7))
    assert not out[0].any()
    assert np.all(np.asarray(lse[0]) == -np.inf)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
def test_head_sizes(size):
    check(make_case(size, [1, 33, 300], size=size))


@pytest.mark.parametrize("group", [1, 3, 7, 16, 20])
def test_query_heads_per_kv_head(group):
    check(make_case(group, [5, 300], heads=3, group=group))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    check(make_case(1, [0, 1, 50, 300], dtype=dtype, sinks=True), softcap=20.0)


def test_float32_queries_on_a_bfloat16_cache():
    q, k, v, lengths, _ = make_case(2, [1, 50, 300], dtype=jnp.bfloat16)
    q = q.astype(jnp.float32) * 1.001
    out, _ = check((q, k, v, lengths, None))
    want, _ = oracle(q, k, v, lengths, scale=0.125)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 140, 299, 500])
def test_window(window):
    check(make_case(window, [0, 1, 140, 141, 300], window=window), window=window)


@pytest.mark.parametrize(("slots", "window"), [(40, 25), (40, 100), (200, 150), (200, 200), (16, 1)])
def test_ring_wraps(slots, window):
    case = make_case(slots + window, [0, 1, 39, 40, 41, 200, 1003], slots=slots, window=window, ring=True)
    check(case, window=window, ring=True)


def test_softcap():
    check(make_case(3, [1, 50, 300]), softcap=1.5, scale=1.0)


@pytest.mark.parametrize("limit", [None, 16])
def test_sinks_count_once(limit):
    case = make_case(4, [0, 1, 16], sinks=True)
    _, lse = check(case, limit=limit)
    assert np.all(np.asarray(lse[0]) == -np.inf)


def test_many_shares_and_one_share_agree():
    case = make_case(5, [16, 3])
    one, lse_one = check(case, limit=16)
    many, lse_many = check(case)
    np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse_one, lse_many, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 250])
def test_long_rows_get_more_shares(monkeypatch, window):
    monkeypatch.setattr(decode_attention_gpu, "PROGRAMS", 24)
    check(make_case(9, [300, 20, 280], window=window), window=window)


def test_large_logits_do_not_overflow():
    q, k, v, lengths, sinks = make_case(6, [1, 300], sinks=True)
    out, lse = decode_attention(q * 1e4, k, v, lengths, scale=1.0, sinks=sinks, interpret=True)
    assert np.all(np.isfinite(out))
    assert np.all(np.isfinite(lse))


def test_bad_shapes_and_options_are_refused():
    q, k, v, lengths, _ = make_case(7, [1, 2])
    with pytest.raises(ValueError, match="window"):
        decode_attention(q, k, v, lengths, scale=1.0, ring=True, interpret=True)
    with pytest.raises(ValueError, match="must both be"):
        decode_attention(q, k[:1], v[:1], lengths, scale=1.0, interpret=True)


@pytest.mark.parametrize("size", [64, 80])
def test_lowers_to_triton(size):
    q, k, v, lengths, sinks = make_case(8, [1, 2], size=size, slots=500, dtype=jnp.bfloat16, sinks=True)
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    run = jax.jit(partial(decode_attention, scale=1.0, softcap=5.0, window=300, ring=True))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(q, k, v, lengths, sinks=sinks).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
