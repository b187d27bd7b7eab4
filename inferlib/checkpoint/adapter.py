"""Adapters as PEFT writes them, merged into the tensors of a checkpoint (LoRA, Hu et al., 2021, arXiv:2106.09685)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.source import CheckpointError, TensorSource, read_json

_PREFIX = "base_model.model."
# The endings of a module's two tensors, in the adapter's order: of a projection, and of an embedding.
_ENDINGS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
# Fields of adapter_config.json that change what an adapter computes, and what they are called.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save, whole modules beside the adapter",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "target_parameters, experts that are one array",
    "lora_bias": "biases",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "an adapter that begins at a token (aLoRA)",
    "use_qalora": "QALoRA",
}


@dataclass(frozen=True)
class Factors:
    """The change of one weight, `scale * b @ a`: names of the tensors a [r, in] and b [out, r]. An embedding's is
    transposed."""

    a: str
    b: str
    scale: float
    embedding: bool


@dataclass(frozen=True)
class Adapter:
    """A directory with adapter_config.json and adapter_model.safetensors.

    modules: what is changed, by the module's name in transformers. transposed: weights are [in, out], as in GPT-2.
    """

    path: Path
    tensors: SafetensorsSource
    modules: Mapping[str, Factors]
    transposed: bool

    @staticmethod
    def open(path: str | Path) -> Adapter:
        """Raises CheckpointError for what is damaged, or not LoRA's plain form."""
        directory = Path(path)
        file = directory / "adapter_config.json"
        if not file.exists():
            raise CheckpointError(f"{directory} has no adapter_config.json: an adapter is a directory that PEFT wrote")
        config = read_json(file)
        _check(file, config)
        tensors = SafetensorsSource(directory)
        modules = {}
        for name in sorted(tensors.names()):
            if (made := _factors(name, tensors, config, file)) is not None:
                module, factors = made
                modules[module] = factors
        if not modules:
            raise CheckpointError(f"{directory} changes nothing: it has no tensors of LoRA")
        return Adapter(directory, tensors, modules, bool(config.get("fan_in_fan_out")))

    def factors(self, factors: Factors) -> tuple[np.ndarray, np.ndarray]:
        """a [r, in], and b [out, r] times the scale: float32."""
        a, b = (self.tensors.read(name).astype(np.float32) for name in (factors.a, factors.b))
        return a, np.float32(factors.scale) * b

    def sizes(self, factors: Factors) -> tuple[int, int, int]:
        """The rank, in and out."""
        rank, inputs = self.tensors.shape(factors.a)
        return rank, inputs, self.tensors.shape(factors.b)[0]

    @property
    def rank(self) -> int:
        """The highest rank."""
        return max(self.sizes(factors)[0] for factors in self.modules.values())

    def change(self, factors: Factors, rows: slice | None) -> np.ndarray:
        """What is added to a weight, or to rows of it: float32, as the checkpoint has it."""
        a, b = (self.tensors.read(name).astype(np.float32) for name in (factors.a, factors.b))
        left, right = (a.T, b.T) if factors.embedding or self.transposed else (b, a)
        return np.float32(factors.scale) * (left[rows or slice(None)] @ right)

    def shape(self, factors: Factors) -> tuple[int, int]:
        """The shape of the weight that the factors change."""
        rows, columns = self.tensors.shape(factors.b)[0], self.tensors.shape(factors.a)[1]
        return (columns, rows) if factors.embedding or self.transposed else (rows, columns)


def names_of(module: str) -> tuple[str, ...]:
    """The names that a module's weight may have in a checkpoint: of a model with or without its head."""
    return tuple(f"{m}.weight" for m in (module, module.removeprefix("model."), f"model.{module}"))


def _check(file: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an adapter of another kind."""
    instead = "merge it with PEFT, model.merge_and_unload(), and convert what that saves"
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{file} is of peft_type {kind!r}, and LORA alone is read: {instead}")
    if used := [text for name, text in _REFUSED.items() if config.get(name)]:
        raise CheckpointError(f"{file} has {used[0]}, which is not supported: {instead}")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{file} has bias {config['bias']!r}, and only 'none' is supported: {instead}")
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), int | float) or config[name] <= 0:
            raise CheckpointError(f"{file} is damaged: {name} must be above 0, it is {config.get(name)!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        values = config.get(name) or {}
        if not isinstance(values, dict) or not all(isinstance(x, int | float) and x > 0 for x in values.values()):
            raise CheckpointError(f"{file} is damaged: {name} must map names of modules to numbers above 0")


def _factors(
    name: str, tensors: SafetensorsSource, config: Mapping[str, Any], file: Path
) -> tuple[str, Factors] | None:
    """The module of a tensor that is its `a`, and its factors; None for its `b`. Raises CheckpointError for others."""
    for first, second in _ENDINGS:
        if name.startswith(_PREFIX) and name.endswith((first, second)):
            module = name.removeprefix(_PREFIX).removesuffix(first).removesuffix(second)
            a, b = _PREFIX + module + first, _PREFIX + module + second
            shapes = tensors.shape(a), tensors.shape(b)  # also of the one that may be missing
            if name == b:
                return None
            rank = _matching(config.get("rank_pattern"), module, config["r"])
            if [len(shape) for shape in shapes] != [2, 2] or not shapes[0][0] == shapes[1][1] == rank:
                raise CheckpointError(f"{file} gives {module} the rank {rank}, and its tensors have shapes {shapes}")
            alpha = _matching(config.get("alpha_pattern"), module, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            return module, Factors(a, b, scale, embedding=first == _ENDINGS[1][0])
    what = "DoRA" if "lora_magnitude_vector" in name else "more than the two factors of LoRA"
    raise CheckpointError(
        f"{tensors.path} holds {what} ({name}), which is not supported: merge it with PEFT, model.merge_and_unload()"
    )


def _matching(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in PEFT."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


class MergedSource:
    """A `TensorSource` with an adapter merged into its tensors, which become float32.

    whole: tensors that an adapter must not change, as other weights share them.
    """

    def __init__(self, source: TensorSource, adapter: Adapter, whole: Iterable[str] = ()):
        self._source, self._adapter = source, adapter
        self._changed: dict[str, Factors] = {}
        names, whole = set(source.names()), set(whole)
        for module, factors in adapter.modules.items():
            if (name := next((form for form in names_of(module) if form in names), None)) is None:
                raise CheckpointError(
                    f"{adapter.path} changes {module}, and the model has no such weight: take an adapter of this model"
                )
            if name in whole:
                raise CheckpointError(
                    f"{adapter.path} changes {module}, whose weight is the embedding and the output projection at "
                    "once: train the adapter without it"
                )
            shape, mine = tuple(source.shape(name)), adapter.shape(factors)
            if shape != mine:
                raise CheckpointError(f"{adapter.path} changes {module} as {mine}, and the model's weight is {shape}")
            self._changed[name] = factors

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._changed else self._source.dtype(name)

    def nbytes(self, name: str) -> int:
        return self._source.nbytes(name)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        stored = self._source.read(name, rows)
        if (factors := self._changed.get(name)) is None:
            return stored
        return stored.astype(np.float32) + self._adapter.change(factors, rows)
