"""The gated delta rule, that of Kimi Linear, and the short convolution against sequential references in float64. Eight
seconds."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from inferlib.ops import in_chunks
from inferlib.ops.by_platform import traced_for
from inferlib.ops.causal_conv import causal_conv
from inferlib.ops.gated_delta import gated_delta_chunk, gated_delta_step
from inferlib.ops.kimi_delta import kimi_delta_chunk, kimi_delta_step

# Outputs are of the order of 1 to 5.
TOLERANCE = 2e-5


def sequential(q, k, v, log_decay, beta, state, count):
    """One row in turn: q, k [C, K, d_k], v [C, K, G, d_v], log_decay, beta [C, K, G], state [K, G, d_k, d_v]."""
    q, k, v, log_decay, beta, s = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, state))
    outs = np.zeros(v.shape)
    for t in range(count):
        s = s * np.exp(log_decay[t])[..., None, None]
        change = beta[t][..., None] * (v[t] - np.einsum("kgdv,kd->kgv", s, k[t]))
        s = s + k[t][:, None, :, None] * change[..., None, :]
        outs[t] = np.einsum("kgdv,kd->kgv", s, q[t])
    return outs, s


def draw(rng, rows, tokens, heads=2, group=3, key=8, value=6, *, fading=1.0, alike=0.0):
    """Inputs and states. alike: how much all keys have in common, which makes the triangular systems hard."""
    q, k = (rng.standard_normal((rows, tokens, heads, key)) for _ in "qk")
    k = (1 - alike) * k + alike * rng.standard_normal((rows, 1, heads, key))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((rows, tokens, heads, group, value))
    log_decay = -fading * rng.exponential(size=v.shape[:-1])
    beta = rng.uniform(0.7 * alike, 1, v.shape[:-1])
    state = rng.standard_normal((rows, heads * group, key, value))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta, state)]


@pytest.mark.parametrize(
    ("tokens", "lengths", "options"),
    [
        (150, [150, 0, 64, 97], {}),
        (150, [150, 1, 63, 65], {"fading": 1e-3, "alike": 0.9}),
        (150, [128, 127, 129, 2], {"fading": 30.0}),
        (64, [64, 33], {"fading": 1e-6, "alike": 1.0}),
        (16, [16, 3, 0, 9], {"alike": 0.5, "heads": 1, "group": 1}),
        (1, [1, 0, 1, 1], {}),
    ],
)
def test_chunks_equal_tokens_in_turn(tokens, lengths, options):
    """Rows of different lengths, the rest of each NaN: hardly any fading, so much that nothing stays, keys alike,
    or all the same: powers of the system's matrix reach 10^17, its inverse does not."""
    rng = np.random.default_rng(tokens + len(options))
    *inputs, state = draw(rng, len(lengths), tokens, **options)
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    poisoned = _where(valid, inputs)
    out, after = map(np.asarray, jax.jit(gated_delta_chunk)(*poisoned, state, valid))
    for row, count in enumerate(lengths):
        before = state[row].reshape(*inputs[2].shape[2:4], *state.shape[2:])
        expected, s = sequential(*(x[row] for x in inputs), before, count)
        np.testing.assert_allclose(out[row, :count], expected[:count], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(after[row], s.reshape(state.shape[1:]), rtol=0, atol=TOLERANCE)
        if not count:
            np.testing.assert_array_equal(after[row], state[row])


def _where(valid: np.ndarray, inputs: list) -> list:
    """NaN elsewhere."""
    return [np.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim)), x, np.nan) for x in inputs]


def test_a_step_equals_a_chunk_of_one_token():
    """Rows that are not live are NaN all over, and stay as they are."""
    *inputs, state = draw(np.random.default_rng(1), 5, 1)
    live = np.array([True, False, True, False, True])
    state[1] = np.nan
    first = _where(live, [x[:, 0] for x in inputs])
    out, after = map(np.asarray, jax.jit(gated_delta_step)(*first, state, live))
    np.testing.assert_array_equal(after[~live], state[~live])
    np.testing.assert_array_equal(out[~live], 0)
    for row in np.flatnonzero(live):
        before = state[row].reshape(*inputs[2].shape[2:4], *state.shape[2:])
        expected, s = sequential(*(x[row] for x in inputs), before, 1)
        np.testing.assert_allclose(out[row], expected[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(after[row], s.reshape(state.shape[1:]), rtol=0, atol=TOLERANCE)


def draw_kimi(rng, rows, tokens, fading, alike):
    """Inputs and states of Kimi Delta Attention; each channel of a key fades by itself."""
    q, k, v, _, beta, state = draw(rng, rows, tokens, group=1, alike=alike)
    log_decay = -fading * rng.exponential(size=k.shape) * rng.choice([1e-3, 1], size=k.shape[-1])
    return q, k, v[:, :, :, 0], log_decay.astype(np.float32), beta[..., 0], state


def kimi_in_turn(q, k, v, log_decay, beta, state, count):
    """One row in turn: q, k, log_decay [C, K, d_k], v [C, K, d_v], beta [C, K], state [K, d_k, d_v]."""
    q, k, v, log_decay, beta, s = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, state))
    outs = np.zeros(v.shape)
    for t in range(count):
        s = s * np.exp(log_decay[t])[..., None]
        change = beta[t][:, None] * (v[t] - np.einsum("kdv,kd->kv", s, k[t]))
        s = s + k[t][..., None] * change[:, None]
        outs[t] = np.einsum("kdv,kd->kv", s, q[t])
    return outs, s


