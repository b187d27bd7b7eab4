"""tokenizer.json, for the `tokenizers` package: its errors as ours, and what would end the process refused before.

The package is written in Rust. A panic there is an exception that `except Exception` does not catch, and some panics
abort the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from inferlib.checkpoint.source import CheckpointError, size_of

_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
# Letters that are written as escapes, as no serialiser does, might hide the name.
_HIDDEN = re.compile(rb"\\u00[567]", re.IGNORECASE)


@contextmanager
def tokenizer_errors(problem: str, kind: type[Exception] = CheckpointError) -> Iterator[None]:
    """Raise what the package raises within, panics included, as an error of ours that begins with `problem`."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{problem}: {error}") from None


def read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json. Raises CheckpointError if it is damaged or not supported."""
    size_of(file)
    text = file.read_bytes()
    if _PREFIX.search(text) or _HIDDEN.search(text):
        _must_keep_prefixes(file, text)
    with tokenizer_errors(f"{file} is damaged or newer than the tokenizers package"):
        return tokenizers.Tokenizer.from_buffer(text)


def _must_keep_prefixes(file: Path, text: bytes) -> None:
    """Raise CheckpointError if a merge's second part lacks the prefix of subwords, which the package cuts off
    unseen: that aborts the process where it cuts a character in two (tokenizers 0.23)."""
    try:
        model: Any = json.loads(text).get("model")
    except (ValueError, AttributeError, RecursionError):
        return  # the package says so
    if not isinstance(model, Mapping) or not isinstance(prefix := model.get("continuing_subword_prefix"), str):
        return
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[-1] if isinstance(parts, list) and parts else None
        if not isinstance(second, str) or not second.startswith(prefix):
            raise CheckpointError(
                f"{file} is damaged: its merge {merge!r} joins a token without its continuing_subword_prefix {prefix!r}"
            )
