"""Weights as they were loaded, written back to a directory as models are published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inferlib.checkpoint.compressed_tensors import Numbers, taken_apart
from inferlib.checkpoint.load import load_items
from inferlib.checkpoint.safetensors import write_safetensors
from inferlib.models.abstract import AbstractModel
from inferlib.models.families import family_of


def save_model(directory: Path, hf: Mapping[str, Any], model: AbstractModel, weights: Sequence[jax.Array]) -> None:
    """Write a model that is not quantised, as one file of float32 and its config.json, `hf`; `LLM(directory)` loads it.

    model: with unstacked layers on one device; weights: in the order of `model.specs`. Raises ValueError for others,
    and ConfigurationError for a weight that is no tensor of published files; OSError.
    """
    if any(segment.count > 1 for segment in model.segments) or any(weight.scheme for weight in model.weights):
        raise ValueError("a model is saved unstacked and whole: give abstract_model no scan and no quantization")
    items = load_items(family_of(dict(hf)), model)
    numbers = (Numbers(np.asarray(x, np.float32)) for x in weights)
    tensors = {name: part.values for name, part in taken_apart(zip(items, numbers, strict=True))}
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(dict(hf), indent=2) + "\n", encoding="utf-8")
