"""GGUF files: configuration, tokenizer and weights in one file.

The header is read here because the gguf package's reader takes seconds for a large vocabulary; blocks of
quantised weights are decoded by the package.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from einops import rearrange

from inferlib.checkpoint.source import CheckpointError, StoredTensors, map_array, size_of
from inferlib.option_checks import brief
from inferlib.tokenizer import Tokenizer

_ALIGNMENT = 32  # of the tensor data in bytes, unless the metadata says otherwise

# Metadata value types: numbers by code with their struct format, and the others.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 8  # twice what ggml has
# Tensor types that are arrays of numbers; all others are made of blocks.
_UNQUANTIZED = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Rotary frequency divisors [head_dim / 2]: tensors here, configuration in Hugging Face checkpoints.
_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


@dataclass(frozen=True)
class _Architecture:
    """How a GGUF architecture becomes a Hugging Face one.

    layer: tensor of a block -> module of a layer.
    interleaved: rows of q and k pair rotary dimensions (2i, 2i + 1), where Hugging Face pairs (i, i + half).
    norm_offset: norm weights in the file are this much larger.
    wide_blocks: models with this many blocks scale scores by width / heads instead of the head size, which the file
        does not say; 0: none do.
    """

    hf: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    activation: str = "silu"
    interleaved: bool = False
    norm_offset: float = 0.0
    wide_blocks: int = 0


_GEMMA: dict[str, Any] = {"activation": "gelu_pytorch_tanh", "norm_offset": 1.0}
_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM", _LAYER | _QK_NORMS),
    "gemma": _Architecture("GemmaForCausalLM", **_GEMMA),
    "gemma2": _Architecture("Gemma2ForCausalLM", _SANDWICH, wide_blocks=46, **_GEMMA),
    "gemma3": _Architecture("Gemma3ForCausalLM", _SANDWICH | _QK_NORMS, wide_blocks=62, **_GEMMA),
    "phi3": _Architecture("Phi3ForCausalLM", _FUSED),
}


@dataclass(frozen=True)
class _Tensor:
    name: str  # in the file
    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType
    block: tuple[int, int]  # items and bytes of a block
    offset: int  # bytes from the start of the file

    @property
    def unquantized(self) -> bool:
        return self.type.name in _UNQUANTIZED

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensor once it is read."""
        return np.dtype(_UNQUANTIZED.get(self.type.name, np.float32))

    @property
    def nbytes(self) -> int:
        items, size = self.block
        return math.prod(self.shape) // items * size

    def stored(self, path: Path) -> np.ndarray:
        """The tensor as it lies in the file: values, or the bytes of each row's blocks."""
        if self.unquantized:
            return map_array(path, self.dtype, self.shape, self.offset)
        items, size = self.block
        shape = (*self.shape[:-1], self.shape[-1] // items * size)
        return map_array(path, np.dtype(np.uint8), shape, self.offset)


class GGUFCheckpoint(StoredTensors[_Tensor]):
    """A GGUF file: a `TensorSource` with Hugging Face names and layout, its configuration and its tokenizer.

    Tensors of quantised types are read as float32, others as they are stored. Raises CheckpointError for a
    file that is damaged, truncated, one part of several, or of an architecture or type that is not supported.

    metadata: the file's key-value pairs; arrays of numbers are numpy arrays, arrays of strings are lists.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata, tensors = _read_header(self.path)
        name = self._need("general.architecture", str)
        if name not in _ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: architecture {name!r} is not supported; known: {', '.join(_ARCHITECTURES)}"
            )
        parts = self._typed("split.count", 1, int)
        if parts > 1:
            raise CheckpointError(f"{self.path} is one of {parts} parts; join them: llama-gguf-split --merge")
        self._prefix, self._architecture = name, _ARCHITECTURES[name]
        self._factors = {t.name: t for t in tensors if t.name in (_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)}
        self._tensors = {self._hf_name(t.name): t for t in tensors if t.name not in self._factors}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        tensor = self._find(name)
        index = slice(None) if rows is None else rows
        order = self._row_order(tensor)
        stored = tensor.stored(self.path)[index if order is None else order[index]]
        values = stored if tensor.unquantized else _dequantize(stored, tensor.type)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return values - values.dtype.type(self._architecture.norm_offset)
        return values

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer and chat template; raises CheckpointError if its kind is not supported."""
        return Tokenizer.from_gguf_metadata(self.metadata)

    def config(self) -> dict[str, Any]:
        """The model in the terms of a Hugging Face config.json."""
        blocks, width = self._need_int("block_count"), self._need_int("embedding_length")
        heads = self._need_int("attention.head_count")
        head_dim = self._option("attention.key_length", width // heads, int)
        if head_dim < 1:
            raise CheckpointError(f"{self.path}: a head of {head_dim} numbers ({width} for {heads} heads)")
        config = {
            "architectures": [self._architecture.hf],
            "model_type": {"gemma3": "gemma3_text"}.get(self._prefix, self._prefix),
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": width,
            "intermediate_size": self._need_int("feed_forward_length"),
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(),
            "head_dim": head_dim,
            "max_position_embeddings": self._need_int("context_length"),
            "rms_norm_eps": self._need(f"{self._prefix}.attention.layer_norm_rms_epsilon", int, float),
            "hidden_act": self._architecture.activation,
            "hidden_activation": self._architecture.activation,
            "rope_theta": self._option("rope.freq_base", 10_000.0),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._typed("tokenizer.ggml.bos_token_id", None, int),
            "eos_token_id": self._typed("tokenizer.ggml.eos_token_id", None, int),
        }
        optional = {
            "sliding_window": self._option("attention.sliding_window") or None,
            "attn_logit_softcapping": self._option("attn_logit_softcapping"),
            "final_logit_softcapping": self._option("final_logit_softcapping"),
            "original_max_position_embeddings": self._option("rope.scaling.original_context_length"),
            "rope_scaling": self._rope_scaling(),
        }
        if self._architecture.wide_blocks:
            wide = blocks == self._architecture.wide_blocks
            optional["query_pre_attn_scalar"] = width // heads if wide else head_dim
        if self._prefix == "gemma3" and optional["sliding_window"] is None:
            optional["layer_types"] = ["full_attention"] * blocks
        rotated = self._option("rope.dimension_count", head_dim)
        if rotated != head_dim:
            optional["partial_rotary_factor"] = rotated / head_dim
        return config | {key: value for key, value in optional.items() if value is not None}

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._option("rope.scaling.type", "none", str)
        if _FACTORS in self._factors:  # Llama 3's scaling, already worked out for every frequency
            factors = self._read_factors(_FACTORS)
            scaling = {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
            }
        elif _LONG_FACTORS in self._factors:
            scaling = {
                "rope_type": "longrope",
                "short_factor": self._read_factors(_SHORT_FACTORS),
                "long_factor": self._read_factors(_LONG_FACTORS),
                "attention_factor": self._option("rope.scaling.attn_factor"),
            }
        elif kind == "none":
            return None
        elif kind in ("linear", "yarn"):
            scaling = {
                "rope_type": kind,
                "factor": self._need(f"{self._prefix}.rope.scaling.factor", int, float),
                "attention_factor": self._option("rope.scaling.yarn_attn_factor"),
                "beta_fast": self._option("rope.scaling.yarn_beta_fast"),
                "beta_slow": self._option("rope.scaling.yarn_beta_slow"),
            }
        else:
            raise CheckpointError(f"{self.path}: rope scaling {kind!r} is not supported; known: linear, yarn")
        return {key: value for key, value in scaling.items() if value is not None}

    def _read_factors(self, name: str) -> list[float]:
        if name not in self._factors:
            raise CheckpointError(f"{self.path} lacks tensor {name!r}")
        return self._factors[name].stored(self.path).tolist()

    def _hf_name(self, name: str) -> str:
        module, _, suffix = name.rpartition(".")
        if module in _TOP:
            return f"{_TOP[module]}.{suffix}"
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        if block is None or block[2] not in self._architecture.layer:
            raise CheckpointError(f"{self.path}: tensor {name!r} is not known in architecture {self._prefix!r}")
        return f"model.layers.{block[1]}.{self._architecture.layer[block[2]]}.{suffix}"

    def _row_order(self, tensor: _Tensor) -> np.ndarray | None:
        """The file's rows in Hugging Face order; None if that is the order they are in."""
        part = tensor.name.split(".")[-2]
        if not self._architecture.interleaved or part not in ("attn_q", "attn_k"):
            return None
        heads = self._need_int("attention.head_count") if part == "attn_q" else self._kv_heads()
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise CheckpointError(f"{self.path}: the {rows} rows of {tensor.name!r} are not {heads} heads")
        return rearrange(np.arange(rows), "(head pair part) -> (head part pair)", head=heads, part=2)

    def _kv_heads(self) -> int:
        key = "attention.head_count_kv"
        return self._need_int(key if f"{self._prefix}.{key}" in self.metadata else "attention.head_count")

    def _option(self, key: str, default: Any = None, *kinds: type) -> Any:
        """A value of this architecture, by its key without the architecture's name; by default a number."""
        return self._typed(f"{self._prefix}.{key}", default, *(kinds or (int, float)))

    def _typed(self, key: str, default: Any, *kinds: type) -> Any:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(
                f"{self.path}: metadata key {key!r} must be of type {names}, it is a {type(value).__name__}"
            )
        return default if value is None else value

    def _need(self, key: str, *kinds: type) -> Any:
        if (value := self._typed(key, None, *kinds)) is None:
            raise CheckpointError(f"{self.path} lacks metadata key {key!r}")
        return value

    def _need_int(self, key: str) -> int:
        """A size of this architecture; in some files it is a list, one value per block."""
        values = np.unique(self._need(f"{self._prefix}.{key}", int, np.ndarray))
        if values.size != 1 or values.dtype.kind not in "iu" or values[0] < 1:
            raise CheckpointError(f"{self.path}: {key} must be one positive number, it is {brief(values[:5].tolist())}")
        return int(values[0])


def _dequantize(stored: np.ndarray, kind: Any) -> np.ndarray:
    from gguf.quants import dequantize

    return dequantize(stored, kind)


def _read_header(path: Path) -> tuple[dict[str, Any], list[_Tensor]]:
    size = size_of(path)
    with path.open("rb") as file:
        start = file.read(4)
        if start != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it starts with {start!r}, expected b'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Header(path, data)
            version = header.numbers("I")[0]
            if version not in (2, 3):
                raise CheckpointError(f"{path} has GGUF version {version}; supported: 2 and 3, little-endian")
            tensor_count, metadata_count = header.numbers("QQ")
            metadata = {}
            for _ in range(metadata_count):
                key = header.string()
                metadata[key] = header.value(header.numbers("I")[0])
            infos = []
            for _ in range(tensor_count):
                name, dims = header.string(), header.numbers("I")[0]
                if dims > _MOST_DIMENSIONS:
                    raise CheckpointError(f"{path} has a damaged header: tensor {name!r} has {dims} dimensions")
                infos.append((name, header.numbers(f"{dims}Q"), *header.numbers("IQ")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path} has a damaged header: general.alignment is {alignment!r}")
    base = -(-header.at // alignment) * alignment
    tensors = [_tensor(path, name, dims, kind, base + offset) for name, dims, kind, offset in infos]
    _check_tensors(path, tensors, size)
    return metadata, tensors


def _tensor(path: Path, name: str, dims: tuple[int, ...], kind: int, offset: int) -> _Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        raise CheckpointError(
            f"{path}: tensor {name!r} has unknown type {kind}; a newer gguf package may know it"
        ) from None
    shape, block = tuple(reversed(dims)), GGML_QUANT_SIZES[type_]
    rank = 1 if type_.name in _UNQUANTIZED else 2  # vectors are never quantised
    if len(shape) < rank or shape[-1] % block[0]:
        raise CheckpointError(f"{path}: tensor {name!r} of type {type_.name} cannot have shape {shape}")
    return _Tensor(name, shape, type_, block, offset)


def _check_tensors(path: Path, tensors: list[_Tensor], size: int) -> None:
    ((twice, count),) = Counter(tensor.name for tensor in tensors).most_common(1) or [("", 0)]
    if count > 1:
        raise CheckpointError(f"{path} has a damaged header: tensor {twice!r} is there twice")
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)
    if end > size:
        raise CheckpointError(f"{path} is truncated: its tensors need {end} bytes, the file has {size}")
    for tensor in {t.type: t for t in tensors if not t.unquantized}.values():
        try:
            _dequantize(np.zeros((1, tensor.block[1]), np.uint8), tensor.type)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: the gguf package cannot decode tensor {tensor.name!r} of type {tensor.type.name}"
            ) from None


class _Header:
    """A cursor over the bytes of a header, behind its magic number; `at` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.at = 4

    def numbers(self, formats: str) -> tuple[Any, ...]:
        return struct.unpack("<" + formats, self._take(struct.calcsize("<" + formats)))

    def string(self) -> str:
        return self._decode(self._take(self.numbers("Q")[0]))

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            self._bad_type(f"type {kind}")
        return self._array(*self.numbers("IQ"))

    def _array(self, kind: int, count: int) -> np.ndarray | list[str]:
        if kind == _STRING:
            return self._strings(count)
        if kind not in _NUMBERS:
            self._bad_type(f"array of type {kind}")
        dtype = np.dtype("<" + _NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> list[str]:
        # Vocabularies have several hundred thousand entries, so this loop calls no Python function.
        data, size, at, texts = self.data, len(self.data), self.at, []
        length_at = struct.Struct("<Q").unpack_from
        if at + 8 * count > size:
            self._truncated(at + 8 * count)
        while len(texts) < count and at + 8 <= size:
            end = at + 8 + length_at(data, at)[0]
            texts.append(data[at + 8 : end])
            at = end
        if len(texts) < count or at > size:
            self._truncated(max(at, size) + 8 * (count - len(texts)))
        self.at = at
        return [self._decode(text) for text in texts]

    def _decode(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.path} has a damaged header: {text[:40]!r} before byte {self.at} is not UTF-8"
            ) from None

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            self._truncated(end)
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _bad_type(self, kind: str) -> NoReturn:
        raise CheckpointError(f"{self.path} has a damaged header: metadata of {kind} before byte {self.at}")

    def _truncated(self, needed: int) -> NoReturn:
        raise CheckpointError(
            f"{self.path} is truncated or its header damaged: it needs at least {needed} bytes, "
            f"the file has {len(self.data)}"
        )
