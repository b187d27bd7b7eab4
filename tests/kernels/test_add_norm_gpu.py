"""Residual sums with norms on NVIDIA GPUs: interpreted elsewhere. About 5 s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.residual_norm import choose, reference, residual_norm
from inferlib.pallas_kernels.add_norm_gpu import add_norm


@pytest.mark.parametrize(("tokens", "width"), [(1, 2880), (3, 96), (64, 4096)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.fast_cases(3)
def test_equals_a_sum_and_a_norm(tokens, width, dtype):
    rng = np.random.default_rng(0)
    branch, residual = (jnp.asarray(rng.normal(size=(tokens, width)) * size, dtype) for size in (1, 30))
    weight = jnp.asarray(rng.normal(size=width), dtype)
    x, y, _ = jax.jit(lambda *arrays: residual_norm(*arrays, 1e-5))(residual, branch, weight)
    assert x.dtype == y.dtype == dtype
    np.testing.assert_array_equal(x, branch + residual)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-5) * np.asarray(weight, np.float64)
    within = {"bfloat16": 2.0**-8, "float32": 3e-6}[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=within, atol=0)
    for ours, theirs in zip((x, y), reference(residual, branch, weight, 1e-5), strict=True):
        np.testing.assert_allclose(np.float64(ours), np.float64(theirs), rtol=2 * within, atol=0)


def test_a_row_does_not_touch_another():
    branch, residual = jnp.zeros((2, 64)), jnp.ones((2, 64)).at[1, 5].set(jnp.nan)
    x, y, _ = residual_norm(residual, branch, jnp.ones(64), 0.0)
    np.testing.assert_array_equal(y[0], np.ones(64))
    assert np.isnan(y[1]).all()
    assert np.isnan(x[1]).sum() == 1


def test_rows_it_is_not_for():
    assert choose(256, 16384, backend="pallas_gpu").name == "pallas_gpu"
    for tokens, width in ((257, 64), (1, 16385)):
        choice = choose(tokens, width, backend="pallas_gpu")
        assert (choice.name, choice.reason) == ("xla", f"{tokens} rows of {width} numbers")
    with pytest.raises(ValueError, match="at most 256 rows of 16384 numbers"):
        add_norm(jnp.ones((300, 8)), jnp.ones((300, 8)), jnp.ones(8), 0.0)
