"""A model on disk: what it is, its tensors, its tokenizer."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.checkpoint.adapter import Adapter, MergedSource
from inferlib.checkpoint.gguf import GGUFCheckpoint
from inferlib.checkpoint.known import resolve
from inferlib.checkpoint.laid_out import LaidOutWeights
from inferlib.checkpoint.layer_arrays import BASES, PREFERENCES, TURNS, WithArrays, with_preferences
from inferlib.checkpoint.load import load_weights, shipped_quantization
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.shipped import QuantizedSource, form_of
from inferlib.checkpoint.source import CheckpointError, TensorSource, read_json
from inferlib.hub import HubName
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import ConfigError, ModelConfig
from inferlib.models.families import config_from_hf, family_of
from inferlib.models.families.common import EARLY_EXIT, LOOP_STEPS
from inferlib.models.ffn_fusion import KEY as FUSED
from inferlib.models.key_bases import KEY as KEY_BASES
from inferlib.models.key_turns import KEY as KEY_TURNS
from inferlib.models.quantization import Quantization
from inferlib.ops.selected_pages import PageSelection
from inferlib.option_checks import CALIBRATED_CACHE, ConfigurationError
from inferlib.placement import ExpertPlacement
from inferlib.programs.adapter_factors import AdapterFactors
from inferlib.sharding.shards import Shards
from inferlib.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CALIBRATION = "calibration.json"  # what `calibrate` says of its run, beside the weights
# Methods that change what products multiply, merged into the weights that make it.
_MOVING = ("awq", "smoothquant", "hadamard", "spinquant")


def locate(model: str | Path, revision: str | None = None, *, weights: bool = True, progress: bool = False) -> Path:
    """The directory or GGUF file of a model: on this machine, or downloaded from the hub, maybe without its weights.

    Raises CheckpointError.
    """
    if name := HubName.parse(model):
        return name.download(revision, weights=weights, progress=progress)
    path = resolve(model)
    if revision is not None:
        raise CheckpointError(
            f"revision {revision!r} is for models of the hub, and {model} is a local one: leave it out"
        )
    return path


def read_config(model: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The Hugging Face config of a model. A model of the hub is not downloaded for it, but for a GGUF file.

    Raises CheckpointError.
    """
    path = locate(model, revision, weights=False)
    return with_preferences(GGUFCheckpoint(path).config(), path) if path.suffix == ".gguf" else _read_config(path)


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.exists():
        raise CheckpointError(
            f"{directory} has no config.json: a model is a Hugging Face or converted directory or a .gguf file"
        )
    return with_preferences(read_json(file), directory)


