"""Products of few rows on NVIDIA GPUs whose partial sums and norms a later kernel finishes: interpreted elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.models.layers.mlp import gated
from inferlib.ops.matmul import Product, _arrays, _by_rows, _by_splits, _by_tiles, choose, matmul, matmul_partials
from inferlib.ops.partial_sums import PartialSums
from inferlib.ops.quantized import SCHEMES
from inferlib.ops.residual_norm import DeferredNorm, residual_norm
from inferlib.pallas_kernels.partial_sums_gpu import summed
from inferlib.pallas_kernels.row_matmul_gpu import Epilogue, row_matmul
from tests.helpers.kernels import lowered_for_cuda
from tests.helpers.packed_experts import dequantized, quantized

on_cpu = jax.default_backend() == "cpu"


def draw(shape, size=1.0, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * size, dtype)


@partial(jax.jit, static_argnums=2)
def deferred(x: jax.Array, weight: jax.Array, parts: int) -> DeferredNorm:
    """The norm of rows [T, I] but for its factor, with so many sums of squares of a row."""
    squares = jnp.square(x.astype(jnp.float32)).reshape(len(x), parts, -1)
    return DeferredNorm(x * weight, jnp.sum(squares, axis=2), 1e-5)


def norm_of(x, weight, eps=1e-5):
    exact = np.asarray(x, np.float64)
    return exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


@pytest.mark.parametrize(
    ("splits", "rows", "width"), [(1, 1, 96), pytest.param(5, 3, 320, marks=pytest.mark.release), (56, 8, 1024)]
)
def test_the_residuals_sum_and_a_norm_without_its_factor(splits, rows, width):
    partials, residual = draw((splits, rows, width)), draw((rows, width), 30, jnp.bfloat16, 1)
    weight = draw(width, 1, jnp.bfloat16, 2)
    addend = draw((rows, width), 1, jnp.bfloat16, 3) if splits > 1 else None
    sums = PartialSums(partials, addend)
    x, y, _ = jax.jit(lambda *a: residual_norm(*a, 1e-5))(residual, sums, weight)
    branch = jnp.sum(partials, axis=0) + (0 if addend is None else addend)
    branch = branch.astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(branch), np.float32(sums.total(jnp.bfloat16)))
    np.testing.assert_allclose(np.float32(x), np.float32(branch + residual), rtol=2.0**-7)
    assert x.dtype == y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(y.array()), norm_of(x, weight), rtol=2.0**-7)
    np.testing.assert_allclose(y.squares.sum(1), np.sum(np.float64(x) ** 2, axis=1), rtol=1e-6)


def test_a_row_does_not_touch_another():
    residual = np.ones((2, 320), jnp.bfloat16)
    residual[1, 5] = np.nan

    @jax.jit
    def run(residual):
        x, y, _ = residual_norm(residual, PartialSums(jnp.zeros((3, 2, 320))), jnp.ones(320, jnp.bfloat16), 0.0)
        return x, y.array()

    x, y = map(np.float32, run(residual))
    np.testing.assert_array_equal(y[0], np.ones(320))
    assert np.isnan(x[1]).sum() == 1
    assert np.isnan(y[1]).all()


@pytest.mark.parametrize("activated", [False, True])
def test_a_sum_gets_the_factor_of_the_norm_before_it(activated):
    partials, x = draw((5, 3, 640)), draw((3, 256), 20, seed=1)
    squares = np.sum((np.asarray(x) ** 2).reshape(3, 4, 64), axis=2)
    activation = (lambda a, b: jax.nn.silu(a) * b) if activated else None
    options = dict(inputs=256, eps=1e-5, activation=activation, dtype=jnp.float32, interpret=on_cpu)
    addend = draw((3, 640), seed=2)
    got = jax.jit(partial(summed, **options))(partials, squares, addend)
    y = (np.sum(np.float64(partials), axis=0) + np.float64(addend)) / np.sqrt(
        np.mean(np.float64(x) ** 2, axis=1, keepdims=True) + 1e-5
    )
    if activated:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
# Each number of rows and each activation with each scheme, but not every pair; int8 has a kernel for 1 row only.
@pytest.mark.parametrize(
    ("scheme", "rows", "activation"),
    [
        *(("mxfp4", 5, "gelu"), ("mxfp4", 17, "silu"), ("int8", 1, "silu"), ("int8", 5, None)),
        pytest.param("mxfp4", 17, None, marks=pytest.mark.release),
    ],
)
def test_products_of_a_norm_without_its_factor(scheme, rows, activation):
    """XLA's, and on GPUs by rows or by tiles, or none; the exact GELU, by erf, is no part of a kernel."""
    activation = activation and partial(gated, activation)
    x, weight = draw((rows, 256), 20, jnp.bfloat16), draw(256, 1, jnp.bfloat16, 1)
    w = quantized(draw((256, 2, 64), seed=2), (0,), SCHEMES[scheme])
    y = deferred(x, weight, 2)
    matrix = np.float64(dequantized(w, (0,))).reshape(256, 2, 64)
    exact = np.einsum("ti,ipo->tpo", norm_of(x, weight), matrix)
    if activation:
        exact = np.float64(activation(jnp.float32(exact[:, 0]), jnp.float32(exact[:, 1])))
    choice = choose(w, rows, y.dtype, backend="pallas_gpu").name
    larger = {"mxfp4": {5: "row_matmul", 17: "grouped_matmul"}, "int8": {}}[scheme]
    assert choice == ("row_matmul" if rows == 1 else larger.get(rows, "xla"))
    kernels = {"row_matmul": [_by_rows], "grouped_matmul": [_by_tiles], "xla": []}[choice]
    options = dict(product=Product(1, activation, jnp.bfloat16, "pallas_gpu"), interpret=on_cpu)
    for run in (partial(matmul, activation=activation), *(partial(kernel, **options) for kernel in kernels)):
        got = jax.jit(run)(y, w)
        assert (got.shape, got.dtype) == (exact.shape, jnp.bfloat16)
        assert np.linalg.norm(np.float64(got) - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "activation"), [(1, "silu"), (3, "gelu"), pytest.param(3, None, marks=pytest.mark.release)]
)
def test_xlas_products_of_a_norm_without_its_factor(rows, activation):
    """Of weights that are not quantised. On GPUs a kernel adds up their partial sums, with the factor."""
    activation = activation and partial(gated, activation)
    x, weight = draw((rows, 1024), 20, jnp.bfloat16), draw(1024, 1, jnp.bfloat16, 1)
    w, y = draw((1024, 2, 64), dtype=jnp.bfloat16, seed=2), deferred(x, weight, 2)
    exact = np.einsum("ti,ipo->tpo", norm_of(x, weight), np.float64(w))
    if activation:
        exact = np.float64(activation(jnp.float32(exact[:, 0]), jnp.float32(exact[:, 1])))
    by_splits = partial(_by_splits, product=Product(1, activation, jnp.bfloat16, "pallas_gpu"), interpret=on_cpu)
    for run in (partial(matmul, activation=activation), by_splits):
        got = jax.jit(run)(y, w)
        assert (got.shape, got.dtype) == (exact.shape, jnp.bfloat16)
        assert np.linalg.norm(np.float64(got) - exact) < 0.01 * np.linalg.norm(exact)
    assert "triton" in lowered_for_cuda(partial(matmul, activation=activation), y, w)
    assert "triton" not in lowered_for_cuda(partial(matmul, activation=activation, backend="xla"), y, w)


