"""Text to measure or calibrate on, as windows of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inferlib.option_checks import ConfigurationError, brief, checked_path, is_list
from inferlib.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextSample:
    """Text to measure or calibrate on.

    texts: texts, or the path of a JSONL file whose lines are texts or objects with a "text". tokens: how many tokens
    to use, spread evenly over all texts. window: tokens of a sequence, at most the model's context. Raises
    ConfigurationError for anything else.
    """

    texts: str | Path | Sequence[str]
    tokens: int = 16384
    window: int = 512

    def __post_init__(self):
        for name, size, least in (("tokens", self.tokens, 1), ("window", self.window, 2)):
            if type(size) is not int or size < least:
                raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {brief(size)}")
        if self.window > self.tokens:
            raise ConfigurationError(f"a window of {self.window} tokens needs as many tokens, got {self.tokens}")

    def read(self) -> list[str]:
        """The texts that are not empty. Raises ConfigurationError for a file that has none, or other lines; OSError."""
        texts = self.texts
        if isinstance(texts, str | Path):
            texts = _lines(checked_path("data", texts))
        elif not is_list(texts) or not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f"data must be the path of a JSONL file or a list of texts, got {brief(texts)}")
        return [text for text in texts if text.strip()]

    def windows(self, tokenizer: Tokenizer, context: int) -> np.ndarray:
        """[N, W] int32. Raises ConfigurationError if the texts have too few tokens."""
        width = min(self.window, context)
        count = -(-self.tokens // width)
        tokens: list[int] = []
        for text in self.read():
            tokens += tokenizer.encode(text)
        if len(tokens) < count * width:
            raise ConfigurationError(
                f"the texts have {len(tokens)} tokens, and {count} windows of {width} take {count * width}: give more "
                "text, or ask for fewer tokens"
            )
        starts = np.linspace(0, len(tokens) - width, count).astype(np.int64)
        return np.stack([np.asarray(tokens[start : start + width], np.int32) for start in starts])


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigurationError(f'{path} is no file: give one of JSON lines, "..." or {{"text": "..."}}')
    texts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ConfigurationError(f'{path}, line {number} is no text: lines are JSON, "..." or {{"text": "..."}}')
        texts.append(text)
    return texts
