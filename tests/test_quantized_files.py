"""Quantised weights in files: those that `convert` writes, and checkpoints as they are shipped. About 20 s."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferlib import convert
from inferlib.checkpoint.shipped import QuantizedSource, form_of
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.quantization import Quantization
from inferlib.ops.quantized import QuantizedTensor
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from tests.oracle import SMOLLM2_HEADS, make_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compilations")


def load(
    path: Path, quantization: str | None = None, parallel: str = "", scan: bool = False
) -> tuple[AbstractModel, tuple[jax.Array, ...]]:
    files, shards = ModelFiles.open(path), make_shards(Parallelism.parse(parallel))
    kept = files.quantization(quantization)
    model = abstract_model(files.config, "float32", quantization=kept, scan=scan, shards=shards)
    return model, files.load(model, shards=shards)


def whole(model: AbstractModel, arrays: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    """Each weight as float32; what scale zeros have is no matter."""
    rest, found = iter(arrays), {}
    for weight in model.weights:
        held = tuple(islice(rest, len(weight.arrays)))
        if weight.scheme is not None:
            held = [QuantizedTensor(*held, weight.scheme.group is not None).dequantized(weight.contracting, "float32")]
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


def compressed(kind: str, bits: int, strategy: str, packing: str, **options) -> dict:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, **options}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": groups, "ignore": ["lm_head"]}


LINEAR = lambda name: name.endswith("proj.weight") or ".experts." in name  # noqa: E731
EXPERTS = lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj"))  # noqa: E731
ONE = {"num_hidden_layers": 1, "intermediate_size": 64}
SHIPPED = {
    "DeepSeek fp8": (
        ("deepseek_v3", {"num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 160}),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        lambda name: LINEAR(name) or name.endswith("_mqa.weight"),
        fp8_block,
        [""],
    ),
    "gpt-oss": (("gpt_oss", ONE), {"quant_method": "mxfp4"}, EXPERTS, mxfp4, ["", "ep=2,tp=2"]),
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
        ("llama", {**ONE, "num_attention_heads": 4, "head_dim": 16}),
        compressed("int", 4, "group", "pack-quantized", group_size=32),
        LINEAR,
        packed_int4,
        ["", "tp=2"],
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
    named |= {np.dtype(np.float32): "F32"}
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
    stored = ModelFiles.open(path)
    assert stored.nbytes < 0.7 * ModelFiles.open(plain).nbytes
    with pytest.raises(CheckpointError, match="quantise the original"):
        stored.quantization("mxfp8")


def test_shipped_checkpoints_are_converted_as_they_are(tmp_path):
    path, _ = ship("gpt-oss", tmp_path)
    convert(path, tmp_path / "converted", dtype="float32", progress=False)
    want, got = whole(*load(path)), whole(*load(tmp_path / "converted", parallel="ep=2,tp=2"))
    for name, weight in want.items():
        if ".experts." in name:
            np.testing.assert_array_equal(got[name][: len(weight)], weight, err_msg=name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitnet"}, "quant_method 'bitnet' is not supported; supported: mxfp4, fp8, compressed"),
        ({"quant_method": "fp8"}, "fp8 with weight_block_size None"),
        (compressed("int", 3, "group", "pack-quantized", group_size=32), "type int with 3 bits"),
        (compressed("int", 4, "group", "pack-quantized", group_size=32, symmetric=False), "zero points"),
        (compressed("int", 4, "group", "pack-quantized", group_size=32, actorder="group"), "actorder 'group'"),
        (compressed("int", 8, "block", "int-quantized"), "strategy 'block'"),
    ],
)
def test_unknown_schemes_are_named(config, message):
    with pytest.raises(CheckpointError, match=message):
        form_of(config)


def test_missing_scales_are_named(tmp_path):
    source = {"a.weight": np.zeros((2, 2), np.int8), "b.weight": np.zeros((2, 2), np.float32)}

    class Tensors:
        names = source.keys

        def dtype(self, name):
            return source[name].dtype

    with pytest.raises(CheckpointError, match=r"lacks the scales of quantised weights: a\.weight_scale$"):
        QuantizedSource(Tensors(), form_of(compressed("int", 8, "channel", "int-quantized")))
