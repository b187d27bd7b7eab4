"""The TPU kernel of products with weights, interpreted, against float64 products of the dequantised weights, and whole
models with it. About 45 s."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib import LLM, Buckets, SamplingParams
from inferlib.models.abstract import WeightSpec
from inferlib.models.layers.norm import rms_norm
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.ops.matmul import matmul
from inferlib.ops.packed import MEMORY_BOUND_ROWS, Packing, choose
from inferlib.ops.quantized import SCHEMES
from inferlib.pallas_kernels.generations_tpu import planning_for
from inferlib.pallas_kernels.mx_matmul_tpu import Blocks, RmsNorm, blocks, mx_matmul, unsupported
from inferlib.pallas_kernels.packed_weights_tpu import Weight, pack_float4, pack_mxfp4
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, planned_shards
from tests.helpers.kernels import copies_of, kernels_in
from tests.helpers.llms import build_llm, random_prompts
from tests.helpers.packed_products import FLOAT4, hold, packed

ODD = ("mxfp4", FLOAT4, "mxfp8", "int4", "int8", "bfloat16")


def product(x: jax.Array, weight: Weight, **options) -> jax.Array:
    """The kernel's product, interpreted in one program."""
    options = {"out_dtype": jnp.float32, "interpret": True, **options}
    return jax.jit(lambda x, weight: mx_matmul(x, weight, **options))(x, weight)