@pytest.mark.parametrize(
    ("tokens", "lengths", "fading", "alike"),
    [
        (150, [150, 0, 64, 97], 1.0, 0.0),
        (150, [150, 1, 63, 65], 1e-3, 0.9),
        (150, [128, 127, 129, 2], 30.0, 0.0),
        (16, [16, 3, 0, 9], 1.0, 0.5),
        (3, [3, 1], 1.0, 0.0),
    ],
)
def test_kimi_chunks_equal_tokens_in_turn(tokens, lengths, fading, alike):
    """As of the gated delta rule; some channels hardly fade, others so much that nothing stays."""
    rng = np.random.default_rng(tokens)
    *inputs, state = draw_kimi(rng, len(lengths), tokens, fading, alike)
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    out, after = map(np.asarray, jax.jit(kimi_delta_chunk)(*_where(valid, inputs), state, valid))
    for row, count in enumerate(lengths):
        expected, s = kimi_in_turn(*(x[row] for x in inputs), state[row], count)
        np.testing.assert_allclose(out[row, :count], expected[:count], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(after[row], s, rtol=0, atol=TOLERANCE)
        if not count:
            np.testing.assert_array_equal(after[row], state[row])


@pytest.mark.slow
@pytest.mark.parametrize(("fading", "alike"), [(1e-3, 0.9), (1e-6, 1.0)])
def test_what_trainium_gets_computes_the_same(fading, alike, monkeypatch):
    """Unrolled loops, and triangular systems that are solved by blocks: of keys that are alike, or all the same."""
    taken = []

    def on_trainium(*arguments, neuron, default):
        taken.append(neuron)
        return neuron(*arguments)

    rng, valid = np.random.default_rng(3), np.ones((2, 150), bool)
    for rule, inputs in (
        (gated_delta_chunk, draw(rng, 2, 150, fading=fading, alike=alike)),
        (kimi_delta_chunk, draw_kimi(rng, 2, 150, fading, alike)),
    ):
        expected = jax.jit(lambda *args, rule=rule: rule(*args))(*inputs, valid)
        with traced_for(None), monkeypatch.context() as patched:
            patched.setattr(in_chunks.lax, "platform_dependent", on_trainium)
            got = jax.jit(lambda *args, rule=rule: rule(*args))(*inputs, valid)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)
    assert len(taken) == 4


def test_a_kimi_step_equals_a_chunk_of_one_token():
    *inputs, state = draw_kimi(np.random.default_rng(2), 5, 1, 1.0, 0.0)
    live = np.array([True, False, True, False, True])
    state[1] = np.nan
    out, after = map(np.asarray, jax.jit(kimi_delta_step)(*_where(live, [x[:, 0] for x in inputs]), state, live))
    np.testing.assert_array_equal(after[~live], state[~live])
    np.testing.assert_array_equal(out[~live], 0)
    for row in np.flatnonzero(live):
        expected, s = kimi_in_turn(*(x[row] for x in inputs), state[row], 1)
        np.testing.assert_allclose(out[row], expected[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(after[row], s, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_convolution_goes_on_where_it_ended(tokens):
    """Of rows with fewer valid tokens, none and fewer than the tail; what is not valid is NaN."""
    rng, taps = np.random.default_rng(tokens), 4
    x, tail, weight = (rng.standard_normal(s).astype(np.float32) for s in ((3, tokens, 2, 5), (3, 3, 2, 5), (4, 2, 5)))
    lengths = np.array([tokens, 0, tokens // 2], np.int32)
    valid = np.arange(tokens) < lengths[:, None]
    padded = np.where(valid[..., None, None], x, np.nan)
    out, after = map(np.asarray, jax.jit(causal_conv)(padded, tail, weight, lengths))
    for row, count in enumerate(lengths):
        inputs = np.concatenate([tail[row], x[row, :count]]).astype(np.float64)
        expected = [(inputs[t : t + taps] * weight).sum(0) for t in range(count)]
        np.testing.assert_allclose(out[row, :count], np.reshape(expected, (count, 2, 5)), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(after[row], inputs[count:].astype(np.float32))
