"""Products of single rows with weights on NVIDIA GPUs: interpreted elsewhere. About 15 s."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.matmul import matmul
from inferlib.ops.quantized import SCHEMES, quantize
from inferlib.pallas_kernels import grouped_matmul_gpu, row_matmul_gpu
from inferlib.pallas_kernels.row_matmul_gpu import Blocks, blocks, row_matmul, unsupported
from tests.conftest import kernels_in
from tests.packed_experts import quantized

on_cpu = jax.default_backend() == "cpu"


def draw(scheme: str | None, shape):
    """Arrays of a weight [N, I, O] for the kernel, and what it stands for in float64."""
    if scheme is None:
        values = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.bfloat16)
        return values, None, np.asarray(values, np.float64)
    w = quantized(jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32), (1,), SCHEMES[scheme])
    exact = np.asarray(w.dequantized((1,), jnp.float32), np.float64).reshape(shape)
    return w.values.reshape(shape), w.scales, exact


def check(got, expected) -> None:
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 1e-3, error


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_rows_by_the_matrices_they_choose(scheme):
    """Inputs of very different sizes, outputs that do not fill their blocks; a group that nobody chose is not read."""
    rng, ids, rows = np.random.default_rng(0), np.array([2, 0, -1, 2]), np.array([0, 0, 1, 1])
    values, scales, exact = draw(scheme, (6, 256, 88))
    x = jnp.asarray(rng.normal(size=(2, 256)) * np.exp(3 * rng.normal(size=(2, 256))), jnp.bfloat16)
    run = partial(row_matmul, parts=2, turns=2, chosen=Blocks(splits=2), interpret=on_cpu)
    spoiled = (values.at[2:4].set(jnp.nan), None) if scales is None else (values, scales.at[2:4].set(jnp.nan))
    got = jax.jit(run)(x, *spoiled, ids)
    given = np.array([0, 1, 3])
    expected = np.einsum("mi,mpio->mpo", np.asarray(x, np.float64)[rows], exact.reshape(3, 2, 256, 88)[ids])
    assert got.shape == (4, 2, 88)
    check(got[given], expected[given])


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("scheme", ["mxfp4", "int8", "fp8"])
def test_inputs_of_any_size(scheme, size):
    """Beyond the range of float16: all as large as the largest, so that nothing may overflow either."""
    values, scales, exact = draw(scheme, (1, 128, 32))
    x = jnp.asarray(np.where(exact[0, :, 0] < 0, -size, size)[None], jnp.bfloat16)
    got = row_matmul(x, values, scales, jnp.zeros(1, jnp.int32), interpret=on_cpu)
    check(got[0], np.asarray(x, np.float64) @ exact[0])


def test_what_is_not_finite_stays_so():
    values, scales, _ = draw("mxfp4", (1, 128, 32))
    for bad in (np.nan, np.inf):
        x = jnp.ones((1, 128), jnp.bfloat16).at[0, 70].set(bad)
        assert not np.isfinite(row_matmul(x, values, scales, jnp.zeros(1, jnp.int32), interpret=on_cpu)).any()
    x, spoiled = jnp.ones((1, 128), jnp.bfloat16), scales.at[0, 1, 5].set(jnp.nan)
    got = row_matmul(x, values, spoiled, jnp.zeros(1, jnp.int32), interpret=on_cpu)[0, 0]
    assert np.isnan(got[5])
    assert np.isfinite(np.delete(got, 5)).all()


@pytest.mark.parametrize("chosen", [Blocks(8, 8, 32, 3), Blocks(32, 2, 8, 1), Blocks(16, 4, 16, 4, warps=2)])
def test_blocks_change_nothing(chosen):
    values, scales, exact = draw("mxfp4", (1, 320, 64))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 320)), jnp.bfloat16)
    got = row_matmul(x, values, scales, jnp.zeros(1, jnp.int32), chosen=chosen, interpret=on_cpu)
    check(got[0], np.asarray(x, np.float64) @ exact[0])


def test_a_product_of_one_row_takes_it_on_gpus():
    """Of a weight of several dimensions, in groups of the last that is summed over."""
    w = quantize(jnp.ones((4, 64, 2, 16)), (0, 1), SCHEMES["mxfp4"])
    taken = lambda rows: "row_matmul" in kernels_in(partial(matmul, contract=2), rows, w)  # noqa: E731
    assert taken(jnp.ones((1, 4, 64), jnp.bfloat16))
    assert not taken(jnp.ones((2, 4, 64), jnp.bfloat16))
    assert not taken(jnp.ones((1, 4, 64), jnp.float32))
    np.testing.assert_array_equal(matmul(jnp.ones((1, 4, 64), jnp.bfloat16), w, contract=2), np.full((1, 2, 16), 256))
    for taken_too, outputs, dtype in ((True, 32, "bfloat16"), (False, 2**18, "bfloat16"), (False, 32, "float32")):
        x, plain = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 64), (64, outputs)))
        assert ("row_matmul" in kernels_in(matmul, x, plain)) == taken_too


def test_what_it_cannot_run_is_refused_with_the_reason(monkeypatch):
    def values(*shape, dtype="float4_e2m1fn"):
        return jax.ShapeDtypeStruct(shape, dtype)

    assert unsupported("bfloat16", values(64, 2880, 2880), 32) is None
    assert "products of float32" in unsupported("float32", values(1, 256, 256), 32)
    assert "with float16" in unsupported("bfloat16", values(1, 256, 256, dtype="float16"), None)
    assert "250 inputs" in unsupported("bfloat16", values(1, 250, 256), None)
    assert "250 outputs" in unsupported("bfloat16", values(1, 256, 250), 32)
    assert unsupported("bfloat16", values(1, 2**17, 2**15, dtype="int8"), None) is None
    assert "more words" in unsupported("bfloat16", values(1, 2**17, 2**15, dtype="bfloat16"), None)
    monkeypatch.setattr(row_matmul_gpu, "converts_e4m3", lambda: False)
    monkeypatch.setattr(grouped_matmul_gpu, "converts_e4m3", lambda: False)
    for name, old in (("float4_e2m1fn", True), ("float8_e4m3fn", True), ("int8", False), ("bfloat16", False)):
        assert ("below 8.9" in (unsupported("bfloat16", values(1, 256, 256, dtype=name), None) or "")) == old
    assert "below 8.9" in grouped_matmul_gpu.unsupported(values(1, 256, 256, dtype="float8_e4m3fn"), None, False)
    assert grouped_matmul_gpu.unsupported(values(1, 256, 256), 32, False) is None
    with pytest.raises(ValueError, match="does not run products of float32"):
        row_matmul(jnp.ones((1, 64)), jnp.ones((1, 64, 32), jnp.int8), jnp.ones((1, 32)), jnp.zeros(1, jnp.int32))


def test_blocks_of_usual_shapes():
    """The experts of gpt-oss-20b that one token chooses, and llama3-8b's largest matrices."""
    assert blocks(8, 2880, 2880, "float4_e2m1fn") == Blocks(words=8, units=8, splits=8)
    assert blocks(1, 4096, 28672, "float4_e2m1fn").splits == 16
    assert blocks(1, 14336, 4096, "int8").splits == 32
