"""A model to be explained, planned or compiled: its config, and its files if it has any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlib import configs
from inferlib.checkpoint.load import described_quantization
from inferlib.model_files import ModelFiles, read_config
from inferlib.models.config import ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.option_checks import ConfigurationError, brief
from inferlib.progress import on_terminal


@dataclass(frozen=True)
class ModelSource:
    """A model by its Hugging Face config. name: for titles. files: its checkpoint, None if only its shape is known."""

    name: str
    hf: Mapping[str, Any]
    files: ModelFiles | None = None

    @property
    def config(self) -> ModelConfig:
        return config_from_hf(dict(self.hf))

    @property
    def shipped(self) -> Quantization | None:
        """The format in which the model is shipped, by its config."""
        return described_quantization(self.hf, self.config)

    @property
    def checkpoint(self) -> str | None:
        """The path of the model's files; None if it has none."""
        return None if self.files is None else str(self.files.path)

    def quantization(self, wanted: str | None) -> Quantization | None:
        """The format of the weights: as wanted, or as the files store them."""
        if self.files is not None:
            return self.files.quantization(wanted)
        return None if wanted is None else Quantization.named(wanted)


def shape_source(name: str) -> ModelSource:
    """A shape that comes with inferlib, without weights. Raises ConfigurationError for an unknown name."""
    if name not in configs.names():
        raise ConfigurationError(f"no model shape is called {name!r}; known: {', '.join(configs.names())}")
    return ModelSource(name, configs.load(name))


def model_source(model: Any, revision: str | None = None, *, files: bool = True, shapes: bool = True) -> ModelSource:
    """What a user names.

    model: a model as for `LLM`; the name of a shape that comes with inferlib, such as "llama3-70b"; a Hugging Face
        config as a mapping; or a `ModelSource`. A file or directory comes before a shape of that name.
    files: open the checkpoint; False reads only its config, and downloads no weights. shapes: a text may name a shape.

    Raises CheckpointError, ConfigError or ConfigurationError.
    """
    if revision is not None and not isinstance(model, str | Path):
        raise ConfigurationError(f"revision {brief(revision)} is for models of the hub: leave it out")
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, Mapping):
        return ModelSource(str(model.get("model_type", "model")), model)
    if not isinstance(model, str | Path):
        raise ConfigurationError(
            f"a model is a name, a directory or file, or a Hugging Face config as a mapping, got {brief(model)}"
        )
    if shapes and isinstance(model, str) and revision is None and model in configs.names() and not Path(model).exists():
        return shape_source(model)
    if not files:
        return ModelSource(str(model), read_config(model, revision))
    opened = ModelFiles.open(model, revision, progress=on_terminal())
    return ModelSource(str(model), opened.hf, opened)
