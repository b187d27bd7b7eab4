"""Cayley SGD, held to the paper's formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from inferlib.calibration.cayley import cayley_sgd

_RATES = (1.5, 0.3, 0.2)


def orthogonal(size: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]


def oracle(x: np.ndarray, gradients: list[np.ndarray], decay: float) -> np.ndarray:
    """Algorithm 1 of Li et al. 2020, with its W as they write it, and its retraction in closed form."""
    momentum = np.zeros_like(x)
    for rate, gradient in zip(_RATES, gradients, strict=True):
        momentum = decay * momentum - gradient
        hat = momentum @ x.T - 0.5 * x @ (x.T @ momentum @ x.T)
        w = hat - hat.T
        momentum = w @ x
        half = min(rate, 1 / (np.linalg.norm(w) + 1e-8)) / 2 * w
        one = np.eye(len(x))
        x = np.linalg.inv(one - half) @ (one + half) @ x
    return x


def test_steps_are_those_of_a_float64_oracle_and_stay_orthogonal():
    """Of gradients that let the rate decide, and of one so large that the norm of its step does."""
    start = {"a": orthogonal(12, 0), "b": [orthogonal(4, 1)]}
    draw = np.random.default_rng(2).standard_normal
    gradients = [jax.tree.map(lambda x, s=scale: s * draw(x.shape), start) for scale in (30.0, 0.1, 0.1)]
    optimizer = cayley_sgd(lambda count: jnp.asarray(_RATES)[count], decay=0.9)

    @jax.jit
    def step(matrices, state, gradient):
        updates, state = optimizer.update(gradient, state, matrices)
        return optax.apply_updates(matrices, updates), state

    single = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)  # noqa: E731
    matrices = single(start)
    state = optimizer.init(matrices)
    for gradient in gradients:
        matrices, state = step(matrices, state, single(gradient))
    for ours, x, *of_steps in zip(*map(jax.tree.leaves, (matrices, start, *gradients)), strict=True):
        assert np.abs(ours - x).max() > 0.1
        np.testing.assert_allclose(ours, oracle(x, of_steps, 0.9), atol=1e-5)
        np.testing.assert_allclose(ours.T @ ours, np.eye(len(x)), atol=1e-5)


def test_it_needs_the_matrices():
    optimizer = cayley_sgd(lambda count: 1.0)
    with pytest.raises(ValueError, match="give them to update"):
        optimizer.update(jnp.eye(2), optimizer.init(jnp.eye(2)))
