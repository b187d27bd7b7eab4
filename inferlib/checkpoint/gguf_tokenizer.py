"""The tokenizer that a GGUF file's metadata describes.

A file has the vocabulary, the merges or scores, and the names of a tokenizer kind and of a way to cut text
into words; what those names mean is written down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from inferlib.checkpoint.source import CheckpointError
from inferlib.checkpoint.tokenizer_file import tokenizer_errors

# Token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies
# Tokens that end a turn of a chat, which older files do not declare.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# Special tokens of Phi-3 swallow the white space behind them, except these.
_PHI3_NO_STRIP = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class _Split:
    """How a byte-level vocabulary cuts text into words, by regular expressions applied one after the other.

    whole_words: a word that is a token is taken as it is, whatever the merges say.
    add_bos: for files that do not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False


_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
# Words in which capitals come first.
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_SYMBOLS}{_SPACES}"
_GPT4O = rf"{_LOWER_WORD}{_ENDINGS}?|{_UPPER_WORD}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SYMBOLS}{_SPACES}"

_LLAMA3_SPLIT = _Split((_LLAMA3,), whole_words=True, add_bos=True)
_DIGITS_SPLIT = _Split((r"\p{N}", _GPT2))
_SPLITS = {
    "gpt-2": _Split((_GPT2,)),
    "smollm": _DIGITS_SPLIT,
    "starcoder": _DIGITS_SPLIT,
    "refact": _DIGITS_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "dbrx": _Split((_LLAMA3,)),
    "qwen2": _Split((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _Split((_QWEN2,)),
    "tekken": _Split((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": _Split((_GPT4O,)),
}


class GGUFVocabulary:
    """The `tokenizer.ggml` keys of a GGUF file's metadata. Raises CheckpointError if they do not describe a
    tokenizer."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        architecture = metadata.get("general.architecture")
        self._architecture = architecture if isinstance(architecture, str) else ""
        self.tokens: list[str] = self._need("tokens", list)
        types = self.get("token_type", None, np.ndarray, list)
        self.types = [_NORMAL] * len(self.tokens) if types is None else list(types)
        if len(self.types) != len(self.tokens):
            raise CheckpointError(f"the GGUF file has {len(self.tokens)} tokens, {len(self.types)} token types")

    def get(self, key: str, default: Any = None, *kinds: type) -> Any:
        """A value of one of these types, by default a whole number."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not isinstance(value, kinds or int):
            names = " or ".join(kind.__name__ for kind in kinds or (int,))
            raise CheckpointError(
                f"the GGUF file's tokenizer.ggml.{key} must be of type {names}, it is a {type(value).__name__}"
            )
        return default if value is None else value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """The token id that `key` gives; None if the file lacks the key."""
        index = self.get(key, default)
        if index is not None and not 0 <= index < len(self.tokens):
            raise CheckpointError(f"the GGUF file's {key} is {index}, beyond its {len(self.tokens)} tokens")
        return index

    def token(self, key: str) -> str | None:
        """The token whose id `key` gives; None if the file lacks the key."""
        index = self.token_id(key)
        return None if index is None else self.tokens[index]

    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the declared ones and the usual ends of a turn."""
        declared = [self.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        control = (i for i, kind in enumerate(self.types) if kind == _CONTROL)
        turn_ends = [i for i in control if self.tokens[i] in _TURN_ENDS]
        return tuple(dict.fromkeys(i for i in declared + turn_ends if i is not None))

    def build(self) -> Tokenizer:
        kind = self._need("model", str)
        builders = {"gpt2": self._byte_level, "llama": self._sentence_piece}
        if kind not in builders:
            raise CheckpointError(f"GGUF tokenizer {kind!r} is not supported; known: {', '.join(builders)}")
        with tokenizer_errors("the GGUF file's tokenizer is damaged"):
            return builders[kind]()

    def _byte_level(self) -> Tokenizer:
        """Byte-level BPE: every byte is a printable character, words are joined by the file's merges."""
        name = self._need("pre", str)
        if name not in _SPLITS:
            raise CheckpointError(f"GGUF pre-tokenizer {name!r} is not supported; known: {', '.join(_SPLITS)}")
        split = _SPLITS[name]
        vocab = {token: i for i, token in enumerate(self.tokens)}
        merges = [tuple(merge.split(" ")) for merge in self._need("merges", list)]
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.whole_words))
        if split.nfc:
            tokenizer.normalizer = normalizers.NFC()
        words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        self._add_tokens(tokenizer, special=(_CONTROL,))
        self._add_template(tokenizer, split.add_bos)
        return tokenizer

    def _sentence_piece(self) -> Tokenizer:
        """SentencePiece: no words, the best-scored pair is joined first, unknown characters become bytes."""
        tokens, by_rank = self.tokens, range(len(self.tokens))
        if self._architecture.startswith("gemma"):
            # Runs of spaces are spelled out, and tokens were learned in the order of their ids, not scores.
            tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
        else:
            scores = self._need("scores", np.ndarray, list)
            if len(scores) != len(tokens):
                raise CheckpointError(f"the GGUF file has {len(tokens)} tokens, {len(scores)} scores")
            by_rank = sorted(by_rank, key=lambda i: -scores[i])
        vocab = {token: i for i, token in enumerate(tokens)}
        learned = (tokens[i] for i in by_rank if self.types[i] in (_NORMAL, _USER_DEFINED))
        lengths = {len(token) for token in tokens}  # without this, a token takes time quadratic in its length
        merges = [
            (token[:at], token[at:])
            for token in learned
            for at in range(1, len(token))
            if at in lengths and len(token) - at in lengths and token[:at] in vocab and token[at:] in vocab
        ]
        unknown = self.tokens[self.token_id("unknown_token_id", 0) or 0]
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        spaces = normalizers.Replace(" ", _SPACE)
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.get("add_space_prefix", True, bool):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
            tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        else:
            tokenizer.normalizer = spaces
            tokenizer.decoder = decoders.Sequence(steps)
        self._add_tokens(tokenizer, special=(_CONTROL, _UNKNOWN))
        self._add_template(tokenizer, add_bos=True)
        return tokenizer

    def _add_tokens(self, tokenizer: Tokenizer, special: tuple[int, ...]) -> None:
        """Tokens recognised in a text before it is cut; special ones are left out of decoded text."""
        kinds = list(zip(self.tokens, self.types, strict=True))
        phi3 = self._architecture == "phi3"
        tokenizer.add_special_tokens(
            [
                AddedToken(t, normalized=False, special=True, rstrip=phi3 and t not in _PHI3_NO_STRIP)
                for t, kind in kinds
                if kind in special
            ]
        )
        # The vocabulary spells runs of spaces in another way: merges make them.
        whole = [t for t, kind in kinds if kind == _USER_DEFINED and tokenizer.token_to_id(t) is not None]
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in whole])

    def _add_template(self, tokenizer: Tokenizer, add_bos: bool) -> None:
        before = self._edge("bos", add_bos)
        after = self._edge("eos", False)
        if before or after:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*(token for token, _ in before), "$A", *(token for token, _ in after)],
                special_tokens=before + after,
            )

    def _edge(self, name: str, default: bool) -> list[tuple[str, int]]:
        """The token put at an end of each text, if the file wants that."""
        token = self.token(f"{name}_token_id")
        wanted = self.get(f"add_{name}_token", default, bool)
        return [(token, self.get(f"{name}_token_id"))] if wanted and token is not None else []

    def _need(self, key: str, *kinds: type) -> Any:
        value = self.get(key, None, *kinds)
        if value is None:
            raise CheckpointError(f"the GGUF file lacks metadata key 'tokenizer.ggml.{key}'")
        return value
