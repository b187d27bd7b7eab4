"""Quantised weights in files: those that `convert` writes, and checkpoints as they are shipped. About 45 s."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferlib import LLM, Buckets, convert
from inferlib.checkpoint.shipped import QuantizedSource, form_of
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.batch import Backend
from inferlib.models.quantization import Quantization
from inferlib.ops.quantized import nbytes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from tests.conftest import random_prompts
from tests.oracle import SMOLLM2_HEADS, make_checkpoint


def load(
    path: Path, quantization: str | None = None, parallel: str = "", scan: bool = False, **options
) -> tuple[AbstractModel, tuple[jax.Array, ...]]:
    files, shards = ModelFiles.open(path), make_shards(Parallelism.parse(parallel))
    kept = files.quantization(quantization)
    options = {"dtype": "float32", "quantization": kept, "scan": scan, "shards": shards} | options
    model = abstract_model(files.config, **options)
    return model, files.load(model, shards=shards)


def whole(model: AbstractModel, arrays: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    """Each weight as float32; what scale zeros have is no matter."""
    rest, found = iter(arrays), {}
    for weight in model.weights:
        held = tuple(islice(rest, len(weight.arrays)))
        if weight.scheme is not None:
            held = [weight.scheme.tensor(*held).dequantized(weight.contracting, "float32")]
        found[weight.name] = np.asarray(held[0]).reshape(weight.shape)
    return found


# ---- converted


def test_converted_weights_are_those_made_at_load(tmp_path):
    """On one device and on meshes that copy heads, pad the vocabulary, or stack layers; also made from floats."""
    original = make_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=2, **SMOLLM2_HEADS)
    floats = tmp_path / "floats"
    convert(original, floats, dtype="float32", progress=False)
    for name in ("int8", "mxfp4"):
        out = tmp_path / name
        stored = convert(original, out, dtype="float32", quantization=name, progress=False)
        assert ModelFiles.open(out).nbytes == stored < ModelFiles.open(floats).nbytes
        for parallel, scan in (("", False), ("tp=4" if name == "int8" else "tp=5", True)):
            want = whole(*load(original, name, parallel, scan))
            for path in (out, floats):
                got = whole(*load(path, name, parallel, scan))
                for part, weight in got.items():
                    np.testing.assert_array_equal(weight, want[part], err_msg=f"{path.name} {part}")
        files = ModelFiles.open(out)
        assert files.quantization(None) == files.quantization(name) == Quantization.named(name)
        with pytest.raises(CheckpointError, match=f"{name} weights, which cannot become fp8"):
            files.quantization("fp8")


# ---- as they are shipped


def codes_of(grid: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The index of the nearest number."""
    return np.abs(x[..., None] - grid).argmin(-1)