@dataclass(frozen=True)
class ModelFiles:
    """An opened checkpoint: its Hugging Face config, tensors and tokenizer (None if it has none)."""

    path: Path
    hf: dict[str, Any]
    config: ModelConfig
    source: TensorSource | LaidOutWeights
    tokenizer: Tokenizer | None

    def __post_init__(self):
        # Before anything is made of the layers, which takes long if there are many.
        tensors = len(list(self.source.names()))
        if len(self.config.layers) > tensors:
            raise CheckpointError(
                f"{self.path} has {tensors} tensors, and its configuration {len(self.config.layers)} layers: fetch "
                "all its files again"
            )

    @staticmethod
    def open(model: str | Path, revision: str | None = None, *, progress: bool = False) -> ModelFiles:
        """A Hugging Face directory, one that `convert` wrote, a `.gguf` file, a known name or a name of the hub.

        revision: of a model of the hub. progress: show bars of what is downloaded. Raises CheckpointError or
        ConfigError.
        """
        path = locate(model, revision, progress=progress)
        if path.suffix == ".gguf":
            gguf = GGUFCheckpoint(path)
            hf = with_preferences(gguf.config(), path)
            return ModelFiles(path, hf, config_from_hf(hf), gguf, gguf.tokenizer())
        hf = _read_config(path)
        config = config_from_hf(hf)
        tokenizer = Tokenizer.from_directory(path) if (path / "tokenizer.json").exists() else None
        if LaidOutWeights.are_in(path):
            source = LaidOutWeights(path, hf)
        else:
            source = SafetensorsSource(path)
            if quantized := hf.get("quantization_config"):
                source = QuantizedSource(source, form_of(quantized))
                if unused := source.cache_scales:
                    log.warning(
                        "%s: %d scales and zero points of queries, keys and values are not used: the cache keeps its "
                        "dtype unless kv_cache_dtype says otherwise",
                        path,
                        len(unused),
                    )
            if unseen := [name for name in source.names() if name.startswith(family_of(hf).senses)]:
                log.warning("%s: the text model is run; %d tensors of images or sound are left out", path, len(unseen))
        return ModelFiles(path, hf, config, source, tokenizer)

    def looped(self, steps: int | None = None, early_exit: bool | str | None = None) -> ModelFiles:
        """These files for a model that runs its core `steps` times, with or without early exits; None: as it was.

        Raises ConfigError for a model without a core, or for other values.
        """
        options = {LOOP_STEPS: steps, EARLY_EXIT: early_exit}
        options = {name: value for name, value in options.items() if value is not None}
        if not options:
            return self
        if (loop := self.config.loop) is None:
            name = next(iter(options))
            raise ConfigError(
                f"{name} is for models that repeat layers, and {self.config.family} does not: leave it out"
            )
        if isinstance(steps, bool) or not isinstance(steps, int | None):
            raise ConfigError(f"loop_steps is a whole number, such as {loop.steps}, got {steps!r:.100}")
        if not isinstance(early_exit, bool | None) and early_exit != "kl":
            raise ConfigError(f'early_exit is True, "kl" or False, got {early_exit!r:.100}')
        hf = {**self.hf, **options}
        return replace(self, hf=hf, config=config_from_hf(hf))

    def selecting(self, selection: PageSelection | None) -> ModelFiles:
        """These files with the bases of keys that decode steps select pages by, if they select by bases.

        Raises CheckpointError if there are no bases, and ConfigError for a model that can have none.
        """
        if selection is None or not selection.by_bases:
            return self
        if isinstance(self.source, LaidOutWeights | QuantizedSource):
            raise CheckpointError(
                f"{self.path} is converted or quantised, and loki has bases of keys of original models: take that, or "
                "quest"
            )
        hf = {**self.hf, KEY_BASES: True}
        source = WithArrays(self.source, BASES.read(self.path))
        return replace(self, hf=hf, config=config_from_hf(hf), source=source)

    def with_cache(self, kv_cache_dtype: str | None) -> ModelFiles:
        """These files with the matrices that a calibrated cache turns keys by; other caches change nothing.

        Raises CheckpointError if there are no matrices, and ConfigError for a model that can have none.
        """
        if kv_cache_dtype != CALIBRATED_CACHE:
            return self
        if isinstance(self.source, LaidOutWeights | QuantizedSource):
            raise CheckpointError(
                f"{self.path} is converted or quantised, and kv_cache_dtype {CALIBRATED_CACHE} is for original models: "
                "take that, or int4"
            )
        hf = {**self.hf, KEY_TURNS: True}
        config = config_from_hf(hf)
        return replace(self, hf=hf, config=config, source=WithArrays(self.source, TURNS.read(self.path)))

    def merged(self, adapter: str | Path) -> ModelFiles:
        """These files with an adapter, a directory that PEFT wrote, merged into the weights. Raises CheckpointError."""
        opened = Adapter.open(adapter)
        if isinstance(self.source, LaidOutWeights | QuantizedSource):
            form = "converted" if isinstance(self.source, LaidOutWeights) else "quantised"
            raise CheckpointError(f"{self.path} is {form}: merge the adapter into the original, and then do that")
        top = family_of(self.hf).top
        shared = [f"{top[part]}.weight" for part in ("embed", "head")] if self.config.tied else []
        return replace(self, source=MergedSource(self.source, opened, shared))

    def quantization(self, wanted: str | None) -> Quantization | None:
        """How to store the weights: as `wanted`, by default as in the files.

        Weights that the files store as int8 may be wanted as int8_a8, which only rounds the inputs of their products.
        Raises ConfigError for an unknown name, CheckpointError if they are stored quantised in another way.
        """
        stored = None
        if isinstance(self.source, LaidOutWeights):
            stored = self.source.quantization
        elif isinstance(self.source, QuantizedSource):
            stored = shipped_quantization(self.source, family_of(self.hf), self.config)
        if wanted is None or (stored is not None and wanted == stored.name):
            return stored
        quantization = Quantization.named(wanted)
        if stored is None:
            return quantization
        if replace(quantization.scheme, round_inputs=stored.scheme.round_inputs) != stored.scheme:
            raise CheckpointError(
                f"{self.path} has {stored} weights, which cannot become {wanted}: quantise the original, or leave "
                "quantization out"
            )
        return replace(stored, name=quantization.name, scheme=quantization.scheme)  # the same weights, other products

    def must_take_adapters(self) -> None:
        """Raise CheckpointError if feed-forwards were fused, or if a calibration changed what products multiply:
        adapters are trained for the layers and the inputs of the original, and would change others."""
        self.must_have_published_layers()
        if not (self.path / CALIBRATION).is_file():
            return
        try:
            method = read_json(self.path / CALIBRATION)["settings"]["method"]
            moving = [part for part in method.split("+") if part.partition(":")[0] in _MOVING]
        except (KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{self.path / CALIBRATION} is damaged: calibrate the original again") from None
        if moving:
            raise CheckpointError(
                f"{self.path} was calibrated by {method}, and adapters do not fit what {moving[0]} made of the inputs "
                "of products: calibrate the original by gptq or clip"
            )

    def must_have_published_layers(self) -> None:
        """Raise CheckpointError if feed-forwards were fused: the layers are not those that other libraries know."""
        if self.hf.get(FUSED) is True:
            raise CheckpointError(
                f"{self.path} has fused feed-forwards, so its layers are not those that adapters and other libraries "
                "know: take the original"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(self.source.nbytes(name) for name in self.source.names())

    def load(
        self,
        model: AbstractModel,
        *,
        placement: ExpertPlacement | None = None,
        shards: Shards = Shards(),  # noqa: B008
        formats: Sequence[Format | NamedSharding | None] | None = None,
        progress: bool = False,
    ) -> tuple[jax.Array, ...]:
        """The weights in the order of `model.specs`, on their devices; see `load_weights`. Slots of adapters are empty.
        Raises ConfigurationError if the model has slots for experts and there is no placement, or the other way round.
        """
        if (placement and placement.slots) != model.layout.slots:
            raise ConfigurationError(
                f"the programs are for {model.layout.slots or 'no'} expert slots, and the placement has "
                f"{placement.slots if placement else 'none'}: give the expert placement that they were made for"
            )
        options: dict[str, Any] = dict(placement=placement, shards=shards, formats=formats, progress=progress)
        if isinstance(self.source, LaidOutWeights):
            weights = self.source.load(model, **options)
        else:
            weights = load_weights(self.source, family_of(self.hf), model, **options)
        if not model.factors:
            return weights
        places = tuple(formats or (shards.sharding(spec.axes) for spec in model.specs))
        return weights + AdapterFactors(model, shards, places).empty()

    def save_description(self, directory: Path) -> None:
        """Write all but the tensors, as a Hugging Face directory has it, and preferences of layers beside it."""
        if (preferences := PREFERENCES.path_of(self.path)).exists():
            shutil.copyfile(preferences, PREFERENCES.path_of(directory))
        if self.path.is_dir():
            for name in ("config.json", *Tokenizer.FILES):
                if (self.path / name).exists():
                    shutil.copyfile(self.path / name, directory / name)
            return
        (directory / "config.json").write_text(json.dumps(self.hf, indent=2), encoding="utf-8")
        if self.tokenizer is not None:
            self.tokenizer.save(directory)
