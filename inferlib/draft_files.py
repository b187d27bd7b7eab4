"""The files of a model that drafts for another one."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.config import ModelConfig
from inferlib.models.quantization import Quantization
from inferlib.programs.program_set import ProgramSet
from inferlib.speculation.settings import Speculation
from inferlib.tokenizer import Tokenizer


@dataclass(frozen=True)
class DraftFiles:
    """An opened checkpoint that drafts. quantization: how its weights are stored on the devices."""

    files: ModelFiles
    quantization: Quantization | None

    @staticmethod
    def open(
        speculation: Speculation | None, target: ModelFiles, quantization: str | None, *, progress: bool = False
    ) -> DraftFiles | None:
        """The files of the model that drafts for a target, None if none does.

        quantization: as the target's is wanted; what is stored quantised stays as it is. Raises CheckpointError, and
        ConfigurationError for a model that cannot draft for this target.
        """
        if speculation is None or speculation.model is None:
            return None
        files = ModelFiles.open(speculation.model, progress=progress)
        check_tokenizers(files.tokenizer, target.tokenizer)
        return DraftFiles(files, files.quantization(None) or files.quantization(quantization))

    @property
    def config(self) -> ModelConfig:
        return self.files.config

    def load(self, programs: ProgramSet, *, progress: bool = False) -> tuple[jax.Array, ...]:
        """The weights, which programs take behind the target's."""
        assert programs.drafter is not None
        formats = programs.formats[len(programs.model.specs) :]
        shards = programs.config.shards
        return self.files.load(programs.drafter.model, shards=shards, formats=formats, progress=progress)


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
