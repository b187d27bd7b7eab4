"""The branch of low rank against a float64 oracle by singular values, and what it promises."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.calibration.low_rank import Branch, fit, round_with_branch
from inferlib.calibration.rounding import losses, round_matrix
from inferlib.ops.quantized import SCHEMES

INPUTS, OUTPUTS, RANK = 96, 40, 6


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight and the mean of x x^T over correlated inputs with a few outliers."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((300, INPUTS)) @ generator.standard_normal((INPUTS, INPUTS)) / np.sqrt(INPUTS)
    x[:, ::17] *= 9
    return generator.standard_normal((INPUTS, OUTPUTS)), x.T @ x / len(x)


def cost(error: np.ndarray, h: np.ndarray) -> float:
    return float(np.sum(error * (h @ error)))


def test_the_fit_is_that_of_singular_values_in_float64():
    error, h = draw(0)
    lower = np.linalg.cholesky(h)
    left, sizes, right = np.linalg.svd(lower.T @ error)
    best = np.linalg.solve(lower.T, left[:, :RANK] * sizes[:RANK]) @ right[:RANK]
    ours = Branch(*fit(jnp.asarray(error, jnp.float32), jnp.asarray(h, jnp.float32), RANK))
    assert ours.a.shape == (INPUTS, RANK)
    assert ours.b.shape == (RANK, OUTPUTS)
    assert ours.a.dtype == jnp.bfloat16
    costs = [cost(error - branch, h) for branch in (np.asarray(ours.whole, np.float64), best)]
    assert costs[0] < 1.002 * costs[1] < 0.9 * cost(error, h)
    assert 0.5 < np.linalg.norm(ours.a.astype(jnp.float32)) / np.linalg.norm(ours.b.astype(jnp.float32)) < 2


@pytest.mark.parametrize(("name", "rounding"), [("int4", "nearest"), ("mxfp4", "gptq")])
def test_a_branch_loses_less_than_none(name, rounding):
    w, h = (jnp.asarray(x, jnp.float32) for x in draw(2))
    alone = round_matrix(w, h, SCHEMES[name], 32, rounding)
    rounded, branch = round_with_branch(w, h, SCHEMES[name], 32, rounding, RANK)
    assert jnp.sum(rounded.losses) < 0.75 * jnp.sum(alone.losses)
    np.testing.assert_allclose(rounded.nearest, alone.nearest, rtol=1e-5)
    expected = losses(w - branch.whole, rounded.values, rounded.scales, h)
    np.testing.assert_allclose(rounded.losses, expected, rtol=2e-3)


def test_more_rounds_lose_no_more(monkeypatch):
    w, h = (jnp.asarray(x, jnp.float32) for x in draw(3))
    totals = []
    for rounds in (1, 3):
        monkeypatch.setattr("inferlib.calibration.low_rank._ROUNDS", rounds)
        totals.append(float(jnp.sum(round_with_branch(w, h, SCHEMES["int4"], 32, "gptq", RANK)[0].losses)))
    assert totals[1] < totals[0]


@pytest.mark.parametrize("kind", ["no tokens", "no error", "one input"])
def test_degenerate_sums_and_errors_have_finite_factors(kind):
    error, h = draw(4)
    if kind == "no tokens":
        h = np.zeros_like(h)
    elif kind == "no error":
        error = np.zeros_like(error)
    else:
        h = np.diag(np.eye(INPUTS)[0])
    a, b = fit(jnp.asarray(error, jnp.float32), jnp.asarray(h, jnp.float32), RANK)
    assert jnp.all(jnp.isfinite(a.astype(jnp.float32)))
    assert jnp.all(jnp.isfinite(b.astype(jnp.float32)))
    if kind == "no tokens":  # the best of the matrix alone
        left = np.linalg.norm(error - np.asarray(Branch(a, b).whole))
        best = np.sqrt(np.sum(np.linalg.svd(error, compute_uv=False)[RANK:] ** 2))
        assert left < 1.01 * best
