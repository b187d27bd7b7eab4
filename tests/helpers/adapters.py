"""Adapters as PEFT writes them, of random factors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}


def modules_of(path: Path, endings: tuple[str, ...], rank: int) -> dict[str, tuple[int, int, int]]:
    """The modules of a checkpoint whose names end like this, as `write_adapter` takes them."""
    shapes = {name.removesuffix(".weight"): x.shape for name, x in load_file(path / "model.safetensors").items()}
    transposed = "transformer.h.0.attn.c_attn" in shapes
    chosen = {name: shape for name, shape in shapes.items() if name.endswith(endings) and len(shape) == 2}
    return {name: (rank, *(shape if transposed else shape[::-1])) for name, shape in chosen.items()}


def write_for(model: Path, folder: Path, endings: tuple[str, ...], rank: int) -> None:
    """Write an adapter of a checkpoint that changes what the model says."""
    write_adapter(folder, modules_of(model, endings, rank), r=rank, lora_alpha=4 * rank)


def write_adapter(folder: Path, modules: dict[str, tuple[int, int, int]], **config: Any) -> dict[str, np.ndarray]:
    """Write factors of modules: name -> (rank, in, out). Returns the tensors. config: fields beside CONFIG's."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, tensors = np.random.default_rng(len(modules)), {}
    for module, (rank, rows, columns) in modules.items():
        names = ("lora_embedding_A", "lora_embedding_B") if "embed" in module else ("lora_A.weight", "lora_B.weight")
        shapes = (rank, rows), (columns, rank)
        for name, shape in zip(names, shapes, strict=True):
            tensors[f"base_model.model.{module}.{name}"] = rng.normal(0, 0.2, shape).astype(np.float32)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors
