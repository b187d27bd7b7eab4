"""Hadamard rotations against their definition in float64, alone and before products with quantised weights."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.models.abstract import WeightSpec
from inferlib.models.config import ConfigError
from inferlib.models.quantization import Quantization
from inferlib.ops.hadamard import factors_of, hadamard, operations, rotated, rotation_matrix
from inferlib.ops.matmul import Product, _by_rows, matmul, matmul_partials
from inferlib.ops.quantized import SCHEMES, Scheme
from inferlib.sharding import axes
from tests.helpers.kernels import lowered_for_cuda

ROWS, INPUTS, OUTPUTS = 3, 256, 128


@pytest.mark.parametrize("size", [1, 2, 12, 20, 24, 28, 36, 64, 128, 256, 768])
@pytest.mark.fast_cases(4)
def test_a_rotation_multiplies_by_a_hadamard_matrix(size):
    matrix = rotation_matrix(size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(np.abs(matrix), size**-0.5, rtol=1e-12)
    x = np.random.default_rng(size).standard_normal((ROWS, 2, 3 * size))
    expected = (x.reshape(-1, size) @ matrix).reshape(x.shape)
    turned = jax.jit(partial(rotated, size=size))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(turned, expected, atol=2e-6)
    back = jax.jit(partial(rotated, size=size, back=True))(turned)
    np.testing.assert_allclose(back, x, atol=4e-6)
    assert operations(size) <= 2 * size or size == 2


def test_in_half_precision_it_is_rounded_once_a_factor():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, 1536)), jnp.bfloat16)
    assert factors_of(1536) == (12, 128)
    y, exact = jax.jit(partial(rotated, size=1536))(x), np.asarray(x, np.float64) @ rotation_matrix(1536)
    assert y.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(y, np.float64) - exact) < 2**-8 * np.linalg.norm(exact)


@pytest.mark.parametrize("size", [3, 6, 92, 0])
def test_sizes_without_a_known_matrix_are_refused(size):
    with pytest.raises(ValueError, match=f"size {size} is known"):
        factors_of(size)


def test_other_hadamard_matrices_are_those_of_paley_and_sylvester():
    assert hadamard(6) is None
    for size in (4, 28, 56, 144):
        signs = hadamard(size)
        assert signs is not None
        np.testing.assert_array_equal(signs @ signs.T, size * np.eye(size))


def quantised(scheme: Scheme, w: np.ndarray, *, packed: bool = False):
    """A weight [I, O] as products take it, and its values for inputs that are not rotated, float64."""
    spec = WeightSpec("w", w.shape, np.dtype("bfloat16"), (axes.MLP, axes.EMBED), "normal", None, "w", (0,), scheme)
    arrays = jax.jit(spec.stored)(jnp.asarray(w, jnp.float32))
    whole = jax.jit(lambda *arrays: scheme.tensor(*arrays).dequantized((0,), jnp.float32))(*arrays)
    runs = np.asarray(whole, np.float64).reshape(-1, scheme.rotation, w.shape[1])
    back = (rotation_matrix(scheme.rotation) @ runs).reshape(w.shape)
    if packed:
        return spec.packing.tensor(*jax.jit(spec.packing.pack)(*arrays)), back
    return scheme.tensor(*arrays), back


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4"])
def test_products_with_rotated_weights_are_those_of_the_weights_turned_back(name, packed):
    """By XLA, and by the kernel for TPUs."""
    draw = np.random.default_rng(1).standard_normal
    scheme = Scheme(**{**vars(SCHEMES[name]), "rotation": 64})
    w, exact = quantised(scheme, draw((INPUTS, OUTPUTS)), packed=packed)
    x = jnp.asarray(draw((ROWS, INPUTS)), jnp.bfloat16 if packed else jnp.float32)
    y, expected = jax.jit(partial(matmul, out_dtype=jnp.float32))(x, w), np.asarray(x, np.float64) @ exact
    np.testing.assert_allclose(y, expected, rtol=0, atol=(2**-6 if packed else 1e-5) * expected.std())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", pytest.param("int8", marks=pytest.mark.release)])
def test_partial_sums_and_the_kernel_for_gpus_rotate_too(name):
    draw = np.random.default_rng(2).standard_normal
    scheme = Scheme(**{**vars(SCHEMES[name]), "rotation": 128})
    w, exact = quantised(scheme, draw((INPUTS, OUTPUTS)))
    x = jnp.asarray(draw((1, INPUTS)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ exact
    sums = jax.jit(matmul_partials)(x, w)
    within = partial(np.testing.assert_allclose, rtol=0, atol=2**-6 * expected.std())
    within(np.sum(sums.splits, axis=0), expected)
    product = Product(1, None, jnp.float32, None)
    y = jax.jit(lambda x, w: _by_rows(rotated(x, 128), w, product, interpret=True))(x, w)
    within(y, expected)
    assert "triton" in lowered_for_cuda(matmul, x, w)


def test_inputs_are_rotated_before_they_are_rounded():
    """An outlier is spread over all channels, so that it takes no bits from its neighbours."""
    scheme = Scheme("float8_e4m3fn", 32, "float8_e8m0fnu", round_inputs=True, rotation=64)
    w, exact = quantised(scheme, np.random.default_rng(3).standard_normal((INPUTS, OUTPUTS)))
    x = np.random.default_rng(4).standard_normal((ROWS, INPUTS))
    x[:, ::64] *= 200
    matrix = np.kron(np.eye(INPUTS // 64), rotation_matrix(64))
    y = np.asarray(jax.jit(matmul)(jnp.asarray(x, jnp.float32), w), np.float64)
    error, size = np.linalg.norm(y - x @ exact), np.linalg.norm(x @ exact)
    assert 0 < error < 0.05 * size
    assert np.abs(x @ matrix).max() < 0.3 * np.abs(x).max()


def test_a_quantization_says_which_inputs_are_rotated():
    value = {"name": "int4", "scheme": vars(SCHEMES["int4"]), "unquantized": ["head"], "rotation": 128}
    quantization = Quantization.from_json(value)
    assert quantization is not None
    rotations = {part: quantization.scheme_of(part) for part in ("mlp.down", "mlp.shared.down", "attn.o", "head")}
    assert {part: scheme and scheme.rotation for part, scheme in rotations.items()} == {
        "mlp.down": 128,
        "mlp.shared.down": 128,
        "attn.o": 0,
        "head": None,
    }
    assert Quantization.from_json({**value, "rotation": 0}).rotation == 0
    with pytest.raises(ConfigError, match="rotated by 7"):
        Quantization.from_json({**value, "rotation": 7})
    for wrong in ({"rotation": -2}, {"rotation": "128"}, {"rotation": True}, {"rank": -1}, {"rank": 1.5}):
        with pytest.raises(TypeError, match="must be sizes"):
            Quantization.from_json({**value, **wrong})
