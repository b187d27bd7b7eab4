"""Quantised weights: codecs against the formats' definitions, products, whole models. About 45 s."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from inferlib import LLM, Buckets
from inferlib.checkpoint.source import CheckpointError
from inferlib.conversion import convert
from inferlib.engine.engine import Engine
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.config import ConfigError, OutputGate
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.ops import eight_bits, packed
from inferlib.ops.choice import Choice
from inferlib.ops.grouped_matmul import choose as choose_grouped
from inferlib.ops.grouped_matmul import chosen_matmul, grouped_matmul
from inferlib.ops.matmul import choose, decode_sized, matmul
from inferlib.ops.packed import Packing
from inferlib.ops.quantized import SCHEMES, QuantizedTensor, Scheme, nbytes
from inferlib.option_checks import ConfigurationError
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import Shards, make_shards, planned_shards
from tests.helpers.kernels import lowered_for_cuda
from tests.helpers.llms import random_prompts, reference
from tests.helpers.oracle import make_checkpoint
from tests.helpers.packed_experts import dequantized, quantized

# ---- the formats, written out: magnitudes in the order of their codes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
ALL = {**SCHEMES, "int4_g32": Quantization.named("int4_g32").scheme}
GRIDS = {"int8": np.arange(128.0), "int4": np.arange(8.0), "float8_e4m3fn": E4M3, "float4_e2m1fn": E2M1}


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The grid's magnitude nearest to x, of two as near the one with the even code; beyond the last, the last."""
    mag = np.minimum(np.abs(x), grid[-1])
    high = np.clip(np.searchsorted(grid, mag), 1, len(grid) - 1)
    below, above = mag - grid[high - 1], grid[high] - mag
    up = (above < below) | ((above == below) & (high % 2 == 0))
    return np.copysign(grid[np.where(up, high, high - 1)], x)


