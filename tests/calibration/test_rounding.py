"""Rounding of matrices against float64 oracles in numpy, and what it promises for any H."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from inferlib.calibration.matrices import MatrixForm
from inferlib.calibration.rounding import (
    DAMPING,
    _inverse_factor_on_device,
    gptq,
    inverse_factor,
    losses,
    round_matrix,
    search_scales,
    to_nearest,
)
from inferlib.models.quantization import QUANTIZATIONS
from inferlib.ops.quantized import SCHEMES, Scheme, quantize

INPUTS, OUTPUTS = 96, 5


def draw(seed: int, inputs: int = INPUTS, outputs: int = OUTPUTS) -> tuple[np.ndarray, np.ndarray]:
    """A weight and the mean of x x^T over correlated inputs with a few outliers."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((300, inputs)) @ generator.standard_normal((inputs, inputs)) / np.sqrt(inputs)
    x[:, ::17] *= 9
    return generator.standard_normal((inputs, outputs)), x.T @ x / len(x)


def round_as(scheme: Scheme, x: np.ndarray) -> np.ndarray:
    """Values to nearest, in float64: every value of the type is tried."""
    bits = np.arange(256, dtype=np.uint8)
    if scheme.values == "int4":
        every = np.arange(-7, 8.0)
    elif scheme.values == "int8":
        every = np.arange(-127, 128.0)
    else:
        codes = bits[:16] if scheme.values == "float4_e2m1fn" else bits
        every = codes.view(np.dtype(scheme.values)).astype(np.float64)
        every = np.unique(every[np.isfinite(every)])
    return every[np.argmin(np.abs(x[..., None] - every), axis=-1)]


def oracle_gptq(w: np.ndarray, h: np.ndarray, scales: np.ndarray, scheme: Scheme) -> np.ndarray:
    """GPTQ as its paper writes it: the inverse of H is updated by elimination after each input."""
    w, inverse = w.copy(), np.linalg.inv(h + DAMPING * np.diag(h).mean() * np.eye(len(h)))
    values = np.zeros_like(w)
    for i in range(len(w)):
        values[i] = round_as(scheme, w[i] / scales[i])
        error = (w[i] - values[i] * scales[i]) / inverse[i, i]
        w[i + 1 :] -= inverse[i + 1 :, i, None] * error
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return values


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_gptq_equals_elimination_in_float64(name):
    scheme, (w, h) = SCHEMES[name], draw(1)
    scales = np.exp2(np.random.default_rng(2).integers(-4, 0, w.shape)).astype(np.float64)
    factor = inverse_factor(jnp.asarray(h, jnp.float32))
    assert factor is not None
    values = gptq(jnp.asarray(w, jnp.float32), jnp.asarray(scales, jnp.float32), factor, scheme)
    np.testing.assert_array_equal(values, oracle_gptq(w, h, scales, scheme))


@pytest.mark.parametrize("invert", [inverse_factor, _inverse_factor_on_device])
def test_factor_is_that_of_the_damped_inverse(invert):
    _, h = draw(3)
    factor = np.asarray(invert(jnp.asarray(h, jnp.float32)), np.float64)
    expected = np.linalg.inv(h + DAMPING * np.diag(h).mean() * np.eye(len(h)))
    np.testing.assert_allclose(factor.T @ factor, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(factor, np.triu(factor))


def test_a_matrix_that_is_not_positive_definite_has_no_factor():
    h = jnp.diag(jnp.array([1.0, -5.0, 2.0]))
    assert inverse_factor(h) is None
    assert _inverse_factor_on_device(h) is None


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_searched_scales_are_the_best_of_those_tried(name):
    scheme, (w, _) = SCHEMES[name], draw(4)
    group, importance = 32, np.random.default_rng(5).random(INPUTS)
    taken = jnp.asarray(w, jnp.float32), jnp.asarray(importance, jnp.float32)
    scales = np.asarray(search_scales(taken[0], taken[1], scheme, group))

    def cost(scales: np.ndarray) -> np.ndarray:
        each = np.repeat(scales, group, axis=0)
        errors = importance[:, None] * (round_as(scheme, w / each) * each - w) ** 2
        return errors.reshape(-1, group, OUTPUTS).sum(axis=1)

    nearest = np.asarray(to_nearest(jnp.asarray(w, jnp.float32), scheme, group)[1], np.float64)
    shares = [1.0, 2.0] if scheme.scales == "float8_e8m0fnu" else np.linspace(1, 0.65, 11)
    best = np.min([cost(nearest * share) for share in shares], axis=0)
    np.testing.assert_allclose(cost(scales), best, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("int4_g32", "nearest"),
        ("int8", "clip"),
        ("mxfp4", "clip"),
        ("mxfp4", "gptq"),
        ("int4", "gptq"),
        ("fp8_block", "gptq"),
    ],
)
@pytest.mark.fast_cases(3)
def test_no_output_loses_more_than_to_nearest(name, rounding):
    scheme = QUANTIZATIONS[name]
    group = 32 if scheme.group else INPUTS
    for seed in range(3):
        w, h = (jnp.asarray(x, jnp.float32) for x in draw(seed))
        rounded = round_matrix(w, h, scheme, group, rounding)
        expected = losses(w, rounded.values, rounded.scales, h)
        np.testing.assert_allclose(rounded.losses, expected, rtol=1e-3, atol=1e-6)
        assert np.all(rounded.losses <= rounded.nearest)
        np.testing.assert_array_equal(rounded.scales, rounded.scales.astype(scheme.scales).astype(np.float32))
        if rounding == "gptq":
            assert np.sum(rounded.losses) < 0.8 * np.sum(rounded.nearest)


