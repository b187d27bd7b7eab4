"""The byte-level tokenizer of the tiny models."""

from __future__ import annotations

from pathlib import Path

import tokenizers

VOCAB = 131


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of VOCAB tokens: 3 special, ASCII, some pairs of letters, the bytes of "é"."""
    letters = ["Ġ", *(chr(code) for code in range(33, 127)), "Ã", "©"]
    pairs = [(a, b) for a in "aeiour" for b in "nstlm"] + [("t", "h")]
    vocab = ["<unk>", "<s>", "</s>", *letters, *(a + b for a, b in pairs)]
    assert len(vocab) == VOCAB
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(vocab)}, pairs, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