def rounded(w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """[I, O] float32 rounded to a scheme and back, groups along I, by the definitions alone."""
    group = len(w) if scheme.group is None else math.gcd(len(w), scheme.group)
    blocks = w.reshape(-1, group, w.shape[1])
    grid, top = GRIDS[scheme.values], np.abs(blocks).max(1, keepdims=True)
    if scheme.scales != "float8_e8m0fnu":
        scales = (top / np.float32(grid[-1])).astype(scheme.scales).astype(np.float32)
        scales = np.where(scales == 0, np.float32(1), scales)
    else:
        exponent = np.frexp(top)[1] - 1 - int(math.log2(grid[-1]))
        scales = np.ldexp(1.0, np.where(top > 0, np.clip(exponent, -127, 127), -127))
    return (nearest(blocks / scales, grid) * scales).astype(np.float32).reshape(w.shape)


def restored(q: QuantizedTensor, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(dequantized(q, (0,))).reshape(shape)


# Normal numbers: what a device does with subnormal ones is its own affair. Multiples of 1/16 meet ties.
NUMBERS = st.one_of(
    st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 2.0**-60),
    st.integers(-2000, 2000).map(lambda n: n / 16),
)
MATRICES = hnp.arrays(np.float32, (64, 2), elements=NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@given(w=MATRICES)
@settings(max_examples=15)
def test_codec_is_exact(name, w):
    scheme = ALL[name]
    cached = quantized(jnp.asarray(w), (0,), scheme)
    expected = rounded(w, scheme)
    once = restored(cached, w.shape)
    if scheme.scales != "float8_e8m0fnu":  # the division by a scale rounds: once in float32, in the oracle too
        step = np.abs(w).max() / GRIDS[scheme.values][-1]
        np.testing.assert_allclose(once, expected, rtol=1e-6, atol=float(step) * 1e-5)
    else:
        np.testing.assert_array_equal(once, expected)
        np.testing.assert_array_equal(restored(quantized(once, (0,), scheme), w.shape), once)  # a second time: the same


@pytest.mark.parametrize(("dtype", "name"), [("float4_e2m1fn", "mxfp4"), ("float8_e4m3fn", "mxfp8")])
def test_every_mx_code_survives(dtype, name):
    """Each element code, in a block whose scale is one: values, ties and saturation."""
    grid = np.concatenate([GRIDS[dtype], -GRIDS[dtype]])
    ties = (grid[:-1] + grid[1:]) / 2
    # As near a tie as float16 and bfloat16 can say, and nearer: what is rounded to these first arrives at the tie.
    ties = np.concatenate([ties * (1 + side * 2.0**-k) for k in (9, 12, 20) for side in (-1, 0, 1)])
    beyond = np.array([grid.max() * 1.1, -grid.max() * 1.1])  # less than the next power of two
    x = np.concatenate([grid, ties, beyond]).astype(np.float32)
    block = np.zeros((32, x.size), np.float32)
    block[0], block[-1] = x, GRIDS[dtype][-1]  # whose largest makes the scale one
    cached = quantized(block, (0,), SCHEMES[name])
    assert (cached.scales.astype(jnp.float32) == 1.0).all()
    np.testing.assert_array_equal(cached.values[0, 0].astype(jnp.float32), nearest(x, GRIDS[dtype]))


def test_scales_of_mx_blocks():
    largest = np.array([0, 2.0**-140, 2.0**-126, 1, 6, 7.99, 2.0**127, 3e38, np.inf, np.nan, -np.inf], np.float32)
    block = np.zeros((32, largest.size), np.float32)
    block[5] = largest
    codes = quantized(block, (0,), SCHEMES["mxfp4"]).scales.view(np.uint8)[0]
    np.testing.assert_array_equal(codes, [0, 0, 0, 125, 127, 127, 252, 252, 255, 255, 255])
    poisoned = restored(quantized(block, (0,), SCHEMES["mxfp4"]), block.shape)
    assert np.isnan(poisoned[:, -3:]).all()
    assert not np.isnan(poisoned[:, :-3]).any()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(name, bad):
    w = np.ones((64, 3), np.float32)
    w[3, 1] = bad
    back = restored(quantized(w, (0,), SCHEMES[name]), w.shape)
    assert not np.isfinite(back[:32, 1]).any()
    np.testing.assert_allclose(back[:, [0, 2]], 1, rtol=0.1)


# ---- products


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("tokens", "shape", "contract"), [(5, (96, 2, 8), 1), (1, (2, 3, 24, 8), 3)])
def test_product_is_that_of_the_rounded_weight(name, tokens, shape, contract):
    rng = np.random.default_rng(tokens)
    w, x = rng.normal(size=shape).astype(np.float32), rng.normal(size=(tokens, *shape[:contract])).astype(np.float32)
    contracting = tuple(range(contract))
    cached = jax.jit(lambda w: quantized(w, contracting, ALL[name]))(w)
    described = ALL[name].arrays(shape, ("a",) * len(shape), contracting)
    for part, (size, _, dtype) in described.items():
        assert (getattr(cached, part).shape, getattr(cached, part).dtype) == (size, dtype)
    whole = np.asarray(dequantized(cached, contracting), np.float64).reshape(shape)
    assert 0 < np.abs(whole - w).max() < 1
    got = jax.jit(lambda x, w: matmul(x, w, contract=contract))(x, cached)
    np.testing.assert_allclose(got, np.tensordot(x.astype(np.float64), whole, contract), rtol=1e-5, atol=1e-4)


def rounded_along_last(x: np.ndarray, group: int) -> np.ndarray:
    """To MXFP8, by the definitions."""
    rows = x.reshape(-1, x.shape[-1]).T
    return rounded(rows, Scheme("float8_e4m3fn", group, "float8_e8m0fnu")).T.reshape(x.shape)


@pytest.mark.parametrize("name", ["mxfp8_a8", "mxfp4_a8"])
@pytest.mark.parametrize(("tokens", "shape", "contract", "group"), [(1, (96, 2, 8), 1, 32), (5, (2, 3, 24, 8), 3, 8)])
def test_inputs_are_rounded_too(name, tokens, shape, contract, group):
    rng, contracting = np.random.default_rng(tokens), tuple(range(contract))
    x = (3 * rng.normal(size=(tokens, *shape[:contract]))).astype(np.float32)
    cached = quantized(rng.normal(size=shape).astype(np.float32), contracting, Quantization.named(name).scheme)
    whole = np.asarray(dequantized(cached, contracting), np.float64).reshape(shape)
    expected = np.tensordot(rounded_along_last(x, group).astype(np.float64), whole, contract)
    assert np.abs(expected - np.tensordot(x.astype(np.float64), whole, contract)).max() > 0.1
    got = jax.jit(lambda x, w: matmul(x, w, contract=contract))(x, cached)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


ROUNDING = {"int8_a8": 0.01, "fp8_a8": 0.035}  # the error of rounded normal inputs, relative to the product's norm


def eight_bit_product(name: str, rows: int, dtype="float32") -> tuple[np.ndarray, QuantizedTensor, np.ndarray]:
    """Inputs [T, 6, 16], of which the fourth is zero, a weight [6, 16, 3, 8], and what it stands for in float64."""
    rng, contracting = np.random.default_rng(rows), (0, 1)
    x = jnp.asarray(3 * rng.normal(size=(rows, 6, 16)), dtype).at[3].set(0)
    scheme = Quantization.named(name).scheme
    w = quantized(rng.normal(size=(6, 16, 3, 8)).astype(np.float32), contracting, scheme)
    return x, w, np.asarray(dequantized(w, contracting), np.float64)


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_rows_are_rounded_by_token(name, dtype):
    x, w, whole = eight_bit_product(name, eight_bits.MANY_ROWS, dtype)
    exact = np.asarray(x.astype(jnp.float32))
    values, scales = jax.jit(partial(eight_bits.by_token, dtype=w.values.dtype))(x)
    taken = np.asarray(values.astype(jnp.float32), np.float64) * np.asarray(scales)[:, None, None]
    nearest = rounded(exact.reshape(len(x), -1).T, Scheme(w.values.dtype.name)).T.reshape(x.shape)
    assert (np.abs(taken - exact) <= np.abs(nearest - exact) * (1 + 1e-3) + 1e-5).all()  # of two as near, either
    want = np.tensordot(taken, whole, 2)
    got = np.asarray(jax.jit(partial(matmul, contract=2))(x, w).astype(jnp.float32))
    tolerance = 1e-5 if dtype == "float32" else 2**-7  # rounded before the scales and after
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-4)
    assert not got[3].any()
    without = np.tensordot(exact.astype(np.float64), whole, 2)
    assert 0.001 < np.linalg.norm(want - without) / np.linalg.norm(without) < ROUNDING[name]


