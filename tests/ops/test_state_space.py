"""State-space duality against a sequential reference in float64. Five seconds."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from inferlib.ops.state_space import state_space_chunk, state_space_step

# Relative to the largest output.
TOLERANCE = 1e-6


def sequential(q, k, v, log_decay, state, count):
    """One row in turn: q, k [C, K, d_k], v [C, K, G, d_v], log_decay [C, K, G], state [K * G, d_v, d_k]."""
    q, k, v, log_decay, s = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, state))
    s, outs = s.reshape(*v.shape[1:], -1), np.zeros(v.shape)
    for t in range(count):
        s = s * np.exp(log_decay[t])[..., None, None] + v[t][..., None] * k[t][:, None, None]
        outs[t] = np.einsum("kgvd,kd->kgv", s, q[t])
    return outs, s.reshape(state.shape)


def draw(rows, tokens, heads=2, group=3, key=8, value=6, *, fading=1.0):
    rng = np.random.default_rng(tokens)
    q, k = (rng.standard_normal((rows, tokens, heads, key)) for _ in "qk")
    v = rng.standard_normal((rows, tokens, heads, group, value))
    log_decay = -fading * rng.exponential(size=v.shape[:-1])
    state = rng.standard_normal((rows, heads * group, value, key))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, state)]


def poisoned(inputs, valid):
    return [np.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim)), x, np.nan) for x in inputs]


def assert_row(out, after, inputs, state, count):
    expected, s = sequential(*inputs, state, count)
    for got, want in ((out[:count], expected[:count]), (after, s)):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(1, np.abs(want).max(initial=0)))
    if not count:
        np.testing.assert_array_equal(after, state)


@pytest.mark.parametrize(
    ("tokens", "lengths", "options"),
    [
        (300, [300, 0, 128, 190], {}),
        (300, [256, 1, 127, 129], {"fading": 1e-4}),
        (64, [64, 33, 0], {"fading": 30.0, "group": 1}),
        (5, [5, 3, 0], {"heads": 1}),
    ],
)
def test_chunks_equal_tokens_in_turn(tokens, lengths, options):
    """Rows of different lengths, the rest of each NaN: hardly any fading, and so much that nothing stays."""
    *inputs, state = draw(len(lengths), tokens, **options)
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    out, after = map(np.asarray, jax.jit(state_space_chunk)(*poisoned(inputs, valid), state, valid))
    for row, count in enumerate(lengths):
        assert_row(out[row], after[row], [x[row] for x in inputs], state[row], count)


def test_a_step_equals_a_chunk_of_one_token():
    """Rows that are not live are NaN all over, and stay as they are."""
    *inputs, state = draw(4, 1)
    live = np.array([True, False, True, False])
    state[1] = np.nan
    first = poisoned([x[:, 0] for x in inputs], live)
    out, after = map(np.asarray, jax.jit(state_space_step)(*first, state, live))
    np.testing.assert_array_equal(after[~live], state[~live])
    np.testing.assert_array_equal(out[~live], 0)
    for row in np.flatnonzero(live):
        assert_row(out[row][None], after[row], [x[row] for x in inputs], state[row], 1)