def check(x: jax.Array, weight: Weight, exact: np.ndarray, layer: int = 1, **options) -> np.ndarray:
    """The kernel's product, within float32 rounding of all that is summed."""
    y = np.asarray(product(x, weight, layer=layer, **options), np.float64)
    hold(y, x, exact[layer])
    return y


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """With block scales that differ by large factors, and a block of zeros."""
    w = rng.standard_normal(shape).astype(np.float32)
    w *= np.repeat(np.exp2(rng.integers(-9, 9, (*shape[:-2], shape[-2] // 32, shape[-1]))), 32, axis=-2)
    w[..., 32:64, :7] = 0
    return w.astype(np.float32)


THREE_ROWS, FORTY_ROWS = (3, 384, 200, Blocks(16, 128)), (40, 256, 136, Blocks(32, 256))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "inputs", "columns", "chosen"),
    [
        *((name, *THREE_ROWS) for name in ("fp8_block", "fp8", "int8_block")),
        *((name, *FORTY_ROWS) for name in ("mxfp4", "int8")),
        # `test_product_properties` has products of odd shapes of these.
        *(pytest.param(name, *THREE_ROWS, marks=pytest.mark.release) for name in ODD),
    ],
)
def test_it_equals_the_dequantised_product(name, rows, inputs, columns, chosen):
    """Odd numbers of rows and columns, whose last blocks are not full; of a stack, the layer asked for."""
    rng = np.random.default_rng(0)
    tensor, exact = packed(name, numbers(rng, 2, 2, inputs, columns))
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.bfloat16)
    check(x, tensor.stack, exact, blocks_=chosen)


@pytest.mark.parametrize("name", ["int8", pytest.param("mxfp4", marks=pytest.mark.release)])
def test_it_multiplies_by_weights_that_are_on_chip(name):
    rng = np.random.default_rng(2)
    tensor, exact = packed(name, numbers(rng, 1, 2, 256, 384))
    x = jnp.asarray(rng.standard_normal((3, 256)), jnp.bfloat16)
    for chosen in (None, Blocks(16, 128)):
        check(x, dataclasses.replace(tensor.stack, on_chip=True), exact, layer=0, blocks_=chosen)


def test_many_rows_fill_a_unit_that_sums_over_two_groups():
    """Weights of two groups are scaled and rounded to bfloat16 before the product, and a last group alone."""
    rng = np.random.default_rng(3)
    tensor, exact = packed("fp8_block", numbers(rng, 1, 1, 384, 128))
    x = jnp.asarray(rng.standard_normal((80, 384)), jnp.bfloat16)
    of_sums = product(x, tensor.stack)
    with planning_for("v7x"):
        y = product(x, tensor.stack)
    assert np.any(y != of_sums)
    hold(np.asarray(y, np.float64), x, exact[0], rounding=2**-9)


# More tiles of rows and a late layer are tried with packed values and with plain ones, not with every dtype.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "layer"),
    [
        ("mxfp4", 3, 1),
        pytest.param(FLOAT4, 3, 1, marks=pytest.mark.release),
        ("bfloat16", 40, 18),
    ],
)
def test_norm_and_activation_are_part_of_it(name, rows, layer):
    """Of a stack, by the norm's weight of the layer asked for; no mean counts inputs that are padding."""
    rng = np.random.default_rng(5)
    tensor, _ = packed(name, np.repeat(numbers(rng, 1, 2, 288, 136), 20, axis=0))
    x = jnp.asarray(rng.standard_normal((rows, 288)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((20, 288)), jnp.bfloat16)
    norm = RmsNorm(weights, 1e-3, offset=1.0)
    normed = rms_norm(x, weights[layer], 1e-3, unit_offset=True)
    products = product(normed, tensor.stack, layer=layer)
    y = product(x, tensor.stack, layer=layer, norm=norm)
    most = float(jnp.max(jnp.abs(products)))
    np.testing.assert_allclose(y, products, rtol=0, atol=most * 2**-8)  # normed rows may round to the other neighbour
    assert np.mean(np.asarray(y) == np.asarray(products)) > 0.5
    both = jnp.stack([jnp.tanh(products[0]) * products[1]])
    result = product(x, tensor.stack, layer=layer, norm=norm, activation=lambda gate, up: jnp.tanh(gate) * up)
    np.testing.assert_allclose(result, both, rtol=0, atol=most * 2**-7)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_many_rows_are_multiplied_by_xla(name):
    rng = np.random.default_rng(6)
    tensor, exact = packed(name, rng.standard_normal((3, 2, 160, 136)))
    x = jnp.asarray(rng.standard_normal((MEMORY_BOUND_ROWS + 1, 160)), jnp.bfloat16)
    assert not kernels_in(lambda x: matmul(x, tensor.of_layer(jnp.int32(2))), x)
    assert kernels_in(lambda x: matmul(x, tensor.of_layer(jnp.int32(2))), x[1:]) == {"mx_matmul"}
    many = matmul(x, tensor.of_layer(jnp.int32(2)), out_dtype=jnp.float32)
    small_batch = matmul(x[:8], tensor.of_layer(jnp.int32(2)), out_dtype=jnp.float32)
    np.testing.assert_allclose(many, np.einsum("tk,pkn->tpn", np.asarray(x, np.float64), exact[2]), atol=1e-3)
    np.testing.assert_allclose(many[:8], small_batch, atol=1e-4)


@copies_of(("mxfp4", "bfloat16"), early=("mxfp4",), further=[("mxfp4", "on_wait")])
def test_copies_are_awaited_and_do_not_race(name, mode):
    rng = np.random.default_rng(1)
    tensor, exact = packed(name, numbers(rng, 2, 2, 128, 200))
    x = jnp.asarray(rng.standard_normal((19, 128)), jnp.bfloat16)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    check(x, tensor.stack, exact, blocks_=Blocks(16, 128), interpret=params)


@pytest.mark.parametrize(
    ("name", "columns"), [("mxfp4", 300), pytest.param("bfloat16", 500, marks=pytest.mark.slow), ("int8", 100)]
)
def test_two_cores_share_the_columns(name, columns, capsys):
    """Three steps, of which the second core takes one, four, and one, which leaves it nothing; three tiles of rows."""
    rng = np.random.default_rng(4)
    tensor, exact = packed(name, numbers(rng, 2, 2, 128, columns))
    x = jnp.asarray(rng.standard_normal((35, 128)), jnp.bfloat16)
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True)
    with planning_for("v5p"):
        check(x, tensor.stack, exact, blocks_=Blocks(16, 128), interpret=params)
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


