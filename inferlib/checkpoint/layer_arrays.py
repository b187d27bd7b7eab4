"""Arrays of layers that are measured once and kept in a file beside a model, which is loaded with them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferlib.checkpoint.npz import write_npz
from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models import key_bases, key_turns, layer_preferences


@dataclass(frozen=True)
class LayerArrays:
    """A kind of such arrays.

    key: their tensors' names begin with it. file: its name. command: the one that writes it. lacking: what a user gets
    to know if there is no file at {path} of the model {model}.
    """

    key: str
    file: str
    command: str
    lacking: str

    def name_of(self, layer: int) -> str:
        """The tensor of a layer."""
        return f"{self.key}.{layer}"

    def path_of(self, model: Path) -> Path:
        """The file of a model: in its directory, or beside its one file."""
        return model / self.file if model.is_dir() else model.with_name(f"{model.name}.{self.file}")

    def read(self, model: Path) -> dict[str, np.ndarray]:
        """The tensors of a model's file. Raises CheckpointError if it is not there, or damaged."""
        path = self.path_of(model)
        if not path.exists():
            raise CheckpointError(self.lacking.format(path=path, model=model))
        try:
            with np.load(path, allow_pickle=False) as file:  # TypeError: it is one array
                return {self.name_of(int(layer)): np.asarray(file[layer]) for layer in file.files}
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(self.damage(path)) from error

    def damage(self, path: Path) -> str:
        """What a user gets to know of a file that is damaged."""
        return f"{path} is damaged: remove it, and write it again by `{self.command}`"

    def write(self, model: Path, of_layers: Mapping[int, np.ndarray]) -> Path:
        """Write an array of each layer, as float32, whole or not at all; returns the file's path. Raises OSError."""
        path = self.path_of(model)
        write_npz(path, {str(layer): np.asarray(array, np.float32) for layer, array in of_layers.items()})
        return path


# [K, h, d] of each layer, see `inferlib.models.key_bases`.
BASES = LayerArrays(
    key_bases.KEY,
    key_bases.FILE,
    "inferlib key-bases",
    "loki selects pages by bases of keys, and there is no {path}: write it by `inferlib key-bases {model} --data "
    "TEXT.jsonl`, or take quest, which needs none",
)
# [K, 2, h, h] of each layer, see `inferlib.models.key_turns`.
TURNS = LayerArrays(
    key_turns.KEY,
    key_turns.FILE,
    "inferlib calibrate-cache",
    "kv_cache_dtype int4_calibrated needs a calibration, and there is no {path}: write it by `inferlib calibrate-cache "
    "{model} --data TEXT.jsonl`, or take int4, which needs none",
)
# [N] of each layer, of N prompts, see `inferlib.models.layer_preferences`.
PREFERENCES = LayerArrays(
    layer_preferences.KEY,
    layer_preferences.FILE,
    "inferlib layer-preferences",
    "there is no {path}: write it by `inferlib layer-preferences {model} --data TEXT.jsonl`",
)


def with_preferences(hf: dict[str, Any], model: Path) -> dict[str, Any]:
    """A Hugging Face config with the preferences of layers that are kept beside its model, if there are any. Raises
    CheckpointError if the file is damaged."""
    if not PREFERENCES.path_of(model).exists():
        return hf
    arrays = PREFERENCES.read(model)
    of_layers = {int(name.rpartition(".")[2]): array for name, array in arrays.items()}
    try:
        return {**hf, layer_preferences.KEY: layer_preferences.mean_shares(of_layers)}
    except ValueError as error:
        raise CheckpointError(PREFERENCES.damage(PREFERENCES.path_of(model))) from error


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
