"""Gradients of products of groups, against float64 numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.models.quantization import QUANTIZATIONS
from inferlib.ops import grouped_gradients
from inferlib.ops.fake_quantized import FakeQuantizedWeight
from inferlib.ops.grouped_gradients import grouped_matmul_with_gradients
from inferlib.ops.grouped_matmul import grouped_matmul
from tests.helpers.packed_experts import dequantized, quantized


def gradients_by_numpy(x, w, sizes, rows, slopes) -> tuple[np.ndarray, np.ndarray]:
    """Of x [T, I] and w [E, *P, I, O] for slopes [M, *P, O]; row m of the products is of x[rows[m]]."""
    of_x, of_w = np.zeros(x.shape), np.zeros(w.shape)
    for m, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        of_x[rows[m]] += np.einsum("...o,...io->...i", slopes[m], w[group]).reshape(-1, x.shape[1]).sum(0)
        of_w[group] += np.einsum("i,...o->...io", x[rows[m]], slopes[m])
    return of_x, of_w


@pytest.mark.parametrize(
    ("sizes", "count", "gathered"),
    [
        ((5, 0, 30, 17, 0), 60, True),
        ((21, 0, 3), 24, False),
        ((0, 0), 6, True),
    ],
    ids=["groups and rows of nothing", "every row once", "no row in any group"],
)
@pytest.mark.fast_cases(1)
def test_gradients_equal_the_oracle(sizes, count, gathered, monkeypatch):
    """Of rows in several tiles. Rows of no group, and slopes of theirs, are NaN."""
    monkeypatch.setattr(grouped_gradients, "_TILE", 8)
    rng, used = np.random.default_rng(count), sum(sizes)
    tokens, parts = (20, (2,)) if gathered else (count, ())
    rows = rng.integers(0, tokens - 1, count) if gathered else np.arange(count)
    rows[used:] = tokens - 1
    x, w = rng.normal(size=(tokens, 12)), rng.normal(size=(len(sizes), *parts, 12, 7))
    slopes = rng.normal(size=(count, *parts, 7))
    expected = gradients_by_numpy(x, w, sizes, rows, slopes)
    x[tokens - 1], slopes[used:] = (x[tokens - 1], slopes[used:]) if used == count else (np.nan, np.nan)
    options: dict[str, Any] = dict(most=tokens, rows=jnp.asarray(rows, jnp.int32) if gathered else None)

    @jax.jit
    def run(x, w, sizes, slopes):
        product = grouped_matmul(x, w, sizes, **options)
        again, back = jax.vjp(lambda x, w: grouped_matmul_with_gradients(x, w, sizes, **options), x, w)
        return product, again, *back(slopes)

    product, again, *got = run(*(jnp.asarray(a, jnp.float32) for a in (x, w)), jnp.asarray(sizes), jnp.float32(slopes))
    np.testing.assert_array_equal(product[:used], again[:used])
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "int8", "mxfp4_a8"])
def test_fake_quantised_groups_multiply_as_quantised_ones_do(name):
    """And gradients go straight through the rounding of inputs."""
    scheme, rng = QUANTIZATIONS[name], np.random.default_rng(0)
    x, sizes = jnp.asarray(rng.normal(size=(24, 64)), jnp.float32), jnp.asarray([9, 0, 15], jnp.int32)
    w = quantized(jnp.asarray(rng.normal(size=(3, 64, 16)), jnp.float32), (1,), scheme)
    values = np.asarray(dequantized(w, (1,))).reshape(3, 64, 16)

    @jax.jit
    def run(x, w, values):
        def fake(x, values):
            return grouped_matmul_with_gradients(x, FakeQuantizedWeight(values, scheme), sizes, most=24)

        product, back = jax.vjp(fake, x, values)
        return grouped_matmul(x, w, sizes, most=24), product, back(jnp.ones_like(product))[0]

    product, again, of_x = run(x, w, values)
    np.testing.assert_allclose(again, product, rtol=0, atol=1e-4)
    each = np.asarray(values).sum(2)[np.repeat([0, 2], [9, 15])]
    np.testing.assert_allclose(of_x, each, rtol=0, atol=1e-4)


def test_other_implementations_have_no_gradients():
    x, w, sizes = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.asarray([1, 3])
    with pytest.raises(ValueError, match="have gradients by xla only, not by pallas_gpu"):
        grouped_matmul_with_gradients(x, w, sizes, most=4, backend="pallas_gpu")
