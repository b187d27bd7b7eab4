"""top-k, top-p and min-p against sorting: adversarial logits, ties, a real vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.sampling import SamplingParams, pack, unpack
from inferlib.sampling.sampler import WHOLE, _threshold_bit_by_bit, _threshold_by_digits, keep
from tests.helpers.sampler_reference import reference_keep


@jax.jit
def jit_by_digits(bits, weights, target):
    return _threshold_by_digits(bits, lambda _: jnp.broadcast_to(weights, bits.shape), target, WHOLE, parts=4)


@jax.jit
def jit_bit_by_bit(bits, weights, target):
    return _threshold_bit_by_bit(bits, lambda _: jnp.broadcast_to(weights, bits.shape), target, WHOLE)


@jax.jit
def jit_keep(distance, ints, floats):
    return keep(distance, unpack(ints, floats))


def keep_masks(distance, requests):
    """Masks [N, V] of `keep` for one row of distances under N requests."""
    rows = np.broadcast_to(np.float32(distance), (len(requests), len(distance)))
    return np.asarray(jit_keep(rows, *pack([(request, 0, ()) for request in requests])))


LOGITS = st.one_of(
    st.floats(-1e4, 1e4, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -np.inf, 1e4, -1e4, 1e-30]),
    st.integers(-3, 3).map(float),
)


@pytest.mark.slow
@settings(max_examples=80)
@given(
    logits=st.lists(LOGITS, min_size=24, max_size=24).filter(lambda x: max(x) > -np.inf),
    top_k=st.integers(0, 30),
    top_p=st.one_of(st.floats(1e-9, 1.0), st.sampled_from([1e-40, 0.5, 1.0])),
    min_p=st.one_of(st.floats(1e-30, 1.0), st.sampled_from([0.0, 1.0])),
)
def test_filters_on_adversarial_logits(logits, top_k, top_p, min_p):
    logits = np.float32(logits)
    distance = logits.max() - logits
    by_k, by_p, by_min_p, by_all = keep_masks(
        distance,
        [
            SamplingParams(top_k=top_k),
            SamplingParams(top_p=top_p),
            SamplingParams(min_p=min_p),
            SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p),
        ],
    )
    np.testing.assert_array_equal(by_k, reference_keep(distance, top_k=top_k))
    sure = np.abs(np.exp(-np.float64(distance)) - min_p) > 1e-6 * min_p
    np.testing.assert_array_equal(by_min_p[sure], reference_keep(distance, min_p=min_p)[sure])

    for mask, allowed in ((by_p, np.ones(24, bool)), (by_all, by_k & by_min_p)):
        assert mask[logits.argmax()]
        assert not (mask & ~allowed).any()
        last = distance[mask].max()
        np.testing.assert_array_equal(mask, allowed & (distance <= last))
        if top_p == 1:
            np.testing.assert_array_equal(mask, allowed)
            continue
        # Smallest set that reaches top_p, up to the rounding of a float32 sum.
        probs = np.where(allowed, np.exp(-np.float64(distance)), 0)
        assert probs[mask].sum() >= (top_p - 1e-6) * probs.sum()
        assert probs[mask & (distance < last)].sum() < (top_p + 1e-6) * probs.sum()


def test_filters_equal_sorting_on_a_real_vocabulary():
    rng = np.random.default_rng(4)
    vocab = 50_000
    logits = (rng.normal(size=vocab) * 3).astype(np.float32)
    logits[rng.integers(vocab, size=1000)] = -np.inf
    distance = logits.max() - logits
    requests = [
        *({"top_k": k} for k in (1, 2, 50, 48_000, vocab, vocab + 7)),
        *({"top_p": p} for p in (1e-12, 0.1, 0.5, 0.9, 0.99)),
        {"min_p": 0.02},
        {"top_k": 200, "top_p": 0.7, "min_p": 0.001},
        {},
    ]
    masks = keep_masks(distance, [SamplingParams(**fields) for fields in requests])
    for mask, fields in zip(masks, requests, strict=True):
        np.testing.assert_array_equal(mask, reference_keep(distance, **fields), err_msg=str(fields))
    assert masks[-1].all()


def test_ties_at_the_threshold_are_all_kept():
    distance = np.float32([0, 1, 1, 1, 2, np.inf])
    by_k, by_p = keep_masks(distance, [SamplingParams(top_k=2), SamplingParams(top_p=0.6)])
    assert by_k.tolist() == by_p.tolist() == [True, True, True, True, False, False]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    distances=st.lists(LOGITS, min_size=24, max_size=24),
    target=st.one_of(st.floats(0, 30, width=32), st.sampled_from([1.0, 24.0, np.inf])),
    seed=st.integers(0, 9),
)
def test_few_passes_settle_what_many_do(distances, target, seed):
    """GPUs and TPUs settle three bits of a threshold at a time, GPUs by parts of rows. Weights are eighths: their sums
    are exact in any order."""
    bits = np.abs(np.float32(distances)).view(np.int32)[None]
    for weights in (1.0, np.random.default_rng(seed).integers(0, 9, bits.shape).astype(np.float32) / 8):
        arguments = bits, weights, np.full((1, 1), target, np.float32)
        np.testing.assert_array_equal(jit_by_digits(*arguments), jit_bit_by_bit(*arguments))
