"""The files of a model or head that drafts for another model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from inferlib.checkpoint.eagle3 import Eagle3Files
from inferlib.checkpoint.laid_out import LaidOutWeights
from inferlib.checkpoint.mtp import MtpFiles
from inferlib.checkpoint.source import CheckpointError
from inferlib.config import EngineConfig
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.eagle3 import AbstractHead, Eagle3Config, abstract_head
from inferlib.models.families import family_of
from inferlib.models.mtp import AbstractMtp, abstract_mtp
from inferlib.models.quantization import Quantization
from inferlib.programs.program_set import ProgramSet
from inferlib.speculation.eagle3 import Eagle3Drafter
from inferlib.speculation.mtp import MtpDrafter
from inferlib.speculation.settings import Speculation
from inferlib.tokenizer import Tokenizer


@dataclass(frozen=True)
class DraftFiles:
    """An opened checkpoint that drafts. quantization: how its weights are stored on the devices."""

    files: ModelFiles
    quantization: Quantization | None

    @staticmethod
    def open(model: str, target: ModelFiles, quantization: str | None, *, progress: bool = False) -> DraftFiles:
        """The files of a model that drafts for a target.

        quantization: as the target's is wanted; what is stored quantised stays as it is. Raises CheckpointError.
        """
        files = ModelFiles.open(model, progress=progress)
        check_tokenizers(files.tokenizer, target.tokenizer)
        return DraftFiles(files, files.quantization(None) or files.quantization(quantization))

    @property
    def config(self) -> ModelConfig:
        return self.files.config

    @property
    def shape(self) -> ModelConfig:
        """What programs must have been compiled for."""
        return self.config

    def describe(self, dtype: str, config: EngineConfig) -> AbstractModel:
        """The model as programs of this engine take it."""
        options: dict[str, Any] = dict(backend=config.backend, scan=config.scan, shards=config.shards)
        return abstract_model(self.config, dtype, quantization=self.quantization, **options)

    def load(self, programs: ProgramSet, *, progress: bool = False) -> tuple[jax.Array, ...]:
        """The weights, which programs take behind the target's."""
        assert programs.drafter is not None
        formats = programs.formats[len(programs.model.specs) :]
        shards = programs.config.shards
        return self.files.load(programs.drafter.model, shards=shards, formats=formats, progress=progress)


@dataclass(frozen=True)
class HeadFiles:
    """An opened EAGLE-3 head."""

    files: Eagle3Files

    config: ClassVar[None] = None  # it is of its target alone
    quantization: ClassVar[None] = None

    @property
    def shape(self) -> Eagle3Config:
        """What programs must have been compiled for."""
        return self.files.config

    def describe(self, dtype: str, config: EngineConfig) -> AbstractHead:
        """The head as programs of this engine take it."""
        return abstract_head(self.files.config, dtype, shards=config.shards)

    def load(self, programs: ProgramSet, *, progress: bool = False) -> tuple[jax.Array, ...]:
        """The weights, which programs take behind the target's."""
        assert isinstance(programs.drafter, Eagle3Drafter)
        formats = programs.formats[len(programs.model.specs) :]
        return self.files.load(programs.drafter.head, shards=programs.config.shards, formats=formats)


@dataclass(frozen=True)
class LayerFiles:
    """The layer for further tokens in the target's own checkpoint. quantization: how its weights are stored."""

    files: MtpFiles
    quantization: Quantization | None

    config: ClassVar[None] = None  # both are of its target alone
    shape: ClassVar[None] = None

    @staticmethod
    def open(target: ModelFiles, quantization: str | None) -> LayerFiles:
        """Raises CheckpointError or ConfigError for a target without such a layer."""
        if isinstance(target.source, LaidOutWeights):
            raise CheckpointError(
                f"{target.path} is converted, which leaves the layer for predicting further tokens out: give the "
                "original for speculation by mtp"
            )
        files = MtpFiles.open(target.source, family_of(target.hf), target.config)
        return LayerFiles(files, target.quantization(quantization))

    def describe(self, dtype: str, config: EngineConfig) -> AbstractMtp:
        """The layer as programs of this engine take it."""
        options: dict[str, Any] = dict(normed=self.files.names.normed, shards=config.shards)
        return abstract_mtp(self.files.target, dtype, quantization=self.quantization, **options)

    def load(self, programs: ProgramSet, *, progress: bool = False) -> tuple[jax.Array, ...]:
        """The weights, which programs take behind the target's."""
        assert isinstance(programs.drafter, MtpDrafter)
        formats = programs.formats[len(programs.model.specs) :]
        return self.files.load(programs.drafter.layer, shards=programs.config.shards, formats=formats)


def open_draft(
    speculation: Speculation | None, target: ModelFiles, quantization: str | None, *, progress: bool = False
) -> DraftFiles | HeadFiles | LayerFiles | None:
    """The files of what drafts for a target, None if no model does. quantization: see `DraftFiles.open`.

    Raises CheckpointError or ConfigError, for a head of another model too.
    """
    if speculation is None or not speculation.by_model:
        return None
    if speculation.method == "mtp":
        return LayerFiles.open(target, quantization)
    assert speculation.model is not None
    if speculation.method == "eagle3":
        return HeadFiles(Eagle3Files.open(speculation.model, target.config))
    return DraftFiles.open(str(speculation.model), target, quantization, progress=progress)


def check_tokenizers(draft: Tokenizer | None, target: Tokenizer | None) -> None:
    """Raise CheckpointError if a number is another token for a model that drafts. Models without a tokenizer pass."""
    if draft is None or target is None:
        return
    pairs = (draft.vocabulary.items(), target.vocabulary.items())
    mine, other = ({number: token for token, number in pair} for pair in pairs)
    for number in sorted(mine.keys() & other.keys()):
        if mine[number] != other[number]:
            raise CheckpointError(
                f"the model that drafts has another tokenizer: token {number} is {mine[number]!r:.40} there, and "
                f"{other[number]!r:.40} here; take a draft model of the same family"
            )
