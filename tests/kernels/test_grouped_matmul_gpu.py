"""Products of groups of rows on NVIDIA GPUs: interpreted elsewhere. About 60 s."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.grouped_matmul import choose, chosen_matmul, grouped_matmul
from inferlib.ops.quantized import SCHEMES, QuantizedTensor
from inferlib.pallas_kernels import grouped_matmul_gpu as kernel
from inferlib.pallas_kernels.grouped_matmul_gpu import Blocks, blocks, unsupported
from tests.helpers.packed_experts import dequantized, quantized, with_nan

TOLERANCES = {"float32": 2e-6, "bfloat16": 4e-3}  # of the largest result
# Each scheme once; neither kernel has a branch for a pair of scheme and dtype.
WEIGHTS = [(None, "float32"), *((scheme, list(TOLERANCES)[n % 2]) for n, scheme in enumerate([None, *SCHEMES], 1))]


def some(in_turn: int) -> list:
    """WEIGHTS, of which every second one is release: both kernels read each scheme's values in the same way."""
    return [
        pytest.param(*case, marks=[pytest.mark.release] * (n % 2 != in_turn and n > 1))
        for n, case in enumerate(WEIGHTS)
    ]


def draw(scheme: str | None, shape, dtype, contracting: int):
    """A weight, quantised if asked, and what it stands for in float64."""
    w = jnp.asarray(np.random.default_rng(1).normal(size=shape), dtype)
    if scheme is None:
        return w, np.asarray(w, np.float64)
    w = quantized(w, (contracting,), SCHEMES[scheme])
    return w, np.asarray(dequantized(w, (contracting,)), np.float64).reshape(shape)


def poisoned(w, index):
    """With NaN where nothing may be read."""
    if not isinstance(w, QuantizedTensor):
        return with_nan(w, index)
    return QuantizedTensor(w.values, with_nan(w.scales, index), w.grouped)


def check(got, expected, dtype: str) -> None:
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=0, atol=TOLERANCES[dtype] * abs(expected).max()
    )


@pytest.mark.parametrize(("scheme", "dtype"), some(1))
@pytest.mark.fast_cases(2)
def test_sorted_rows_by_the_weights_of_their_groups(scheme, dtype):
    """Groups without rows and rows without a group; outputs and inputs that do not fill their blocks."""
    rng, sizes = np.random.default_rng(0), np.array([3, 0, 1, 18], np.int32)
    inputs = 256 if scheme in ("int4", "fp8_block") else 160
    w, values = draw(scheme, (2, 4, 2, inputs, 72), dtype, 3)
    x = jnp.asarray(rng.normal(size=(9, inputs)), dtype)
    rows = rng.integers(0, 9, 24).astype(np.int32)
    product = jax.jit(partial(grouped_matmul, most=18, rows=rows, layer=jnp.int32(1), backend="pallas_gpu"))
    got = product(x, poisoned(poisoned(w, 0), (1, 1)), sizes)
    assert (got.shape, got.dtype) == ((24, 2, 72), dtype)
    ids = np.repeat(np.arange(4), sizes)
    check(got[:22], np.einsum("mi,mpio->mpo", np.asarray(x, np.float64)[rows[:22]], values[1][ids]), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "dtype"), some(0))
