"""Turns of keys (see `inferlib.models.key_turns`) as tensors of a model, from the file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from inferlib.checkpoint.key_bases import read_arrays, write_arrays
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.key_turns import FILE, KEY


def name_of(layer: int) -> str:
    """The tensor of a layer."""
    return f"{KEY}.{layer}"


def path_of(model: Path) -> Path:
    """The file of a model: in its directory, or beside its one file."""
    return model / FILE if model.is_dir() else model.with_name(f"{model.name}.{FILE}")


def read_key_turns(model: Path) -> dict[str, np.ndarray]:
    """The tensors [K, 2, h, h] of a model's file. Raises CheckpointError if it is not there, or damaged."""
    path = path_of(model)
    if not path.exists():
        raise CheckpointError(
            f"kv_cache_dtype int4_calibrated needs a calibration, and there is no {path}: write it by `inferlib "
            f"calibrate-cache {model} --data TEXT.jsonl`, or take int4, which needs none"
        )
    return {name_of(layer): turns for layer, turns in read_arrays(path, "inferlib calibrate-cache").items()}


def write_key_turns(model: Path, turns: Mapping[int, np.ndarray]) -> Path:
    """Write the file, whole or not at all; returns its path. Raises OSError."""
    return write_arrays(path_of(model), turns)
