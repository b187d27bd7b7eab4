"""The TPU kernel of grouped products, interpreted, against float64 numpy. About 10 s."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.ops import grouped_matmul as contract
from inferlib.ops.choice import Choice
from inferlib.ops.packed import Packing, choose
from inferlib.ops.quantized import SCHEMES
from inferlib.pallas_kernels.generations_tpu import planning_for
from inferlib.pallas_kernels.grouped_matmul_tpu import Blocks, default_blocks, grouped_matmul, unsupported
from inferlib.pallas_kernels.packed_weights_tpu import Weight
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from tests.helpers.grouped_matmul_cases import ONCE, Case
from tests.helpers.kernels import copies_of
from tests.helpers.packed_experts import dequantized, packed, quantized

CASES = {
    "around a tail": Case((0, 1, 15, 16, 17, 0), 64),
    "around a tile of rows": Case((63, 64, 65, 1, 128), 336),
    "rows of no group": Case((3, 0, 20), 150),
    "no rows in any group": Case((0,) * 6, 64),
    "more buffers than groups": Case((0, 5, 0), 5, Blocks(16, 128, 16, 16, buffers=4)),
    "three buffers": Case((20, 0, 30, 1, 2, 3), 64, Blocks(32, 128, 16, 16, buffers=3), parts=1),
    "usual blocks": Case((5, 0, 1, 2), 8, None, outer=40),
    "bfloat16": Case((5, 0, 90, 17), 112, dtype="bfloat16"),
    "mxfp4": Case((5, 0, 40, 17), 80, parts=1, inner=160, dtype="bfloat16", scheme="mxfp4"),
    "mxfp4, once": Case((7, 83, 3, 5), 112, ONCE, parts=1, inner=160, dtype="bfloat16", scheme="mxfp4"),
    "mxfp4, some columns after the others": Case(
        (7, 83, 3, 5),
        112,
        replace(ONCE, columns=320, together=256),
        parts=1,
        inner=160,
        outer=320,
        dtype="bfloat16",
        scheme="mxfp4",
    ),
    "float4, once": Case(
        (60, 30, 9), 112, ONCE, parts=1, inner=288, outer=128, dtype="bfloat16", scheme="mxfp4", float4=True
    ),
    "fp8 in groups of all inputs, once": Case(
        (7, 90), 112, ONCE, parts=1, inner=128, outer=128, dtype="bfloat16", scheme="fp8_block"
    ),
    "int4": Case((5, 0, 20, 7), 48, None, inner=256, outer=40, dtype="bfloat16", scheme="int4"),
}
FURTHER = {"mxfp4, once": pytest.mark.release}
RACES = ("around a tile of rows", "three buffers", "rows of no group", "mxfp4")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[FURTHER.get(name, pytest.mark.slow)] if case.scheme else [])
        for name, case in CASES.items()
        if name not in RACES
    ],
)
@pytest.mark.fast_cases(1)
def test_equals_the_oracle(name):
    CASES[name].check(compiled(CASES[name].blocks))


@cache
def compiled(blocks: Blocks | None):
    """One program of all cases of equal shapes and blocks."""
    return jax.jit(lambda x, w, sizes, layer: grouped_matmul(x, w, sizes, layer=layer, blocks=blocks, interpret=True))


@pytest.mark.slow
@copies_of(RACES, early=("mxfp4",), further=[("mxfp4", "on_wait")])
def test_it_has_no_races(name, mode, capsys):
    """Copies happen when they are started, or not before they are waited for. Results are compared as above."""
    params, case = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode), CASES[name]

    def run(x, w, sizes, layer):
        return grouped_matmul(x, w, sizes, layer=layer, blocks=case.blocks, interpret=params)

    case.check(jax.jit(run))
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


@pytest.mark.slow
def test_the_contract_gathers_rows_and_takes_a_layer_of_a_stack():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(7, 24)), rng.normal(size=(2, 3, 2, 24, 40))
    rows, sizes = rng.integers(0, 7, 12).astype(np.int32), np.array([4, 0, 6], np.int32)
    product = partial(contract.grouped_matmul, sizes=sizes, most=7, backend="pallas_tpu")
    expected = np.einsum("mi,m...io->m...o", x[rows[:10]], w[1][[0] * 4 + [2] * 6])
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    got = jax.jit(lambda x, w: product(x, w, rows=rows, layer=jnp.int32(1)))(x, w)
    np.testing.assert_allclose(got[:10], expected, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(jax.jit(product)(x[rows], w[1])[:10], got[:10])


@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
def test_quantised_weights(scheme):
    """By channel and packed; of the latter, inputs are padded."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(12, 32)), jnp.bfloat16)
    w = quantized(jnp.asarray(rng.normal(size=(2, 3, 2, 32, 40)), jnp.float32), (3,), SCHEMES[scheme])
    exact = np.asarray(dequantized(w, (3,)), float).reshape(2, 3, 2, 32, 40)[1][[0] * 4 + [2] * 6]
    w = packed(w, scheme) if w.grouped else w
    product = partial(contract.grouped_matmul, sizes=jnp.asarray([4, 0, 6], jnp.int32), most=6, backend="pallas_tpu")
    got = jax.jit(lambda x, w: product(x, w, layer=jnp.int32(1)))(x, w)
    expected = np.einsum("mi,mpio->mpo", np.asarray(x[:10], float), exact)
    np.testing.assert_allclose(np.asarray(got[:10], float), expected, rtol=0.01, atol=0.01)


