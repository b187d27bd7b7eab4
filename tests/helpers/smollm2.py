"""The first layers of SmolLM2, whose tokenizer and shapes are those of the whole, for what does not depend on depth."""

from __future__ import annotations

import re
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from inferlib.checkpoint.known import resolve


def first_layers(layers: int, file: Path) -> Path:
    """A GGUF file of the published one's first layers, with its last norm and embeddings."""
    reader, writer = GGUFReader(resolve("smollm2")), GGUFWriter(file, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":  # the writer has its own
            continue
        value = layers if field.name == "llama.block_count" else field.contents()
        of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=of)
    for tensor in reader.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer is None or int(layer[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
