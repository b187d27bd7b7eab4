"""Texts as tokens: a byte-level BPE tokenizer trained on them, and the rows that models learn from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from inferlib.distillation.texts import read_texts, rows_of, tokens_of
from inferlib.option_checks import ConfigurationError
from inferlib.tokenizer import Tokenizer

BEGIN = "<|text|>"  # stands before every text, and so ends the one before


class Data(NamedTuple):
    """rows, held_out [n, T + 1] int32: what to learn from and to measure with; the last token of a row is only
    predicted."""

    tokenizer: Tokenizer
    rows: np.ndarray
    held_out: np.ndarray


def prepare(texts: Path, folder: Path, vocab: int, length: int) -> Data:
    """The rows of `length` tokens of a file of texts (see `read_texts`), and a tokenizer of at most `vocab` tokens that
    is trained on those to learn from. Both are in `folder` afterwards, and taken from there the next time.

    Raises ConfigurationError if the texts are too few.
    """
    file = folder / "tokens.npz"
    if not file.exists():
        read = read_texts(texts)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(read.training, vocab)
        tokenizer.save(folder)
        parts = [tokens_of(part, tokenizer) for part in (read.training, read.testing)]
        partial = file.with_name("partial.npz")
        np.savez(partial, train=parts[0], held_out=parts[1])
        partial.replace(file)
    with np.load(file) as arrays:
        rows, held_out = (rows_of(arrays[name], length + 1) for name in ("train", "held_out"))
    if not len(rows) or not len(held_out):
        raise ConfigurationError(f"{texts} has too little text for rows of {length} tokens: give more")
    return Data(Tokenizer.from_directory(folder), rows, held_out)


def train_tokenizer(texts: tuple[str, ...], vocab: int) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BEGIN], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, bos_token_id=0, eos_token_ids=(0,))  # special tokens are the first
