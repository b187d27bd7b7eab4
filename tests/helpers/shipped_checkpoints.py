"""Checkpoints that are quantised as tools ship them, made of random ones: tensors by ending and what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.oracle import make_checkpoint


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


def inverse_by_tensor(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """transformers' fp8: one scale of a matrix; of all experts one for each, gate and up have two."""
    parts = np.split(w, 2, axis=1) if w.ndim == 3 and w.shape[1] == 2 * HIDDEN else [w]
    scales = [np.abs(part).max((-1, -2), keepdims=True).astype(np.float32) / 448 for part in parts]
    values = [(part / scale).astype(ml_dtypes.float8_e4m3fn) for part, scale in zip(parts, scales, strict=True)]
    back = [value.astype(np.float32) * scale for value, scale in zip(values, scales, strict=True)]
    scales, start = np.concatenate(scales, -2), "" if w.ndim == 3 else ".weight"
    tensors = {start: np.concatenate(values, -2), f"{start}_scale_inv": scales.reshape(w.shape[:-2] and scales.shape)}
    tensors[("_" if w.ndim == 3 else ".") + "activation_scale"] = np.full(w.shape[:-2], 0.5, np.float32)
    return tensors, np.concatenate(back, -2)


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


def by_tensor(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """compressed-tensors' int8: one scale and zero point."""
    codes, zeros, scales, back = with_zeros(w.reshape(1, -1), 8, w.size)
    values, zero = ((x - 128).astype(np.int8) for x in (codes.reshape(w.shape), zeros.reshape(1)))
    tensors = {".weight": values, ".weight_scale": scales.reshape(1), ".weight_zero_point": zero}
    return tensors, back.reshape(w.shape)


def compressed(kind: str, bits: int, strategy: str, packing: str, **options) -> dict:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, **options}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": groups, "ignore": ["lm_head"]}


LINEAR = lambda name: name.endswith("proj.weight") or ".experts." in name  # noqa: E731
EXPERTS = lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj"))  # noqa: E731
HIDDEN = 40
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
        ("qwen3_moe", {"num_hidden_layers": 1}),
        compressed("float", 8, "tensor", "float-quantized") | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        LINEAR,
        lambda w: by_channel(w, ml_dtypes.float8_e4m3fn, 448, (0, 1)),
        ["", "tp=2,dp=2"],
    ),
    "AutoFP8": (
        ("llama", ONE),
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        LINEAR,
        lambda w: by_channel(w, ml_dtypes.float8_e4m3fn, 448, (0, 1)),
        [""],
    ),
    "transformers fp8 by tensor": (
        ("ministral3", ONE),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        LINEAR,
        inverse_by_tensor,
        ["", "tp=2"],
    ),
    "transformers fp8 by tensor, experts": (
        ("mistral4", {"num_hidden_layers": 2, "moe_intermediate_size": HIDDEN}),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda name: LINEAR(name) or name.endswith("_mqa.weight"),
        inverse_by_tensor,
        ["", "ep=2,tp=2"],
    ),
    "int8 by tensor with zero points": (
        ("phi3", ONE),  # whose queries, keys and values are rows of one tensor
        compressed("int", 8, "tensor", "int-quantized", symmetric=False),
        LINEAR,
        by_tensor,
        ["", "tp=2"],
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
    dense, folder = make_checkpoint(folder / "float", family, **options), folder / "shipped"
    tensors, stored = load_file(dense / "model.safetensors"), {}
    for name, w in tensors.items():
        if not which(name):
            stored[name] = w
            continue
        parts, tensors[name] = encode(w)
        stored |= {name.removesuffix(".weight") + ending: np.asarray(x, order="C") for ending, x in parts.items()}
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    if "kv_cache_scheme" in config:
        names = "k_scale", "v_scale", "q_scale", "k_zero_point", "v_proj.output_zero_point", "attn.q_global_scale"
        stored |= {f"model.layers.0.self_attn.{name}": np.full(1, 0.5, np.float32) for name in names}
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
    hf = json.loads((dense / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder, dense
