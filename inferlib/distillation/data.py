"""What a run learns from and is measured on, prepared once and kept beside its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from inferlib.checkpoint.npz import write_npz
from inferlib.distillation.continuations import continue_prompts, prompts_of_chats
from inferlib.distillation.settings import DistillSettings
from inferlib.distillation.texts import frequent_tokens, read_texts, rows_of, tokens_of
from inferlib.model_files import ModelFiles
from inferlib.option_checks import ConfigurationError

TESTED = 64  # texts that a head is measured on
_PROMPT = 4  # a test's prompt is its first 1 / _PROMPT of the tokens


@dataclass(frozen=True)
class Data:
    """rows [n, T]: of texts; continued [m, T]: of what the model goes on with, maybe none; ids [U]: the tokens that can
    be drafted, ascending; tests [k, T]: texts that the model continued, lengths [k]: how long each is, begin: of its
    prompt. All int32.
    """

    rows: np.ndarray
    continued: np.ndarray
    ids: np.ndarray
    tests: np.ndarray
    lengths: np.ndarray
    begin: int

    def save(self, file: Path) -> None:
        write_npz(file, vars(self))

    @staticmethod
    def load(file: Path) -> Data:
        with np.load(file) as arrays:
            fields = {name: arrays[name] for name in arrays.files}
        return Data(**{**fields, "begin": int(fields["begin"])})

    def batch(self, step: int, size: int, seed: int) -> np.ndarray:
        """The rows [size, T] of a step; half of them continued ones, if there are any. See `rows_of_step`."""
        half = size // 2 if len(self.continued) else 0
        parts = [rows_of_step(self.rows, step, size - half, seed), rows_of_step(self.continued, step, half, seed + 1)]
        return np.concatenate(parts)


def rows_of_step(rows: np.ndarray, step: int, count: int, seed: int) -> np.ndarray:
    """The rows of a step, `count` of them; they come in a new order whenever all were taken."""
    places = range(step * count, (step + 1) * count)
    return rows[[_order(len(rows), seed, place // len(rows))[place % len(rows)] for place in places]]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def prepare(files: ModelFiles, texts: Path, settings: DistillSettings, *, dtype: str, progress: bool) -> Data:
    """Read and tokenise texts, and let the model continue some, and answer all chats. Raises ConfigurationError if
    texts are too few, or for a chat that the model cannot answer."""
    if files.tokenizer is None:
        raise ConfigurationError(
            f"{files.path} has no tokenizer, and texts are to be tokenised: add its tokenizer.json"
        )
    read, length, draw = read_texts(texts), settings.length, np.random.default_rng(settings.seed)
    rows, tests = (rows_of(tokens_of(part, files.tokenizer), length) for part in (read.training, read.testing))
    for what, part in (("train on", rows), ("measure with", tests)):
        if not len(part):
            raise ConfigurationError(
                f"{texts} has less than {length} tokens to {what}: give more, or a smaller --length"
            )
    tests = tests[np.linspace(0, len(tests) - 1, min(TESTED, len(tests))).astype(int)]
    chosen = rows[draw.permutation(len(rows))[: settings.continuations]]
    if len(chosen) < settings.continuations:
        raise ConfigurationError(f"{texts} has {len(rows)} rows of {length} tokens, and --continuations wants more")
    begin, prompt = draw.integers(length // 8, length // 2, len(chosen), endpoint=True), length // _PROMPT
    prompts = [row[:count].tolist() for row, count in zip(chosen, begin, strict=True)]
    prompts += prompts_of_chats(read.chats, files.tokenizer, length)
    tested = [row[:prompt].tolist() for row in tests]
    made = continue_prompts(files.path, [*prompts, *tested], length, dtype=dtype, progress=progress)
    learned, answers = made[: len(prompts)], made[len(prompts) :]
    continued = rows_of(np.concatenate([*learned, np.zeros(0, np.int32)]), length)
    if prompts and not len(continued):
        raise ConfigurationError(
            "what the model goes on with fills no row: ask for more --continuations, or give more chats"
        )
    seen = np.concatenate([rows.reshape(-1), continued.reshape(-1)])
    ids = frequent_tokens(seen, files.config.vocab, settings.drafted(files.config.vocab))
    return Data(rows, continued, ids, _padded(answers, length), np.asarray([len(a) for a in answers], np.int32), prompt)


def _padded(texts: Sequence[np.ndarray], length: int) -> np.ndarray:
    return np.stack([np.pad(text, (0, length - len(text))) for text in texts])