@pytest.mark.parametrize("name", ROUNDING)
def test_fewer_rows_are_not_rounded(name):
    x, w, _ = eight_bit_product(name, eight_bits.MANY_ROWS - 1)
    got = jax.jit(partial(matmul, contract=2))(x, w)
    np.testing.assert_array_equal(got, jax.jit(partial(matmul, contract=2))(x, replace(w, round_inputs=False)))


@pytest.mark.parametrize("name", ROUNDING)
def test_a_token_that_is_not_finite_spoils_itself_alone(name):
    x, w, _ = eight_bit_product(name, eight_bits.MANY_ROWS)
    run = jax.jit(partial(matmul, contract=2))
    for bad in (np.nan, np.inf):
        got = np.asarray(run(x.at[7, 2, 5].set(bad), w))
        assert not np.isfinite(got[7]).any()
        np.testing.assert_array_equal(np.delete(got, 7, 0), np.delete(np.asarray(run(x, w)), 7, 0))


@pytest.mark.parametrize("name", ROUNDING)
def test_packed_weights_multiply_rounded_tokens(name):
    rng, scheme = np.random.default_rng(0), Quantization.named(name).scheme
    w = quantized(rng.normal(size=(96, 2, 128)).astype(np.float32), (0,), scheme)
    packing = Packing(scheme, (96, 2, 128), ("embed", "gate_up", "mlp"), (0,))
    x = jnp.asarray(rng.normal(size=(eight_bits.MANY_ROWS, 96)), jnp.bfloat16)
    gated = partial(matmul, activation=lambda gate, up: gate * up)
    got, want = jax.jit(gated)(x, packing.tensor(*packing.pack(w.values, w.scales))), jax.jit(gated)(x, w)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize(("name", "operands"), [("int8_a8", "i8"), ("fp8_a8", "f8E4M3FN")])
