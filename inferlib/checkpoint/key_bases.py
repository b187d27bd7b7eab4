"""Bases of keys (see `inferlib.models.key_bases`) as tensors of a model, from the file beside it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.key_bases import FILE, KEY


def name_of(layer: int) -> str:
    """The tensor of a layer."""
    return f"{KEY}.{layer}"


def path_of(model: Path) -> Path:
    """The file of a model: in its directory, or beside its one file."""
    return model / FILE if model.is_dir() else model.with_name(f"{model.name}.{FILE}")


def read_key_bases(model: Path) -> dict[str, np.ndarray]:
    """The tensors [K, h, d] of a model's file. Raises CheckpointError if it is not there, or damaged."""
    path = path_of(model)
    if not path.exists():
        raise CheckpointError(
            f"loki selects pages by bases of keys, and there is no {path}: write it by `inferlib key-bases {model} "
            "--data TEXT.jsonl`, or take quest, which needs none"
        )
    return {name_of(layer): basis for layer, basis in read_arrays(path, "inferlib key-bases").items()}


def read_arrays(path: Path, command: str) -> dict[int, np.ndarray]:
    """The array of each layer in a file that a command has written. Raises CheckpointError if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {int(layer): np.asarray(file[layer]) for layer in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged: remove it, and write it again by `{command}`") from error


def write_key_bases(model: Path, bases: Mapping[int, np.ndarray]) -> Path:
    """Write the file, whole or not at all; returns its path. Raises OSError."""
    return write_arrays(path_of(model), bases)


def write_arrays(path: Path, of_layers: Mapping[int, np.ndarray]) -> Path:
    """Write an array of each layer to a file, whole or not at all; returns its path. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        arrays: Any = {str(layer): np.asarray(array, np.float32) for layer, array in of_layers.items()}
        np.savez(file, **arrays)
    partial.replace(path)
    return path


class WithArrays:
    """A `TensorSource` with arrays beside its tensors."""

    def __init__(self, source: TensorSource, arrays: Mapping[str, np.ndarray]):
        self._source, self._arrays = source, arrays

    def names(self) -> Iterable[str]:
        return [*self._source.names(), *self._arrays]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape if name in self._arrays else self._source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self._arrays[name].dtype if name in self._arrays else self._source.dtype(name)

    def nbytes(self, name: str) -> int:
        return self._arrays[name].nbytes if name in self._arrays else self._source.nbytes(name)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name not in self._arrays:
            return self._source.read(name, rows)
        return self._arrays[name] if rows is None else self._arrays[name][rows]
