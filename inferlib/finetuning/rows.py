"""What a run learns from and is measured on, prepared once and kept beside its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inferlib.checkpoint.npz import write_npz
from inferlib.distillation.texts import read_texts, rows_of, tokens_of
from inferlib.option_checks import ConfigurationError
from inferlib.tokenizer import Tokenizer

_TESTED = 64  # rows that are held out


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, int32: training [n, T] to learn from, testing [k, T] that are held out."""

    training: np.ndarray
    testing: np.ndarray

    @staticmethod
    def saved(folder: Path) -> Rows | None:
        """The rows that a run saved; None if it saved none."""
        file = folder / "rows.npz"
        if not file.exists():
            return None
        with np.load(file) as arrays:
            return Rows(arrays["training"], arrays["testing"])

    @staticmethod
    def of_texts(texts: Path, tokenizer: Tokenizer, length: int) -> Rows:
        """Raises ConfigurationError for texts that are too short."""
        read = read_texts(texts)
        if read.chats:
            raise ConfigurationError(f"{texts} has lines with messages, which are for distill alone: leave them out")
        training, testing = (rows_of(tokens_of(part, tokenizer), length) for part in (read.training, read.testing))
        for what, part in (("train on", training), ("measure with", testing)):
            if not len(part):
                raise ConfigurationError(
                    f"{texts} has less than {length} tokens to {what}: give more, or a smaller --length"
                )
        spread = np.linspace(0, len(testing) - 1, min(_TESTED, len(testing))).astype(int)
        return Rows(training, testing[spread])

    def joined(self, training: np.ndarray) -> Rows:
        """These rows, and more to learn from."""
        return Rows(np.concatenate([self.training, training]), self.testing)

    def save(self, folder: Path) -> None:
        write_npz(folder / "rows.npz", vars(self))
