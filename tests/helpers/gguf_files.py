"""GGUF files of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFWriter

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


def write(path: Path, tensors: dict[str, Any], architecture: str = "llama", **metadata: Any) -> Path:
    """A GGUF file. tensors: values, or (bytes, type); metadata: keys without the architecture's name."""
    writer = GGUFWriter(path, architecture)
    sizes = {"block_count": 2, "embedding_length": 48, "feed_forward_length": 64, "context_length": 128}
    heads = {
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
    }
    for key, value in (sizes | heads | metadata).items():
        if value is None:
            continue
        name = f"{architecture}.{key}" if not key.startswith(("general", "split", "tokenizer")) else key
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