@pytest.mark.slow
def test_weights_that_no_kernel_multiplies_by_it_get_the_whole_norm():
    x, weight = draw((1, 256), 20, jnp.bfloat16), draw(256, 1, jnp.bfloat16, 1)
    y = deferred(x, weight, 1)
    dense = draw((256, 64), seed=2)
    rounds = replace(quantized(dense, (0,), SCHEMES["mxfp8"]), round_inputs=True)
    shifted = replace(quantized(dense, (0,), SCHEMES["int8"]), zeros=jnp.ones(64))
    for w in (dense.astype(jnp.float16), rounds, shifted):
        got, want = (np.float32(jax.jit(matmul)(x, w)) for x in (y, y.array()))
        # XLA rounds one of the whole norms and not the other, from where e4m3 may go to another neighbour.
        assert np.linalg.norm(got - want) < (0.05 if w is rounds else 0.01) * np.linalg.norm(want)


def test_what_does_not_go_together_is_refused():
    x, values, scales = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((1, 64, 32), jnp.int8), jnp.ones((1, 32))
    with pytest.raises(ValueError, match="squares for rows without ids"):
        row_matmul(x, values, scales, jnp.zeros(1, jnp.int32), epilogue=Epilogue(squares=jnp.ones((1, 1))))
    with pytest.raises(ValueError, match="leave out the activation"):
        row_matmul(x, values, scales, epilogue=Epilogue(jnp.multiply, partials=True))
    with pytest.raises(ValueError, match="leave out the activation"):
        row_matmul(x, values, scales, epilogue=Epilogue(partials=True, addend=jnp.ones((1, 32))))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mxfp4", pytest.param("int8", marks=pytest.mark.release)])
