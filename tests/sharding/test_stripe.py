"""Attention over positions dealt out to devices, share by share, equals attention over the whole."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.attention import merge_attention
from inferlib.pallas_kernels import decode_attention_gpu
from inferlib.sharding.stripe import Stripe
from tests.helpers.attention_calls import decode_attention, on_decode_kernel, prefill_attention

KV, GROUP, SIZE, TOTAL = 2, 3, 16, 48
SCALE = 0.3
TOLERANCE = 3e-6


def share_of(history: np.ndarray, stripe: Stripe, firsts, stops, slots: int, *, ring: bool) -> np.ndarray:
    """A device's cache [2, N, K, slots, h] of positions firsts[n] .. stops[n] - 1 of each row; NaN elsewhere."""
    cache = np.full((2, len(firsts), KV, slots, SIZE), np.nan, np.float32)
    of_all = np.asarray(stripe.slots(np.arange(TOTAL), slots, ring=ring))
    for row, (first, stop) in enumerate(zip(firsts, stops, strict=True)):
        positions = np.arange(first, stop)
        at = of_all[first:stop]
        assert ((at < slots) == (positions % stripe.count == stripe.index)).all()
        assert len(set(at.tolist())) == len(at)
        for position, slot in zip(positions, at, strict=True):
            if slot < slots:
                cache[:, row, :, slot] = history[:, row, :, position]
    return cache


def merged(parts) -> jax.Array:
    return jax.jit(merge_attention)(*(np.stack(x) for x in zip(*parts, strict=True)))[0]


@pytest.mark.parametrize(("count", "window", "ring"), [(4, None, False), (3, 12, False), (4, 12, True), (4, 7, True)])
@pytest.mark.fast_cases(2)
def test_shares_merge_to_the_whole(count, window, ring):
    """Chunks of queries, and rows at many lengths; windows that divide over the devices and one that does not."""
    rng, width = np.random.default_rng(count), 12
    starts, lengths = np.array([0, 12, 24]), np.array([1, 2, 3, 11, 12, 13, 30])
    history = rng.normal(size=(2, len(lengths), KV, TOTAL, SIZE)).astype(np.float32)
    options = dict(scale=SCALE, softcap=2.0)
    slots = Stripe(count).max_positions(12 + width if ring else TOTAL)
    stripes = [Stripe(count, index) for index in range(count)]

    q = rng.normal(size=(len(starts), width, KV, GROUP, SIZE)).astype(np.float32)
    rows, positions = np.arange(len(starts)), starts[:, None] + np.arange(width)
    firsts = np.maximum(starts - (window or TOTAL) + 1, 0)
    attend = jax.jit(partial(prefill_attention, **options), static_argnames=("ring", "limit"))
    want, _ = attend(q, *history, rows, positions, window=window)
    parts = []
    for stripe in stripes:
        share = share_of(history, stripe, firsts, starts + width, slots, ring=ring)
        local = dict(window=stripe.window(positions, window), ring=ring, limit=stripe.max_positions(36))
        parts.append(attend(q, *share, rows, stripe.number(positions), **local))
    np.testing.assert_allclose(merged(parts), want, rtol=0, atol=TOLERANCE)

    if window is not None and window % count:
        return  # the decode contract takes one window for all rows
    q, last = q.reshape(-1, KV, GROUP, SIZE)[: len(lengths)], lengths - 1
    firsts = np.maximum(lengths - (window or TOTAL), 0)
    want, _ = jax.jit(partial(decode_attention, window=window, **options))(q, *history, lengths)
    shares = [share_of(history, stripe, firsts, lengths, slots, ring=ring) for stripe in stripes]
    for kernel in (decode_attention, on_decode_kernel(decode_attention_gpu.decode_attention, interpret=True)):
        local = dict(window=stripes[0].window(last, window), ring=ring, limit=stripes[0].max_positions(30))
        attend = jax.jit(partial(kernel, **options, **local))
        parts = [attend(q, *share, stripe.number(last) + 1) for share, stripe in zip(shares, stripes, strict=True)]
        np.testing.assert_allclose(merged(parts), want, rtol=0, atol=TOLERANCE)


def test_take():
    x = np.arange(2 * 12 * 3).reshape(2, 12, 3)
    for index in range(4):
        np.testing.assert_array_equal(Stripe(4, index).take(jnp.array(x), dim=1), x[:, index::4])
    assert Stripe().take(x, dim=1) is x