@pytest.mark.parametrize("rows", [3, eight_bits.MANY_ROWS])
def test_gpus_multiply_eight_bits_by_eight_bits(name, operands, rows):
    x, w, _ = eight_bit_product(name, rows, "bfloat16")
    text = lowered_for_cuda(partial(matmul, contract=2), x, w)
    products = [line for line in text.splitlines() if "dot_general" in line]  # of all platforms
    assert sum(f"(tensor<{max(rows, 16)}x96x{operands}>, tensor<24x96x{operands}>)" in line for line in products) == 1


@pytest.mark.parametrize("name", ROUNDING)
def test_gpus_round_all_tokens_whatever_the_backend(name):
    x, w, _ = eight_bit_product(name, 4, "bfloat16")
    for backend in (None, "xla", "pallas_gpu"):
        assert choose(w, len(x), x.dtype, contract=2, backend=backend) == Choice("eight_bits")
        assert choose(w, len(x), x.dtype, contract=2, backend=backend, partials=True) == Choice("xla")
    assert not decode_sized(w, len(x), "pallas_gpu")


def test_experts_do_not_round_their_tokens(tmp_path):
    hf = json.loads((make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1) / "config.json").read_text())
    model = abstract_model(config_from_hf(hf), "float32", quantization=Quantization.named("fp8_a8"))
    rounds = {w.part: w.scheme.round_inputs for w in model.weights if w.scheme is not None}
    assert rounds["attn.qkv"]
    assert not rounds["mlp.experts.gate_up"]


@pytest.mark.slow
def test_rounded_tokens_on_a_mesh(checkpoint, monkeypatch):
    """Where inputs are split, each device has a scale for its part, so results are as near as rounding is."""
    monkeypatch.setattr(eight_bits, "MANY_ROWS", 16)
    path, (prompt,) = checkpoint("llama", num_hidden_layers=1, intermediate_size=64), random_prompts([20])
    sizes = dict(dtype="float32", max_batch=1, max_len=32, buckets=Buckets(prefill=(16,), batch=(1,), cache=(32,)))
    options = dict(progress=False, **sizes)
    exact, one, two = (
        LLM(path, quantization=q, parallel=parallel, **options).logits(prompt)
        for q, parallel in (("int8", None), ("int8_a8", None), ("int8_a8", "tp=2"))
    )
    scale = np.abs(exact).max()
    assert np.abs(one - exact).max() > 1e-4 * scale
    for near in (one, two):
        assert np.corrcoef(near.ravel(), exact.ravel())[0, 1] > 0.99
    assert np.corrcoef(one.ravel(), two.ravel())[0, 1] > 0.99


def test_stored_weights_may_round_their_tokens_or_not(tmp_path, checkpoint):
    convert(checkpoint("llama"), tmp_path / "out", quantization="int8", dtype="float32")
    files = ModelFiles.open(tmp_path / "out")
    assert files.quantization("int8_a8") == Quantization.named("int8_a8")
    assert files.quantization(None) == Quantization.named("int8")
    with pytest.raises(CheckpointError, match="has int8 weights, which cannot become fp8_a8"):
        files.quantization("fp8_a8")