def test_what_it_cannot_run_is_refused_with_the_reason():
    def shapes(rows=64, parts=2, inner=2048, outer=768, x="bfloat16", w="bfloat16"):
        return jax.ShapeDtypeStruct((rows, inner), x), jax.ShapeDtypeStruct((1, 8, parts, inner, outer), w)

    assert unsupported(*shapes()) is None
    assert "not float16 and float16" in unsupported(*shapes(x="float16", w="float16"))
    assert "not float32 and bfloat16" in unsupported(*shapes(x="float32"))
    words = Weight(*(jax.ShapeDtypeStruct((1, 8, 2, rows, 768), "int32") for rows in (256, 16, 1)))
    assert unsupported(shapes()[0], words) is None
    assert "packed weights by rows of bfloat16, not float32" in unsupported(shapes(x="float32")[0], words)
    assert "weights 2 x 8192 x 8100 need" in unsupported(*shapes(inner=8192, outer=8100))
    assert "768 columns do not divide into blocks of 512" in unsupported(*shapes(), blocks=Blocks(64, 512, 32, 32))
    with pytest.raises(ValueError, match="does not run this grouped product: it takes rows"):
        jax.eval_shape(grouped_matmul, *shapes(x="float16"), jax.ShapeDtypeStruct((8,), jnp.int32))
    for height in (16, 40, 128):
        with pytest.raises(ValueError, match="not rows above height above tail, multiples of 16"):
            Blocks(64, 128, height, 32)
    with pytest.raises(ValueError, match="two buffers"):
        Blocks(64, 128, 32, 32, buffers=1)
    for options in ({"together": 128}, {"together": 192, "once": True}):
        with pytest.raises(ValueError, match="a multiple of 128, and once"):
            Blocks(64, 384, 32, 32, **options)


def test_a_tile_has_the_rows_of_two_products():
    """DeepSeek-V3's gate and up on v7x, where two buffers leave room for them."""
    w = Weight(
        jax.ShapeDtypeStruct((1, 16, 2, 7168, 2048), "float8_e4m3fn"),
        jax.ShapeDtypeStruct((1, 16, 2, 56, 2048), "float32"),
    )
    with planning_for("v7x"):
        blocks = default_blocks(jax.ShapeDtypeStruct((2048, 7168), "bfloat16"), w)
    assert (blocks.rows, blocks.buffers, blocks.once) == (2 * blocks.height, 2, True)


def test_rows_and_results_lie_on_chip_beside_smaller_tiles():
    """Down of DeepSeek-V3 on v6e: with a third buffer and higher tiles one of them would not."""
    w = jax.ShapeDtypeStruct((1, 16, 1, 512, 7168), "float8_e4m3fn")
    with planning_for("v6e"):
        fewest, middle, most = (
            default_blocks(jax.ShapeDtypeStruct((m, 512), "bfloat16"), w) for m in (4096, 6144, 16384)
        )
    assert (fewest.rows, fewest.buffers) == (most.rows, most.buffers)
    assert (middle.rows, middle.buffers) == (fewest.rows // 2, fewest.buffers - 1) == (fewest.rows // 2, 2)


def test_usual_blocks_fit_the_experts_of_large_models():
    """Qwen3-30B-A3B, Mixtral 8x7B, DeepSeek-V3: gate and up, down; few tokens and many."""
    for inner, outer in ((2048, 768), (4096, 14336), (7168, 2048)):
        for shape in ((2, inner, outer), (1, outer, inner)):
            for rows in (8, 256, 65536):
                for dtype in (jnp.bfloat16, jnp.int8):
                    x = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16)
                    w = jax.ShapeDtypeStruct((1, 64, *shape), dtype)
                    assert unsupported(x, w) is None
                    assert default_blocks(x, w).rows <= max(rows, 16)
                names = (axes.LAYERS, axes.EXPERTS, None, axes.EMBED, axes.MLP)
                packing = Packing(SCHEMES["mxfp4"], (1, 64, *shape), names, (3,))
                assert choose(packing, jnp.bfloat16, Shards(), rows=rows) == Choice("pallas_tpu")
