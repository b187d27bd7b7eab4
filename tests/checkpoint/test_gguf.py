from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, GGUFReader, RopeScalingType
from gguf import get_tensor_name_map as gguf_name_map
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM

from inferlib.checkpoint.gguf import GGUFCheckpoint
from inferlib.checkpoint.known import resolve
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.families import config_from_hf
from inferlib.models.layers.rope import inverse_frequencies
from tests.helpers.gguf_files import HEAD_DIM, HEADS, KV_HEADS, write


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of q and k in files of architecture llama, as their converter writes it."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_blocks(rng: np.random.Generator, kind: GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    """Random blocks whose float16 scales are sane numbers."""
    items, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // items, size), dtype=np.uint8)
    scales = {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [size - 2]}[kind.name]
    for at in scales:
        blocks[:, at : at + 2] = rng.uniform(-1, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "TQ1_0"])
def test_quantised_types_and_row_slices(tmp_path, kind):
    rng = np.random.default_rng(0)
    kind = GGMLQuantizationType[kind]
    shape = (HEADS * HEAD_DIM, 512)
    values = rng.normal(size=shape).astype(np.float32)
    if kind.name.endswith("_K"):
        blocks = random_blocks(rng, kind, shape)
    else:
        blocks = quantize(values, kind)
    names = {"blk.0.ffn_up.weight": "mlp.up_proj", "blk.0.attn_q.weight": "self_attn.q_proj"}
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", dict.fromkeys(names, (blocks, kind))))
    expected = dequantize(blocks, kind)
    for gguf_name, module in names.items():
        name = f"model.layers.0.{module}.weight"
        assert checkpoint.shape(name) == shape
        assert checkpoint.dtype(name) == np.float32
        assert checkpoint.nbytes(name) == blocks.nbytes
        full = checkpoint.read(name)
        assert full.dtype == np.float32
        if gguf_name == "blk.0.ffn_up.weight":
            np.testing.assert_array_equal(full, expected)
        else:
            np.testing.assert_array_equal(llama_cpp_order(full, HEADS), expected)
        for rows in (slice(0, 1), slice(5, 21), slice(40, None), slice(3, 40, 7)):
            np.testing.assert_array_equal(checkpoint.read(name, rows), full[rows])
    if kind.name in ("Q8_0", "Q5_1"):
        assert np.abs(expected - values).max() < 0.15


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int8])
def test_plain_types_are_views_of_the_file(tmp_path, dtype):
    values = (np.random.default_rng(0).normal(size=(48, 64)) * 10).astype(dtype)
    bf16 = dtype is ml_dtypes.bfloat16
    stored = (values.view(np.uint8), GGMLQuantizationType.BF16) if bf16 else values
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": stored}))
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.dtype(name) == dtype
    array = checkpoint.read(name)
    assert not array.flags.owndata
    np.testing.assert_array_equal(array, values)
    np.testing.assert_array_equal(checkpoint.read(name, slice(7, 9)), values[7:9])


# Every architecture, as a tiny random transformers model. Numbers that files keep in float32 are exact there.
COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-20,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.5],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
SCALES = {"sliding_window": 16, "query_pre_attn_scalar": HEAD_DIM}
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**SCALES, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("gemma3_text", {**SCALES, "rope_parameters": GEMMA3_ROPE}),
    "gemma3-27b": (
        "gemma3_text",
        {**SCALES, "num_hidden_layers": 62, "num_attention_heads": 4, "query_pre_attn_scalar": 12},
    ),
    "gemma3-without-windows": (
        "gemma3_text",
        {**SCALES, "rope_parameters": GEMMA3_ROPE, "layer_types": ["full_attention"] * 6},
    ),
    "phi3": ("phi3", {"rope_parameters": LONGROPE}),
    "phi3-window": ("phi3", {"sliding_window": 16}),
}


def llama3_factors(rope: dict[str, Any]) -> np.ndarray:
    factors, context = [], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / HEAD_DIM)
        smooth = min(max((context / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def convert(path: Path, hf: Any, weights: dict[str, np.ndarray]) -> Path:
    """What llama.cpp's converter makes of a checkpoint, unquantised."""
    architecture = hf.model_type.removesuffix("_text")
    rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    arch = next(a for a in MODEL_ARCH if a.name.lower() == architecture)
    names = gguf_name_map(arch, hf.num_hidden_layers)
    tensors = {}
    for name, value in weights.items():
        module, _, suffix = name.rpartition(".")
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            value = llama_cpp_order(value, HEADS if module.endswith("q_proj") else KV_HEADS)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        tensors[f"{names.get_name(module)}.{suffix}"] = value
    scaling: dict[str, Any] = {}
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope)
    elif rope["rope_type"] == "longrope":
        tensors["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
        tensors["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        scaling = {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        scaling["rope.dimension_count"] = HEAD_DIM // 2
    elif rope["rope_type"] == "linear":
        scaling = {"rope.scaling.type": RopeScalingType.LINEAR.value, "rope.scaling.factor": rope["factor"]}
    elif rope["rope_type"] == "yarn":
        scaling = {
            "rope.scaling.type": RopeScalingType.YARN.value,
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        }
    if architecture.startswith("phi3"):
        scaling["attention.sliding_window"] = hf.sliding_window or 0
    elif "sliding_attention" in (getattr(hf, "layer_types", None) or ()):
        scaling["attention.sliding_window"] = hf.sliding_window
    metadata = {
        "block_count": hf.num_hidden_layers,
        "attention.head_count": hf.num_attention_heads,
        "attention.layer_norm_rms_epsilon": hf.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "attn_logit_softcapping": getattr(hf, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(hf, "final_logit_softcapping", None),
        "tokenizer.ggml.bos_token_id": hf.bos_token_id,
        "tokenizer.ggml.eos_token_id": hf.eos_token_id,
    }
    return write(path, tensors, architecture, **(metadata | scaling))


@pytest.mark.parametrize("case", CASES)
def test_architectures_equal_their_hugging_face_checkpoints(tmp_path, case):
    model_type, options = CASES[case]
    torch.manual_seed(0)
    hf = AutoConfig.for_model(model_type, **{**COMMON, "tie_word_embeddings": "gemma" in model_type, **options})
    model = AutoModelForCausalLM.from_config(hf)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    for value in weights.values():
        if value.ndim == 1:
            value += np.random.default_rng(0).normal(size=value.shape).astype(np.float32)
    if hf.tie_word_embeddings:
        del weights["lm_head.weight"]
    checkpoint = GGUFCheckpoint(convert(tmp_path / "m.gguf", hf, weights))
    assert set(checkpoint.names()) == set(weights)
    for name, value in weights.items():
        np.testing.assert_allclose(checkpoint.read(name), value, rtol=0, atol=1e-6, err_msg=name)

    ours, theirs = (
        config_from_hf(checkpoint.config()),
        config_from_hf({**hf.to_dict(), "architectures": [type(model).__name__]}),
    )
    if case != "llama-llama3":
        assert ours == theirs
        return
    # The file has the frequencies and not the numbers they were computed from.
    for length in (16, 128):
        mine = inverse_frequencies(ours.layers[0].attention.rope, length)
        reference = inverse_frequencies(theirs.layers[0].attention.rope, length)
        np.testing.assert_allclose(mine[0], reference[0], rtol=1e-6)
        assert mine[1] == reference[1] == 1.0


def test_sizes_given_per_block(tmp_path):
    tensors = {"token_embd.weight": np.zeros((8, 48), np.float32)}
    eps = {"attention.layer_norm_rms_epsilon": 1e-5}
    checkpoint = GGUFCheckpoint(write(tmp_path / "a.gguf", tensors, **{"attention.head_count_kv": [2, 2]}, **eps))
    assert checkpoint.config()["num_key_value_heads"] == 2
    checkpoint = GGUFCheckpoint(write(tmp_path / "b.gguf", tensors, **{"attention.head_count_kv": [2, 1]}, **eps))
    with pytest.raises(CheckpointError, match=r"attention.head_count_kv must be one positive number"):
        checkpoint.config()


VALUES = np.arange(48 * 64, dtype=np.float32).reshape(48, 64)


def small(path: Path, tensors: dict[str, Any] | None = None, architecture: str = "llama", **metadata: Any) -> Path:
    tensors = {"blk.0.ffn_up.weight": VALUES} if tensors is None else tensors
    names = ["<s>", "a", "\u4e16\u754c", ""]
    return write(
        path,
        tensors,
        architecture,
        **{"tokenizer.ggml.tokens": names, "tokenizer.ggml.scores": [0.0, -1.5]},
        **metadata,
    )


def test_metadata_types(tmp_path):
    metadata = GGUFCheckpoint(small(tmp_path / "m.gguf", **{"general.name": "n\u00e4me", "x": 1.5})).metadata
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "a", "\u4e16\u754c", ""]
    np.testing.assert_array_equal(metadata["tokenizer.ggml.scores"], [0.0, -1.5])
    assert (metadata["general.name"], metadata["llama.x"], metadata["llama.block_count"]) == (
        "n\u00e4me",
        1.5,
        2,
    )


@pytest.mark.slow
def test_every_truncation_is_an_error_that_names_the_file(tmp_path):
    path = small(tmp_path / "m.gguf")
    whole = path.read_bytes()
    # The last bytes of a file may be padding.
    for length in [*range(len(whole) - VALUES.nbytes), len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            GGUFCheckpoint(path)


def test_truncation_says_how_much_is_missing(tmp_path):
    path = small(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(CheckpointError, match=rf"truncated: .* {len(whole)} bytes, .* {len(whole) - 1000}"):
        GGUFCheckpoint(path)


@pytest.mark.slow
def test_any_damage_to_the_header_is_an_error_or_harmless(tmp_path):
    path = small(tmp_path / "m.gguf")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    header = len(whole) - VALUES.nbytes
    for _ in range(1500):
        damaged = bytearray(whole)
        damaged[rng.integers(header)] = rng.choice([0, 1, 4, 8, 9, 255, rng.integers(256)])
        path.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(path)
            for name in checkpoint.names():
                checkpoint.read(name)
        except CheckpointError:
            continue


def test_not_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a GGUF file: it starts with b'PK.*, expected b'GGUF'"):
        GGUFCheckpoint(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match=r"version 1; supported: 2 and 3"):
        GGUFCheckpoint(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a GGUF file"):
        GGUFCheckpoint(path)


def test_unsupported_contents(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"architecture 'rwkv6' is not supported; known: llama, .*phi3"):
        GGUFCheckpoint(small(path, architecture="rwkv6"))
    with pytest.raises(CheckpointError, match=r"one of 3 parts; join them: llama-gguf-split --merge"):
        GGUFCheckpoint(small(path, **{"split.count": 3}))
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_gate_exps.weight' is not known in architecture 'llama'"):
        GGUFCheckpoint(small(path, {"blk.0.ffn_gate_exps.weight": VALUES}))
    q8_1 = np.zeros((4, GGML_QUANT_SIZES[GGMLQuantizationType.Q8_1][1]), np.uint8)
    with pytest.raises(CheckpointError, match=r"cannot decode tensor 'blk.0.ffn_up.weight' of type Q8_1"):
        GGUFCheckpoint(small(path, {"blk.0.ffn_up.weight": (q8_1, GGMLQuantizationType.Q8_1)}))
    vector = (quantize(VALUES[0], GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.bias' of type Q8_0 cannot have shape \(64,\)"):
        GGUFCheckpoint(small(path, {"blk.0.ffn_up.bias": vector}))
    with pytest.raises(CheckpointError, match=r"rows of 'blk.0.attn_q.weight' are not 6 heads"):
        GGUFCheckpoint(small(path, {"blk.0.attn_q.weight": VALUES[:44]})).read("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model.norm.weight'"):
        GGUFCheckpoint(small(path)).read("model.norm.weight")
    embedding = {"token_embd.weight": VALUES}
    with pytest.raises(CheckpointError, match=r"lacks metadata key 'llama.embedding_length'"):
        GGUFCheckpoint(small(path, embedding, embedding_length=None)).config()
    options = {"rope.scaling.type": "odd", "attention.layer_norm_rms_epsilon": 1e-5}
    with pytest.raises(CheckpointError, match=r"rope scaling 'odd' is not supported"):
        GGUFCheckpoint(small(path, embedding, **options)).config()


# The real file


@pytest.fixture(scope="module")
def smollm2() -> GGUFCheckpoint:
    return GGUFCheckpoint(resolve("smollm2"))


@pytest.mark.release
def test_smollm2_equals_the_package_reader(smollm2):
    reader = GGUFReader(smollm2.path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert theirs.keys() == smollm2.metadata.keys()
    for key, value in theirs.items():
        ours = smollm2.metadata[key]
        assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == value, key

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(list(smollm2.names())) == 272
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.17.ffn_down.weight": "model.layers.17.mlp.down_proj.weight",
        "blk.29.ffn_norm.weight": "model.layers.29.post_attention_layernorm.weight",
    }
    for theirs, ours in names.items():
        expected = dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        np.testing.assert_array_equal(smollm2.read(ours), expected, err_msg=ours)
        np.testing.assert_array_equal(smollm2.read(ours, slice(100, 133)), expected[100:133], err_msg=ours)
    for part, heads in (("q", 9), ("k", 3)):
        stored = tensors[f"blk.3.attn_{part}.weight"]
        ours = smollm2.read(f"model.layers.3.self_attn.{part}_proj.weight")
        np.testing.assert_array_equal(llama_cpp_order(ours, heads), dequantize(stored.data, stored.tensor_type))


@pytest.mark.slow
def test_smollm2_is_read_whole(smollm2):
    parameters = 0
    for name in smollm2.names():
        array = smollm2.read(name)
        assert array.shape == smollm2.shape(name)
        assert np.isfinite(array).all()
        parameters += math.prod(array.shape)
    assert parameters == 134_515_008


@pytest.mark.slow
def test_smollm2_config(smollm2):
    config = config_from_hf(smollm2.config())
    assert (config.vocab, config.dim, len(config.layers), config.context, config.tied) == (
        49152,
        576,
        30,
        8192,
        True,
    )
    attention = config.layers[0].attention
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.rope.base) == (9, 3, 64, 1e5)
    assert config.eos_token_ids == (2,)