def drawn(rng: np.random.Generator, scheme: Scheme, shape, contracting) -> QuantizedTensor:
    """Of random codes, scales and zero points."""
    arrays = {}
    for part, (size, _, dtype) in scheme.arrays(shape, ("a",) * len(shape), contracting).items():
        lowest = ml_dtypes.iinfo(scheme.values).min
        drawn = rng.uniform(0.01, 0.1, size) if part == "scales" else rng.integers(lowest, -lowest, size)
        arrays[part] = jnp.asarray(drawn.astype(dtype))
    return scheme.tensor(**arrays)


@pytest.mark.parametrize("scheme", [Scheme("int4", 32, zeros=True), Scheme("int8", zeros=True)])
@pytest.mark.parametrize(("tokens", "shape", "contract"), [(5, (96, 2, 8), 1), (1, (2, 3, 64, 8), 3)])
def test_zero_points_are_subtracted(scheme, tokens, shape, contract):
    rng, contracting = np.random.default_rng(tokens), tuple(range(contract))
    cached = drawn(rng, scheme, shape, contracting)
    values, scales, zeros = (np.asarray(x).astype(np.float64) for x in (cached.values, cached.scales, cached.zeros))
    axes = (contract,) if scheme.group else contracting
    whole = ((values - np.expand_dims(zeros, axes)) * np.expand_dims(scales, axes)).reshape(shape)
    np.testing.assert_allclose(dequantized(cached, contracting).reshape(shape), whole, rtol=1e-6)
    x = rng.normal(size=(tokens, *shape[:contract])).astype(np.float32)
    got = jax.jit(lambda x, w: matmul(x, w, contract=contract))(x, cached)
    np.testing.assert_allclose(got, np.tensordot(x.astype(np.float64), whole, contract), rtol=1e-5, atol=1e-4)


# ---- models


def rounded_checkpoint(path, out, scheme: Scheme, head_dim: int):
    """A copy of a Hugging Face model whose projections and head are rounded, [out, in] along in."""
    tensors = load_file(path / "model.safetensors")
    for name, w in tensors.items():
        if name.endswith("proj.weight") or name == "lm_head.weight":
            local = scheme
            if scheme.group is not None and "o_proj" in name:
                local = Scheme(scheme.values, math.gcd(head_dim, scheme.group), scheme.scales)
            tensors[name] = np.ascontiguousarray(rounded(w.T, local).T)
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((path / "config.json").read_text())
    return out


@pytest.mark.parametrize("name", ["int8", "fp8_block", "mxfp4", "int4_g32"])
@pytest.mark.fast_cases(1)
def test_logits_are_those_of_the_rounded_model(name, checkpoint, tmp_path):
    """Of which the model is made too: where a quotient is between two codes, its rounding in float32 decides."""
    original, (prompt,) = checkpoint("llama"), random_prompts([20])
    path = rounded_checkpoint(original, tmp_path / "rounded", ALL[name], 24)
    buckets = Buckets(prefill=(16,), batch=(1,), cache=(32,))
    llm = LLM(path, quantization=name, dtype="float32", max_batch=1, max_len=32, buckets=buckets, progress=False)
    expected = reference(path, prompt)
    assert np.abs(expected - reference(original, prompt)).max() > 0.01
    np.testing.assert_allclose(llm.logits(prompt), expected, rtol=0, atol=1e-4)
    # What is on the device is what was counted.
    taken = jax.jit(lambda *w: w).lower(*llm.engine.weights).compile().memory_analysis().argument_size_in_bytes
    model = llm.engine.model
    assert taken == model.nbytes == sum(nbytes(w.shape, w.dtype) for w in llm.engine.weights)
    matrices = [w for w in model.weights if w.scheme is not None]
    assert len(matrices) == 4 * 2 + 1
    # 96 wide, 80 of feed-forward, 2 x 3 query heads of 24, 131 tokens.
    sizes = {"int8": (0, 8, 4), "fp8_block": (128, 8, 4), "mxfp4": (32, 4, 1), "int4_g32": (32, 4, 2)}
    group, bits, scale = sizes[name]
    scales = 0
    for inputs, outputs, run in ((96, 240, 96), (96, 160, 96), (80, 96, 80), (144, 96, 24), (96, 131, 96)):
        count = inputs // math.gcd(run, group) if group else 1
        scales += (1 if outputs == 131 else 2) * count * outputs
    numbers = 2 * (96 * 240 + 96 * 160 + 80 * 96 + 144 * 96) + 96 * 131
    assert sum(a.nbytes for w in matrices for a in w.arrays) == numbers * bits // 8 + scales * scale