def fp8_block(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """DeepSeek's: tensors by ending, and the weight they stand for."""
    blocks = [-(-n // 128) for n in w.shape]
    full = np.zeros([n * 128 for n in blocks], np.float32)
    full[: w.shape[0], : w.shape[1]] = w
    scales = np.abs(full.reshape(blocks[0], 128, blocks[1], 128)).max((1, 3)).astype(np.float32) / 448
    spread = scales.repeat(128, 0).repeat(128, 1)[: w.shape[0], : w.shape[1]]
    values = (w / spread).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": values, ".weight_scale_inv": scales}, values.astype(np.float32) * spread


def by_channel(w: np.ndarray, dtype, most: float, axis) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """compressed-tensors; scales in bfloat16, as it stores them."""
    scales = (np.abs(w).max(axis, keepdims=True) / most).astype(ml_dtypes.bfloat16)
    scaled = np.clip(w / scales.astype(np.float32), -most, most)
    values = (scaled if most == 448 else np.rint(scaled)).astype(dtype)
    stored = scales.reshape(-1, 1) if axis == 1 else scales.reshape(1)
    return {".weight": values, ".weight_scale": stored}, values.astype(np.float32) * scales.astype(np.float32)


def packed_int4(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    out, size = w.shape
    groups = w.reshape(out, size // 32, 32)
    scales = np.abs(groups).max(2).astype(np.float32) / 7
    values = np.clip(np.rint(groups / scales[..., None]), -8, 7).astype(np.int64).reshape(out, size)
    packed = np.zeros((out, size // 8), np.int64)
    for i in range(8):
        packed |= (values[:, i::8] + 8) << (4 * i)
    tensors = {".weight_packed": packed.astype(np.uint32).view(np.int32), ".weight_scale": scales}
    tensors[".weight_shape"] = np.array([out, size], np.int64)
    return tensors, (values.reshape(groups.shape) * scales[..., None]).astype(np.float32).reshape(out, size)


def mxfp4(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """gpt-oss's, of a tensor [E, in, out]."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    rows = w.swapaxes(1, 2)
    blocks = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = np.frexp(np.abs(blocks).max(-1))[1] - 3
    scaled = blocks / np.ldexp(1.0, exponents)[..., None]
    codes = codes_of(grid, np.abs(scaled)) | (np.signbit(scaled) * 8)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    back = np.where(codes & 8, -1, 1) * grid[codes & 7] * np.ldexp(1.0, exponents)[..., None]
    tensors = {"_blocks": packed, "_scales": (exponents + 127).astype(np.uint8)}
    return tensors, np.ascontiguousarray(back.reshape(rows.shape).swapaxes(1, 2).astype(np.float32))


def packed_rows(codes: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """[n, m] unsigned codes -> [n / (32 / bits), m] int32: the codes of an item from its lowest bits on, by row or, of
    each item's rows, in this order."""
    count = 32 // bits
    rows = codes.astype(np.uint64).reshape(-1, count, codes.shape[1])[:, list(order) or slice(None)]
    items = sum(rows[:, i] << np.uint64(bits * i) for i in range(count))
    return items.astype(np.uint32).view(np.int32)


def with_zeros(w: np.ndarray, bits: int, group: int, symmetric: bool = False) -> tuple[np.ndarray, ...]:
    """Unsigned codes [out, in], zero points and float16 scales [out, groups], and the weight (code - zero) * scale."""
    out, size = w.shape
    groups = w.reshape(out, size // group, group)
    if symmetric:
        scales = (np.abs(groups).max(2) / 2 ** (bits - 1)).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
        scales = ((high - low) / (2**bits - 1)).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 2**bits - 1)
    wide = scales.astype(np.float32)[..., None]
    codes = np.clip(np.rint(groups / wide) + zeros[..., None], 0, 2**bits - 1)
    back = ((codes - zeros[..., None]) * wide).astype(np.float32)
    return codes.reshape(out, size).astype(int), zeros.astype(int), scales, back.reshape(out, size)


def awq(w: np.ndarray, group: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """AutoAWQ's GEMM layout: [in, out / 8], an item's columns in the order that its kernel unpacks them."""
    codes, zeros, scales, back = with_zeros(w, 4, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {".qweight": packed_rows(codes, 4, order).T, ".qzeros": packed_rows(zeros, 4, order).T}
    return tensors | {".scales": scales.T}, back


def gptq(
    w: np.ndarray, bits: int, group: int, *, less: int = 1, symmetric: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """AutoGPTQ's: values [in / 8, out], zero points [groups, out / 8] less 1; a bias of zeros beside each."""
    codes, zeros, scales, back = with_zeros(w, bits, group, symmetric)
    tensors = {".qweight": packed_rows(codes.T, bits), ".qzeros": packed_rows((zeros - less) % 2**bits, bits).T}
    order = (np.arange(w.shape[1]) // group).astype(np.int32)
    bias = np.zeros(len(w), np.float16)
    return tensors | {".scales": scales.T, ".g_idx": order, ".bias": bias}, back


def asymmetric(w: np.ndarray, bits: int, group: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """compressed-tensors: values packed along a row, zero points along a column."""
    codes, zeros, scales, back = with_zeros(w, bits, group)
    tensors = {".weight_packed": packed_rows(codes.T, bits).T, ".weight_zero_point": packed_rows(zeros, bits)}
    return tensors | {".weight_scale": scales, ".weight_shape": np.array(w.shape, np.int64)}, back


def compressed(kind: str, bits: int, strategy: str, packing: str, **options) -> dict:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, **options}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": groups, "ignore": ["lm_head"]}


LINEAR = lambda name: name.endswith("proj.weight") or ".experts." in name  # noqa: E731
EXPERTS = lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj"))  # noqa: E731
ONE = {"num_hidden_layers": 1, "intermediate_size": 64}
EIGHTS = {**ONE, "num_attention_heads": 4, "head_dim": 16}  # all sizes are multiples of 16
SHIPPED = {
    "DeepSeek fp8": (
        ("deepseek_v3", {"num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 160}),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        lambda name: LINEAR(name) or name.endswith("_mqa.weight"),
        fp8_block,
        [""],
    ),
    "gpt-oss": (("gpt_oss", ONE | {"hidden_size": 64}), {"quant_method": "mxfp4"}, EXPERTS, mxfp4, ["", "ep=2,tp=2"]),
    "int8 by channel": (
        ("llama", ONE),
        compressed("int", 8, "channel", "int-quantized"),
        LINEAR,
        lambda w: by_channel(w, np.int8, 127, 1),
        ["", "tp=4"],
    ),
    "fp8 by tensor": (
        ("qwen3_moe", {"num_hidden_layers": 2}),
        compressed("float", 8, "tensor", "float-quantized"),
        LINEAR,
        lambda w: by_channel(w, ml_dtypes.float8_e4m3fn, 448, (0, 1)),
        ["", "tp=2,dp=2"],
    ),
    "int4 by group": (
        ("llama", EIGHTS),
        compressed("int", 4, "group", "pack-quantized", group_size=32),
        LINEAR,
        packed_int4,
        ["", "tp=2"],
    ),
    "int4 by group with zero points": (
        ("llama", EIGHTS),
        compressed("int", 4, "group", "pack-quantized", group_size=32, symmetric=False, actorder="weight"),
        LINEAR,
        lambda w: asymmetric(w, 4, 32),
        ["", "tp=2"],
    ),
    "int8 by channel with zero points": (
        ("llama", EIGHTS),
        compressed("int", 8, "channel", "pack-quantized", symmetric=False),
        LINEAR,
        lambda w: asymmetric(w, 8, w.shape[1]),
        ["tp=2"],
    ),
    "awq": (
        ("qwen2", EIGHTS),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        LINEAR,
        lambda w: awq(w, 32),
        ["", "tp=2"],
    ),
    "awq experts": (
        ("qwen3_moe", {**EIGHTS, "moe_intermediate_size": 64}),
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        LINEAR,
        lambda w: awq(w, 32),
        ["", "ep=2,tp=2"],
    ),
    "gptq": (
        ("llama", EIGHTS),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
        LINEAR,
        lambda w: gptq(w, 4, 32),
        ["", "tp=2"],
    ),
    "gptq experts": (
        ("qwen3_moe", {**EIGHTS, "moe_intermediate_size": 64}),
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
        LINEAR,
        lambda w: gptq(w, 8, w.shape[1], less=0),
        ["ep=2,tp=2"],
    ),
    "gptq symmetric": (
        ("llama", EIGHTS),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        LINEAR,
        lambda w: gptq(w, 4, 32, symmetric=True),
        ["tp=2"],
    ),
}


def ship(case: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint as shipped, and the float one it stands for."""
    (family, options), config, which, encode, _ = SHIPPED[case]
    plain, folder = make_checkpoint(folder / "float", family, **options), folder / "shipped"
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, w in tensors.items():
        if not which(name):
            stored[name] = w
            continue
        parts, tensors[name] = encode(w)
        stored |= {name.removesuffix(".weight") + ending: np.ascontiguousarray(x) for ending, x in parts.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    # As bytes: the package's numpy interface knows no types of less than two.
    named = {np.dtype(np.int8): "I8", np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3", np.dtype(np.uint8): "U8"}
    named |= {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64"}
    named |= {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    header, data = {}, b""
    for name, x in stored.items():
        header[name] = {"dtype": named[x.dtype], "shape": x.shape, "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    hf = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder, plain


@pytest.mark.parametrize("case", SHIPPED)
def test_shipped_weights_are_kept(case, tmp_path):
    path, plain = ship(case, tmp_path)
    scheme = form_of(SHIPPED[case][1]).scheme
    for parallel in SHIPPED[case][-1]:
        for scan in (False, True) if not parallel else (False,):
            _, floats = load(plain, parallel=parallel, scan=scan)
            model, arrays = load(path, parallel=parallel, scan=scan)
            assert [(x.shape, x.dtype) for x in arrays] == [(spec.shape, spec.dtype) for spec in model.specs]
            for weight, (name, got), want in zip(model.weights, whole(model, arrays).items(), floats, strict=True):
                kept = weight.contracting and name != "head" and (case != "gpt-oss" or ".experts." in name)
                assert weight.scheme == (scheme if kept else None), name
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=0, err_msg=f"{parallel} {name}")
    bits = {name: jax.dtypes.itemsize_bits(getattr(scheme, name)) for name in ("values", "scales")}
    shared = bits["scales"] + bits["values"] * scheme.zeros
    for weight in (weight for weight in model.weights if weight.scheme is not None):
        taken = math.prod(weight.shape) * bits["values"] + math.prod(weight.arrays[1].shape) * shared
        assert sum(x.nbytes for x in weight.arrays) * 8 == taken
    stored = ModelFiles.open(path)
    assert stored.nbytes < 0.7 * ModelFiles.open(plain).nbytes
    with pytest.raises(CheckpointError, match="quantise the original"):
        stored.quantization("mxfp8")


def test_experts_are_packed_for_kernels_as_they_are_loaded(tmp_path):
    """From a checkpoint as it is shipped and a converted one, on one device and on two."""
    path, converted, backend = (
        ship("gpt-oss", tmp_path)[0],
        tmp_path / "converted",
        Backend(grouped_matmul="pallas_tpu"),
    )
    convert(path, converted, dtype="float32", progress=False)
    model, arrays = load(path)
    rest, plain = iter(arrays), {}
    for weight in model.weights:
        plain[weight.name] = tuple(islice(rest, len(weight.arrays)))
    for source, parallel in ((path, ""), (path, "ep=2"), (converted, "ep=2")):
        model, arrays = load(source, parallel=parallel, dtype="bfloat16", backend=backend)
        assert [(x.shape, x.dtype) for x in arrays] == [(spec.shape, spec.dtype) for spec in model.specs]
        rest = iter(arrays)
        for weight in model.weights:
            held = tuple(islice(rest, len(weight.arrays)))
            assert weight.packed == (weight.scheme is not None)
            if weight.packed:
                of_one = weight if not parallel else replace(weight, shape=(7, *weight.shape[1:]))
                for got, want in zip(held, of_one.packing.pack(*plain[weight.name]), strict=True):
                    np.testing.assert_array_equal(got[: len(want)], want, err_msg=f"{source.name} {weight.name}")


@pytest.mark.parametrize("case", ["awq experts", "int8 by channel with zero points"])
def test_logits_are_those_of_the_weights_they_stand_for(case, tmp_path):
    path, plain = ship(case, tmp_path)
    (prompt,) = random_prompts([12])
    sizes = dict(dtype="float32", max_batch=1, max_len=32, buckets=Buckets((16,), (1,), (32,)), progress=False)
    llm = LLM(path, **sizes)
    np.testing.assert_allclose(llm.logits(prompt), LLM(plain, **sizes).logits(prompt), rtol=0, atol=1e-4)
    assert sum(nbytes(w.shape, w.dtype) for w in llm.engine.weights) == llm.engine.model.nbytes


@pytest.mark.parametrize("case", ["gpt-oss", "awq experts"])
def test_shipped_checkpoints_are_converted_as_they_are(case, tmp_path):
    path, _ = ship(case, tmp_path)
    convert(path, tmp_path / "converted", dtype="float32", progress=False)
    want, got = whole(*load(path)), whole(*load(tmp_path / "converted", parallel="ep=2,tp=2"))
    for name, weight in want.items():
        if ".experts." in name:
            np.testing.assert_array_equal(got[name][: len(weight)], weight, err_msg=name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitnet"}, "quant_method 'bitnet' is not supported; supported: mxfp4, fp8, awq, gptq"),
        ({"quant_method": "fp8"}, "fp8 with weight_block_size None"),
        (compressed("int", 3, "group", "pack-quantized", group_size=32), "type int with 3 bits"),
        (compressed("float", 8, "channel", "float-quantized", symmetric=False), "'float-quantized' with zero points"),
        (compressed("int", 4, "group", "pack-quantized", group_size=32, actorder="group"), "actorder 'group'"),
        (compressed("int", 8, "block", "int-quantized"), "strategy 'block'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "awq with version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "awq with zero_point False"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": None}, "gptq with group_size None"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ],
)
def test_unknown_schemes_are_named(config, message):
    with pytest.raises(CheckpointError, match=message):
        form_of(config)


class Tensors(dict):
    """A source of arrays."""

    def names(self):
        return self.keys()

    def dtype(self, name):
        return self[name].dtype

    def shape(self, name):
        return self[name].shape

    def read(self, name, rows=None):
        return self[name][rows or slice(None)]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def test_missing_and_wrong_scales_are_named():
    held = {"b.weight": np.zeros((2, 2), np.float32)}
    lone = Tensors(held | {"a.weight": np.zeros((2, 2), np.int8)})
    with pytest.raises(CheckpointError, match=r"lacks the scales of quantised weights: a\.weight_scale; fetch"):
        QuantizedSource(lone, form_of(compressed("int", 8, "channel", "int-quantized")))
    parts, _ = gptq(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32), 4, 32)
    parts = {"a" + ending: x for ending, x in parts.items()}
    source = QuantizedSource(Tensors(held, **parts), form_of(GPTQ))
    assert [source.spare(name) for name in ("a.bias", "b.bias", "a.g_idx")] == [True, False, False]
    for missing, kind in ((".scales", "scales"), (".qzeros", "zero points")):
        rest = {name: x for name, x in parts.items() if not name.endswith(missing)}
        with pytest.raises(CheckpointError, match=f"lacks the {kind} of quantised weights: a{missing}; fetch"):
            QuantizedSource(Tensors(rest), form_of(GPTQ))
    with pytest.raises(
        CheckpointError, match=r"a\.scales has shape \(2, 8\), and groups of 128 .* correct its group_s"
    ):
        QuantizedSource(Tensors(parts), form_of(GPTQ | {"group_size": 128}))
    with pytest.raises(
        CheckpointError, match=r"a\.scales has shape \(2, 8\), and each whole row of a weight of 8 x 64"
    ):
        QuantizedSource(Tensors(parts), form_of(GPTQ | {"group_size": -1}))
    symmetric = QuantizedSource(Tensors(parts), form_of(GPTQ | {"sym": True}))
    with pytest.raises(CheckpointError, match=r"a\.qzeros has zero points .* set sym to false"):
        symmetric.read("a.weight")
    scattered = parts | {"a.g_idx": np.random.default_rng(1).permutation(parts["a.g_idx"])}
    with pytest.raises(CheckpointError, match=r"a\.g_idx scatters groups .*act-order.* with desc_act false"):
        QuantizedSource(Tensors(scattered), form_of(GPTQ))


@pytest.mark.parametrize(
    ("config", "encode"),
    [
        (GPTQ, lambda w: gptq(w, 4, 32)),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, lambda w: awq(w, 32)),
    ],
)
def test_rows_of_packed_weights_are_those_of_the_whole(config, encode):
    """Also those that begin within an item."""
    parts, back = encode(np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32))
    source = QuantizedSource(Tensors({"a" + ending: x for ending, x in parts.items()}), form_of(config))
    np.testing.assert_array_equal(source.read("a.weight"), back)
    for rows in (slice(8, 24), slice(5, 19), slice(40, 48)):
        for part in (source.values, source.scales, source.zeros):
            np.testing.assert_array_equal(part("a.weight", rows), part("a.weight")[rows])