def test_cores_have_equally_many_columns():
    """If not, a step less wide takes less time. The steps of a core are as many as one core has of the whole weight."""

    def steps(columns, bits, generation):
        with planning_for(generation):
            return -(-columns // blocks(16, 1, 4096, columns, bits, 4096).columns)

    assert (steps(14336, 16, "v5e"), steps(14336, 16, "v5p")) == (56, 56)
    assert (steps(16032, 16, "v5e"), steps(16032, 16, "v5p")) == (63, 63)
    assert (steps(1792, 16, "v5e"), steps(1792, 16, "v5p")) == (7, 14)


@pytest.mark.parametrize("pack", [pack_mxfp4, pack_float4])
def test_every_code_of_mxfp4_with_every_exponent(pack):
    """A row that picks one input at a time reads the weights themselves."""
    codes = np.broadcast_to((np.arange(256) % 16).astype(np.uint8)[:, None], (256, 128))
    scales = np.full((8, 128), 127, np.uint8)
    scales[:, 0] = 127 - np.arange(8) * 3  # within 2^-26 of the largest, at the bottom of e8m0 and at its top
    scales[:, 1], scales[:, 2] = 10, 250
    weight = Weight(*(np.asarray(x)[None, None] for x in jax.jit(pack)(codes, jnp.asarray(scales))))
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    exact = np.where(codes > 7, -1, 1) * magnitudes[np.asarray(codes) & 7]
    exact = exact * np.exp2(np.repeat(scales, 32, axis=0).astype(np.float64) - 127)
    x = jnp.eye(256, dtype=jnp.bfloat16)
    y = np.asarray(product(x, weight), np.float64)[0]
    is_zero = exact == 0
    np.testing.assert_array_equal(y[~is_zero], exact[~is_zero])
    most = np.broadcast_to(np.abs(exact).max(0), exact.shape)
    assert np.all(np.abs(y[is_zero]) <= most[is_zero] * 2.0**-26)


@pytest.mark.parametrize("name", ["mxfp4", FLOAT4])
def test_a_nan_scale_spoils_its_column_alone_and_padding_nothing(name):
    rng = np.random.default_rng(2)
    tensor, _ = packed(name, numbers(rng, 1, 2, 256, 130), spoilt=(0, 1, 1, 5))
    x = rng.standard_normal((5, 256)).astype(np.float32)
    x[3] = np.nan
    y = np.asarray(product(jnp.asarray(x, jnp.bfloat16), tensor.stack))
    spoilt = np.zeros(y.shape, bool)
    spoilt[1, :, 5], spoilt[:, 3] = True, True
    np.testing.assert_array_equal(np.isnan(y), spoilt)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", FLOAT4])
@pytest.mark.parametrize("normed", [False, True])
def test_inputs_are_padded(name, normed):
    """Memory that nothing was written to is NaN."""
    rng, inputs = np.random.default_rng(3), 96 if name == "mxfp8" else 160
    tensor, exact = packed(name, numbers(rng, 1, 2, inputs, 64))
    x, ones = jnp.asarray(rng.standard_normal((4, inputs)), jnp.bfloat16), jnp.ones((1, inputs), jnp.bfloat16)
    assert tensor.stack.inputs == (128 if name == "mxfp8" else 256)
    norm = RmsNorm(ones, 1e-3) if normed else None
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    y = product(x, tensor.stack, layer=0, norm=norm, interpret=params)
    hold(np.asarray(y, np.float64), rms_norm(x, ones[0], 1e-3) if normed else x, exact[0], rounding=2e-3)


@pytest.mark.parametrize(
    ("shape", "names", "contract"),
    [
        ((128, 2, 3, 64), (axes.EMBED, axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM), 1),
        ((2, 2, 64, 96), (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM, axes.EMBED), 3),
        pytest.param((128, 2, 96), (axes.EMBED, axes.GATE_UP, axes.MLP), 1, marks=pytest.mark.release),
    ],
    ids=["queries", "output", "gate and up"],
)
def test_layers_see_no_difference(shape, names, contract):
    rng, scheme = np.random.default_rng(4), Quantization.named("mxfp4_a8" if contract > 1 else "mxfp4").scheme
    w = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    spec = WeightSpec("w", shape, np.dtype("bfloat16"), names, "normal", None, "w", tuple(range(contract)), scheme)
    ready = dataclasses.replace(spec, packed=True)
    arrays = jax.jit(ready.stored)(w)
    assert [(x.shape, x.dtype) for x in arrays] == [(a.shape, a.dtype) for a in ready.arrays]
    x = jnp.asarray(rng.standard_normal((5, *shape[:contract])), jnp.bfloat16)
    run = jax.jit(partial(matmul, contract=contract, out_dtype=jnp.float32))
    dense, result = run(x, scheme.tensor(*jax.jit(spec.stored)(w))), run(x, ready.packing.tensor(*arrays))
    np.testing.assert_allclose(result, dense, rtol=1e-5, atol=1e-5)


def built(path, backend: Backend) -> LLM:
    """A model in mxfp4 and bfloat16, in stacked layers."""
    buckets = Buckets(prefill=(16,), batch=(2,), cache=(64,))
    llm = build_llm(path, buckets, dtype="bfloat16", quantization="mxfp4", scan=True, decode_steps=1, backend=backend)
    assert llm.engine.programs.config.backend == backend
    return llm


@pytest.mark.release  # with all other kernels in `tests/models/test_backends.py`
def test_a_model_has_the_same_logits(checkpoint):
    """But for bfloat16, of chunks; and by them it chooses the tokens of rows. Layers are stacked."""
    path, prompts = checkpoint("llama", num_hidden_layers=2), random_prompts([5, 20])
    dense, llm = (built(path, backend) for backend in (Backend(), Backend(matmul="pallas_tpu")))
    assert not any(weight.packed for weight in dense.engine.programs.model.weights)
    assert any(weight.packed for weight in llm.engine.programs.model.weights)
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        sequence = [*prompt, *tokens[:-1]]
        expected = dense.logits(sequence)
        within = 0.1 * np.std(expected)
        np.testing.assert_allclose(llm.logits(sequence), expected, rtol=0, atol=within)
        rows = expected[len(prompt) - 1 :]
        assert (rows.max(-1) - rows[np.arange(len(tokens)), tokens]).max() < 2 * within  # both may differ


@pytest.mark.release  # with all other kernels in `tests/models/test_backends.py`
@pytest.mark.parametrize("kernels", [("grouped_matmul", "expert_mlp"), ("grouped_matmul",)])
def test_a_model_of_experts_has_the_same_logits(kernels, checkpoint):
    """But for bfloat16, as grouped products, and all at once. All are chosen: rounding picks among near equals."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4}
    path = checkpoint("gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=2, **experts)
    (tokens,) = random_prompts([12])
    dense = built(path, Backend()).logits(tokens)
    llm = built(path, Backend(**dict.fromkeys(kernels, "pallas_tpu")))
    assert {axes.EXPERTS in w.axes for w in llm.engine.programs.model.weights if w.packed} == {True}
    np.testing.assert_allclose(llm.logits(tokens), dense, rtol=0, atol=0.1 * np.std(dense))


def test_reasons():
    def lacks(scheme: str, shape: tuple[int, ...] = (256, 512), shards: Shards = Shards(), dtype="bfloat16"):  # noqa: B008
        names = (axes.MLP, axes.EMBED)
        weight = WeightSpec("w", shape, np.dtype(dtype), names, "normal", None, "w", (0,), SCHEMES[scheme])
        return weight.pack_choice(dtype, shards).reason

    assert not lacks("mxfp4")
    assert "bfloat16, not float32" in lacks("mxfp4", dtype="float32")
    assert "groups have 64 inputs, not 128" in lacks("int4", (192, 512))
    four = planned_shards(Parallelism(tensor=4))
    assert not lacks("mxfp4", (1024, 512), four)
    assert "the 64 inputs of a device" in lacks("mxfp4", (256, 512), four)
    assert "on-chip memory" in lacks("fp8", (1 << 18, 512))
    packing = Packing(SCHEMES["fp8"], (4, 32, 128), (axes.KV_HEADS, axes.MLP, axes.EMBED), (0, 1))
    assert "the mesh splits mlp" in choose(packing, jnp.bfloat16, four, rows=16).reason
    x, weight = (
        jnp.zeros((4, 256), jnp.float32),
        Weight(jnp.zeros((1, 1, 256, 128), jnp.int8), jnp.zeros((1, 1, 1, 128))),
    )
    with pytest.raises(ValueError, match="does not run this product: it takes activations of bfloat16"):
        mx_matmul(x, weight)
    assert unsupported(4, jnp.bfloat16, weight) is None
    with pytest.raises(ValueError, match="multiples of 16 rows and 128 columns"):
        Blocks(16, 100)


@pytest.mark.parametrize("rows", [1, 16, 64, 1024])
@pytest.mark.parametrize(("inputs", "columns"), [(4096, 14336), (1792, 4096), (512, 4096), (28672, 8192), (8192, 768)])
def test_default_blocks_fit(rows, inputs, columns):
    for bits in (4, 8):
        chosen = blocks(rows, 2, inputs, columns, bits, 128)
        assert chosen.columns <= max(columns, 256)
        values = jax.ShapeDtypeStruct((1, 2, inputs, columns), jnp.int4 if bits == 4 else jnp.int8)
        weight = Weight(values, jax.ShapeDtypeStruct((1, 2, inputs // 128, columns), jnp.float32))
        assert unsupported(rows, jnp.bfloat16, weight) is None