@pytest.mark.slow
def test_a_mesh_gives_the_same_logits(checkpoint):
    path, (prompt,) = checkpoint("llama", num_hidden_layers=1, intermediate_size=64), random_prompts([20])
    buckets = Buckets(prefill=(16,), batch=(1,), cache=(32,))
    sizes = dict(dtype="float32", max_batch=1, max_len=32, buckets=buckets, progress=False)
    for name, parallel in (("mxfp8", "tp=2"), ("int8", "tp=2,cp=2,rules=tp2d")):
        one, several = (LLM(path, quantization=name, parallel=p, **sizes) for p in (None, parallel))
        np.testing.assert_allclose(several.logits(prompt), one.logits(prompt), rtol=0, atol=1e-4)
    with pytest.raises(ConfigurationError, match="float4_e2m1fn weights work on a single CPU"):
        LLM(path, quantization="mxfp4", parallel="tp=2", **sizes)


# What is quantised of a recurrent layer of each kind: the matrices that give its heads vectors.
RECURRENT = {
    "qwen3_5_text": ("linear_attention", {"qk", "vz", "o"}),
    "nemotron_h": ("mamba", {"bc", "x", "z", "o"}),
    "kimi_linear": ("linear_attention", {"qkv", "down", "fade", "gate", "o"}),
    "minimax": ("linear_attention", {"qkv", "gate", "o"}),
    "lfm2": ("conv", {"bcx", "o"}),
}


