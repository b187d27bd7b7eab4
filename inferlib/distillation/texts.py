"""Texts to train on: a file of JSON lines, cut into rows of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferlib.option_checks import ConfigurationError
from inferlib.tokenizer import Tokenizer

SPLITS = ("train", "held_out")
_PIECE = 20_000  # characters that are tokenised at once


@dataclass(frozen=True)
class Texts:
    """training: to learn from; testing: held out, to measure with; chats: messages that the model answers, to learn
    from."""

    training: tuple[str, ...]
    testing: tuple[str, ...]
    chats: tuple[list[Any], ...] = ()


def read_texts(file: Path) -> Texts:
    """The texts of a file of JSON lines, {"text": ..., "split": "train" or "held_out"}, and the chats of lines
    {"messages": [...]}.

    Without a split, each fiftieth line is held out if it is a text. Raises ConfigurationError for other lines, or if no
    text is left.
    """
    if not file.is_file():
        raise ConfigurationError(
            f"{file} is no file: give JSON lines with a text each, as examples/collect_texts.py does"
        )
    training, testing, chats = [], [], []
    for number, entry in enumerate(_lines(file), 1):
        if isinstance(entry, dict) and "messages" in entry:
            chats.append(_messages(entry, f"{file}, line {number}"))
            continue
        text, split = (entry.get("text"), entry.get("split")) if isinstance(entry, dict) else (None, None)
        if not isinstance(text, str) or split not in (None, *SPLITS):
            raise ConfigurationError(
                f'{file}, line {number} must be {{"text": "...", "split": "train" or "held_out"}}, the split optional'
            )
        (testing if split == "held_out" or (split is None and number % 50 == 0) else training).append(text)
    if not training or not testing:
        lacking = "training" if not training else "evaluation"
        raise ConfigurationError(f'{file} has no text for {lacking}: give more texts, or a "split" of each')
    return Texts(tuple(training), tuple(testing), tuple(chats))


def _messages(entry: dict[str, Any], where: str) -> list[Any]:
    if "text" in entry or entry.get("split", "train") != "train" or not isinstance(entry["messages"], list):
        raise ConfigurationError(
            f'{where} must be {{"messages": [{{"role": "user", "content": "..."}}]}}, without a text and not held out: '
            "texts alone measure"
        )
    return entry["messages"]


def _lines(file: Path) -> Iterator[object]:
    with file.open(encoding="utf-8") as lines:
        try:
            yield from map(json.loads, lines)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{file} has a line that is no JSON: {error}") from None


def tokens_of(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of texts, one after the other, each behind the token that begins texts, if the model has one."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    parts = []
    for text in texts:
        parts.append(begin)
        for start in range(0, len(text), _PIECE):
            parts.append(tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def rows_of(tokens: np.ndarray, length: int) -> np.ndarray:
    """Rows [n, length] of consecutive tokens; what fills none at the end is left out."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def frequent_tokens(tokens: np.ndarray, vocab: int, count: int) -> np.ndarray:
    """The `count` ids [U] that occur most, ascending; of equals the smaller."""
    counts = np.bincount(tokens.reshape(-1), minlength=vocab)[:vocab]
    return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)