def test_partial_sums_of_a_product(scheme):
    x, w = draw((2, 2, 128), dtype=jnp.bfloat16), quantized(draw((2, 128, 64), seed=1), (0, 1), SCHEMES[scheme])
    chosen = partial(choose, w, contract=2, backend="pallas_gpu", partials=True)
    assert chosen(2, jnp.bfloat16).name == "row_matmul"
    assert chosen({"mxfp4": 17, "int8": 5}[scheme], jnp.bfloat16).name == "xla"
    assert "float32" in chosen(2, jnp.float32).reason
    got = jax.jit(lambda x, w: matmul_partials(x, w, contract=2).splits)(x, w)
    exact = np.einsum("tij,ijo->to", np.float64(x), np.float64(dequantized(w, (0, 1))).reshape(2, 128, 64))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.sum(np.float64(got), axis=0), exact, rtol=0.01, atol=0.01 * np.abs(exact).max())
    run = partial(row_matmul, epilogue=Epilogue(partials=True), interpret=on_cpu)
    ours = jax.jit(lambda x, w: run(x.reshape(2, 256), *_arrays(w, 2)))(x, w)
    assert ours.shape == got.shape
    np.testing.assert_allclose(np.sum(np.float64(ours), axis=0), exact, rtol=0.01, atol=0.01 * np.abs(exact).max())


# Each scheme with one row and with several where it takes them, and both sizes with each number of rows.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "rows", "inputs", "outputs"),
    [
        *(("int8", 1, 128, 24), ("fp8_block", 5, 256, 128)),
        *(pytest.param(*case, marks=pytest.mark.release) for case in (("mxfp4", 1, 256, 128), ("mxfp4", 15, 128, 24))),
    ],
)
def test_they_lower_for_gpus(scheme, rows, inputs, outputs):
    """Weights that are copied ahead, and such as are loaded."""
    y = DeferredNorm(jnp.ones((rows, inputs), jnp.bfloat16), jnp.ones((rows, 2)), 1e-5)
    w = quantized(draw((inputs, 2, outputs)), (0,), SCHEMES[scheme])
    for run in (matmul, lambda y, w: matmul(y, w, activation=jnp.multiply), lambda y, w: matmul_partials(y.y, w)):
        text = lowered_for_cuda(run, y, w)
        assert "triton" in text
        assert ("cp.async" in text) == (outputs == 128)
    for backend, by_kernel in (("xla", False), ("pallas_gpu", True)):
        assert ("triton" in lowered_for_cuda(partial(matmul, backend=backend), y, w)) == by_kernel
    residual = jnp.ones((rows, inputs), jnp.bfloat16)
    partials = PartialSums(jnp.ones((3, rows, inputs)), residual)
    assert "triton" in lowered_for_cuda(lambda *a: residual_norm(*a, 1e-5), residual, partials, residual[0])