def test_few_rows_in_any_order_by_the_weights_they_choose(scheme, dtype):
    rng, ids = np.random.default_rng(0), np.array([5, -1, 0, 5], np.int32)
    w, values = draw(scheme, (6, 256, 72), dtype, 1)
    x = jnp.asarray(rng.normal(size=(2, 256)), dtype)  # each is two rows
    w = poisoned(w, np.array([1, 2, 3, 4]))
    token_of_row = np.array([0, 2, 3])
    expected = np.einsum("mi,mio->mo", np.asarray(x, np.float64)[token_of_row // 2], values[ids[token_of_row]])
    for backend in ("xla", "pallas_gpu"):
        got = jax.jit(partial(chosen_matmul, turns=2, backend=backend))(x, w, ids)
        assert (got.shape, got.dtype) == ((4, 72), dtype)
        check(got[token_of_row], expected, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "rows"), [pytest.param(None, 16, marks=pytest.mark.release), ("int8", 128), ("mxfp4", 16)]
)
def test_blocks_change_nothing(scheme, rows):
    rng, sizes = np.random.default_rng(0), np.array([40, 0, 7], np.int32)
    w, values = draw(scheme, (3, 192, 80), "float32", 1)
    x = jnp.asarray(rng.normal(size=(47, 192)), "float32")
    stored = (w, None) if scheme is None else (w.values.reshape(3, 192, 80), w.scales)
    expected = np.einsum("mi,mio->mo", np.asarray(x, np.float64), values[np.repeat(np.arange(3), sizes)])
    for chosen in (Blocks(rows, 64, 64, splits=1), Blocks(rows, 32, 32, splits=4)):
        options = dict(parts=1, chosen=chosen, interpret=jax.default_backend() == "cpu")
        got = kernel.grouped_matmul(x, *stored, kernel.Sorted(sizes), **options)
        check(got[:, 0], expected, "float32")


def test_what_it_cannot_run_is_refused_with_the_reason():
    def values(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    assert unsupported(values(256, 2048, 768), None, False) is None
    assert unsupported(values(64, 2880, 2880, dtype="float4_e2m1fn"), 32, False) is None
    assert "more elements than 32-bit offsets reach" in unsupported(values(512, 7168, 2048), None, False)
    assert "zero points" in unsupported(values(4, 256, 256, dtype="int4"), 128, True)
    assert "groups of 24" in unsupported(values(4, 240, 256, dtype="int4"), 24, False)
    assert "45 outputs" in unsupported(values(4, 256, 45, dtype="int4"), 128, False)
    x, w = jnp.zeros((4, 240)), jnp.zeros((2, 240, 256), jnp.int8)
    with pytest.raises(ValueError, match="does not run this grouped_matmul: groups of 24"):
        kernel.grouped_matmul(x, w, jnp.ones((2, 10, 256)), jnp.zeros(4, jnp.int32), parts=1)
    ids, chosen = jnp.zeros(4, jnp.int32), Blocks()
    with pytest.raises(ValueError, match="steps of 64 inputs do not go with groups of 128"):
        kernel.grouped_matmul(x[:, :128], w[:, :128], jnp.ones((2, 1, 256)), ids, parts=1, chosen=chosen)
    with pytest.raises(ValueError, match="3 ids are not the same number for each of 4 rows"):
        kernel.grouped_matmul(x, w[:, :, :64], None, jnp.zeros(3, jnp.int32), parts=1)


@pytest.mark.slow
def test_zero_points_are_xlas_and_not_dropped():
    cached = quantized(np.ones((2, 64, 32), np.float32), (1,), SCHEMES["int8"])
    cached = QuantizedTensor(cached.values, cached.scales, cached.grouped, jnp.ones((2, 32), jnp.int8))
    x, sizes, ids = jnp.ones((3, 64)), np.array([1, 2], np.int32), np.zeros(3, np.int32)
    by = {name: jax.jit(partial(grouped_matmul, most=2, backend=name)) for name in ("xla", "pallas_gpu", "pallas_tpu")}
    expected = by.pop("xla")(x, cached, sizes)
    assert np.any(np.asarray(expected) < 64)
    for backend, product in by.items():
        choice = choose(3, cached, x.dtype, backend)
        assert choice.name == "xla"
        assert "zero points" in choice.reason
        np.testing.assert_array_equal(product(x, cached, sizes), expected)
    results = (jax.jit(partial(chosen_matmul, backend=name))(x, cached, ids) for name in ("pallas_gpu", "xla"))
    np.testing.assert_array_equal(*results)


def test_blocks_of_usual_shapes():
    """Qwen3-30B-A3B for one token and for many, gpt-oss-20b for one."""
    assert blocks(8, 8, 2, 2048, 768, jnp.bfloat16, None).splits == 1
    assert [blocks(n, 1, 1, 4096, 4096, jnp.int4, 128).rows for n in (9, 16, 17, 128)] == [16, 16, 64, 64]
    assert [blocks(9, 1, 1, 4096, 4096, jnp.int4, 32, powers).depth for powers in (False, True)] == [32, 64]
    assert [blocks(n, 128, 2, 2048, 768, jnp.bfloat16, None).rows for n in (128, 4096, 16384)] == [16, 64, 128]
    assert blocks(65536, 128, 2, 2048, 768, jnp.bfloat16, None) == Blocks(128, 256, 64, warps=8)
    assert blocks(32768, 32, 2, 2880, 2880, jnp.float4_e2m1fn, 32, True) == Blocks(128, 128, 64, warps=8)
    assert blocks(65536, 128, 2, 2048, 768, jnp.float32, None).rows == 64  # more would not fit on chip