def test_losses_are_those_of_products():
    generator = np.random.default_rng(6)
    x, w = generator.standard_normal((200, 64)), generator.standard_normal((64, 3))
    w32 = jnp.asarray(w, jnp.float32)
    values, scales = to_nearest(w32, SCHEMES["int4"], 32)
    whole = np.asarray(values, np.float64) * np.repeat(np.asarray(scales, np.float64), 32, axis=0)
    expected = np.mean((x @ whole - x @ w) ** 2, axis=0)
    h = jnp.asarray(x.T @ x / len(x), jnp.float32)
    np.testing.assert_allclose(losses(w32, values, scales, h), expected, rtol=1e-3)


def test_inputs_that_no_token_had_are_rounded_by_the_weights_alone():
    w, _ = (jnp.asarray(x, jnp.float32) for x in draw(7))
    zeros = jnp.zeros((INPUTS, INPUTS))
    for rounding in ("gptq", "clip"):
        rounded = round_matrix(w, zeros, SCHEMES["int4"], 32, rounding)
        scales = search_scales(w, jnp.ones(INPUTS), SCHEMES["int4"], 32)
        np.testing.assert_array_equal(rounded.scales, scales)


def test_dead_inputs_among_others_change_nothing():
    """An input that is always zero has a zero row in H."""
    w, h = draw(8)
    h[10] = h[:, 10] = 0
    rounded = round_matrix(jnp.asarray(w, jnp.float32), jnp.asarray(h, jnp.float32), SCHEMES["int4"], 32, "gptq")
    assert np.all(np.isfinite(rounded.values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "inputs", "experts"),
    [
        pytest.param("int4", (64, 2, 24), (0,), False, marks=pytest.mark.release),  # the values of int4_g32
        ("int8", (64, 2, 24), (0,), False),
        ("fp8_block", (64, 2, 24), (0,), False),
        ("int4_g32", (2, 3, 64, 48), (0, 1, 2), False),
        ("mxfp4", (3, 2, 64, 16), (2,), True),
    ],
)
def test_stored_arrays_equal_those_of_quantize(name, shape, inputs, experts):
    scheme, form = QUANTIZATIONS[name], MatrixForm(shape, inputs, experts)
    w = jax.random.normal(jax.random.key(0), shape)
    matrices = form.matrices(w)
    np.testing.assert_array_equal(form.weight(matrices), w)
    rounded = [to_nearest(matrix, scheme, form.group(scheme)) for matrix in matrices]
    values, scales = (np.stack([np.asarray(x) for x in part]) for part in zip(*rounded, strict=True))
    expected = quantize(w, inputs, scheme)
    for array, other in zip(form.stored(scheme, values, scales), (expected.values, expected.scales), strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array.astype(np.float32), np.asarray(other).astype(np.float32))


def test_types_are_those_of_ml_dtypes():
    assert np.dtype("int4") == ml_dtypes.int4
