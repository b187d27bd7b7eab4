"""Roundings that gradients go through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.models.quantization import QUANTIZATIONS
from inferlib.ops.fake_quantized import FakeQuantizedWeight, fake_quantized
from inferlib.ops.matmul import matmul
from inferlib.ops.quantized import Scheme, quantize
from tests.helpers.packed_experts import dequantized, quantized


def test_gradients_are_those_of_learned_steps():
    """Of a weight: 1 within the type's range, else 0. Of a scale: the rounding error in steps, or the largest value."""
    w, scale = np.array([0.26, -0.74, 0.9, 5.0], np.float32), np.float32(0.25)
    value, (of_w, of_scale) = jax.value_and_grad(lambda *x: fake_quantized(*x, jnp.int4).sum(), argnums=(0, 1))(
        jnp.asarray(w), jnp.asarray(scale)
    )
    steps = w / scale
    codes = np.clip(np.round(steps), -7, 7)
    assert value == pytest.approx((codes * scale).sum())
    np.testing.assert_allclose(of_w, [1, 1, 1, 0])
    np.testing.assert_allclose(of_scale, np.where(np.abs(steps) <= 7, codes - steps, 7).sum(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8_a8", "mxfp8_a8", "mxfp4_a8"])
def test_products_round_inputs_as_the_scheme_does(name):
    scheme = QUANTIZATIONS[name]
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((256, 64), (64, 32)))
    w = quantized(weight, (0,), scheme)
    values = np.asarray(dequantized(w, (0,))).reshape(64, 32)

    @jax.jit
    def run(x, w, values):
        def fake(x):
            return matmul(x, FakeQuantizedWeight(values, scheme))

        return fake(x), matmul(x, w), jax.grad(lambda x: fake(x).sum())(x)

    product, expected, slope = run(x, w, values)
    np.testing.assert_allclose(product, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(slope, np.broadcast_to(values.sum(1), x.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rotated_inputs_meet_rotated_weights():
    scheme = Scheme("int8", rotation=32)
    x = jax.random.normal(jax.random.key(0), (8, 64))
    w = quantize(jax.random.normal(jax.random.key(1), (64, 32)), (0,), scheme)
    fake = FakeQuantizedWeight(w.dequantized((0,), jnp.float32), scheme)
    np.testing.assert_allclose(matmul(x, fake), matmul(x, w), rtol=0, atol=1e-4)