@pytest.fixture
def one_layer_of(checkpoint) -> Callable[[str], Path]:
    """`one_layer_of(family)`: the folder of a model of one recurrent layer."""

    def build(family: str) -> Path:
        types = "layers_block_type" if family == "nemotron_h" else "layer_types"
        return checkpoint(family, num_hidden_layers=1, **{types: RECURRENT[family][:1]})

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        *(("nemotron_h", "tp=4"), ("qwen3_5_text", None)),
        # What of the others is quantised is below.
        *(pytest.param(family, None, marks=pytest.mark.release) for family in ("lfm2", "kimi_linear")),
    ],
)
def test_recurrent_layers_are_those_of_their_rounded_weights(family, parallel, one_layer_of):
    """Of the same model in float32 with these weights; over two chunks, so that the second goes on from a state."""
    path, (prompt,) = one_layer_of(family), random_prompts([27])
    sizes = dict(dtype="float32", max_batch=1, max_len=32, buckets=Buckets((16,), (1,), (32,)), progress=False)
    dense, cached = LLM(path, **sizes), LLM(path, quantization="int8", parallel=parallel, **sizes)
    before = dense.logits(prompt)
    specs = abstract_model(dense.model_config, "float32", quantization=Quantization.named("int8")).weights
    engine = dense.engine
    rounded = tuple(
        quantized(w, s.contracting, s.scheme).dequantized(s.contracting, w.dtype).reshape(w.shape) if s.scheme else w
        for s, w in zip(specs, engine.weights, strict=True)
    )
    dense._runner.engine = Engine(engine.model, rounded, engine.config, programs=engine.programs)
    expected = dense.logits(prompt)
    assert np.abs(expected - before).max() > 0.01
    np.testing.assert_allclose(cached.logits(prompt), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", RECURRENT)
def test_matrices_that_give_heads_vectors_are_quantised(family, one_layer_of):
    config = ModelFiles.open(one_layer_of(family)).config
    specs = abstract_model(config, "float32", quantization=Quantization.named("int8")).weights
    mixer = {spec.part.removeprefix("attn."): spec.scheme for spec in specs if spec.part.startswith("attn.")}
    assert {part for part, scheme in mixer.items() if scheme is not None} == RECURRENT[family][1]


@pytest.mark.parametrize("per_head", [True, False])
def test_one_number_of_a_head_is_not_quantised(per_head, checkpoint):
    config = ModelFiles.open(checkpoint("llama")).config
    gated = replace(config.layers[0].attention, gate=OutputGate("sigmoid", per_head))
    config = replace(config, layers=(replace(config.layers[0], attention=gated),))
    model = abstract_model(config, "float32", quantization=Quantization.named("int8"))
    (gate,) = (w for w in model.weights if w.part == "attn.gate")
    assert (gate.scheme is None) == per_head


@pytest.mark.slow
def test_stacked_layers_are_quantised_one_by_one(checkpoint):
    files = ModelFiles.open(checkpoint("llama"))
    quantization = Quantization.named("mxfp4")
    models = [abstract_model(files.config, "float32", quantization=quantization, scan=s) for s in (True, False)]
    stacked, unrolled = ({s.name: w for s, w in zip(m.specs, files.load(m), strict=True)} for m in models)
    for key, value in stacked.items():
        for i in range(2 if key.startswith("blocks.0.") else 0):
            np.testing.assert_array_equal(value[i], unrolled[key.replace("blocks.0.", f"blocks.{i}.")], err_msg=key)


@pytest.mark.parametrize("name", ["int8", "mxfp4", "mxfp8_a8", "zeros"])
@pytest.mark.parametrize(("layer", "rows"), [(None, 3), (1, 40)])
@pytest.mark.fast_cases(4)
def test_experts_multiply_as_their_rounded_weights(name, layer, rows):
    rng, contracting = np.random.default_rng(rows), (3,) if layer else (2,)
    shape = (2, 4, 2, 64, 8) if layer else (4, 2, 64, 8)
    sizes = np.array([1, 0, rows // 2, rows - 1 - rows // 2 - 1], np.int32)
    x, groups = rng.normal(size=(rows, 64)).astype(np.float32), np.repeat(np.arange(4), sizes)
    if name == "zeros":
        cached = drawn(rng, Scheme("int4", 32, zeros=True), shape, contracting)
    else:
        cached = quantized(rng.normal(size=shape).astype(np.float32), contracting, Quantization.named(name).scheme)
    whole = np.asarray(dequantized(cached, contracting)).reshape(-1, 4, 2, 64, 8)[layer or 0]
    taken = rounded_along_last(x, 32) if cached.round_inputs else x
    expected = np.einsum("ri,rpio->rpo", taken[: groups.size], whole[groups])
    got = jax.jit(lambda x, w: grouped_matmul(x, w, sizes, most=rows, layer=layer and jnp.int32(layer)))(x, cached)
    np.testing.assert_allclose(got[: groups.size], expected, rtol=1e-4, atol=1e-4)
    small_batch = jax.jit(lambda x, w: chosen_matmul(x, w, groups.astype(np.int32), layer=layer and jnp.int32(layer)))
    np.testing.assert_allclose(small_batch(x[: groups.size], cached), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_experts_are_quantised_one_by_one(tmp_path):
    """Also where devices have parts of them: a channel's scale is that of the whole."""
    path = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=64)
    files = ModelFiles.open(path)
    dense = abstract_model(files.config, "float32")
    floats = {w.part: np.asarray(x) for w, x in zip(dense.weights, files.load(dense), strict=True)}
    for name, parallel in (("int8", "ep=2,tp=2"), ("mxfp4", "")):
        shards = make_shards(Parallelism.parse(parallel))
        model = abstract_model(files.config, "float32", quantization=Quantization.named(name), shards=shards)
        weights = {s.name: w for s, w in zip(model.specs, files.load(model, shards=shards), strict=True)}
        for part, contracting in (("gate_up", (2,)), ("down", (1,))):
            cached = quantized(floats[f"mlp.experts.{part}"], contracting, SCHEMES[name])
            for array, suffix in ((cached.values, ""), (cached.scales, ".scales")):
                got = np.asarray(weights[f"blocks.0.mlp.experts.{part}{suffix}"])
                np.testing.assert_array_equal(got[:7], array, err_msg=f"{name} {part}{suffix}")


@pytest.mark.slow
def test_random_weights_are_quantised(checkpoint):
    config = ModelFiles.open(checkpoint("llama", num_hidden_layers=1)).config
    model = abstract_model(config, "float32", quantization=Quantization.named("int4"))
    for spec, array in zip(model.specs, model.random_weights(), strict=True):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype), spec.name
        if spec.dtype == ml_dtypes.int4:
            assert np.asarray(array).astype(int).std() > 2
    assert model.parameters == abstract_model(config, "float32").parameters


@pytest.mark.release
def test_a_model_whose_inputs_are_rounded(checkpoint):
    """Other logits than without, and near them."""
    path, (prompt,) = checkpoint("llama"), random_prompts([20])
    sizes = dict(dtype="float32", max_batch=1, max_len=32, buckets=Buckets(prefill=(16,), batch=(1,), cache=(32,)))
    dense, both = (LLM(path, quantization=q, progress=False, **sizes).logits(prompt) for q in ("mxfp8", "mxfp8_a8"))
    assert np.abs(both - dense).max() > 0.01
    assert np.corrcoef(both.ravel(), dense.ravel())[0, 1] > 0.99


# ---- what cannot be


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"'int7'; known: int8, int4, fp8"):
        Quantization.named("int7")


def test_a_mesh_that_cuts_a_group_is_named(tmp_path):
    hf = json.loads((make_checkpoint(tmp_path, "llama", num_hidden_layers=1) / "config.json").read_text())
    for parallel, part in [("tp=4", "80 elements of mlp.down"), ("cp=2,rules=tp2d", "96 elements of attn.qkv")]:
        shards = planned_shards(Parallelism.parse(parallel))
        with pytest.raises(ShardingError, match=f"'mxfp4'.*{part}.*would cut.*int8"):
            abstract_model(config_from_hf(hf), "float32", quantization=Quantization.named("mxfp4"), shards=shards)
        abstract_model(config_from_hf(hf), "float32", quantization=Quantization.named("int8"), shards=shards)


def test_json_round_trip():
    quantization = Quantization("ours", SCHEMES["mxfp4"], ("head",))
    assert Quantization.from_json(json.loads(json.dumps(asdict(quantization)))) == quantization


def test_kernels_pass_over_scales_of_bfloat16():
    """On GPUs and TPUs XLA multiplies, experts too."""
    fine, coarse = ALL["int4_g32"], SCHEMES["int4"]
    for scheme, taken in ((fine, False), (coarse, True)):
        w, experts = (quantized(jnp.ones(shape), (len(shape) - 2,), scheme) for shape in ((128, 256), (2, 128, 256)))
        assert (choose(w, 1, jnp.bfloat16, backend="pallas_gpu").name != "xla") == taken
        assert decode_sized(w, 1, "pallas_gpu") == taken
        assert (choose_grouped(64, experts, jnp.bfloat16, "pallas_gpu").reason == "") == taken
        packing = Packing(scheme, (1024, 2048), (axes.EMBED, axes.MLP), (0,))
        assert (packed.choose(packing, jnp.bfloat16, Shards()).name == "pallas_tpu") == taken
