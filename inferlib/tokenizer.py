"""Text to token ids and back: from a Hugging Face directory or from a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from inferlib.chat import ChatTemplate
from inferlib.checkpoint.gguf_tokenizer import GGUFVocabulary
from inferlib.checkpoint.source import CheckpointError, read_json, size_of
from inferlib.checkpoint.tokenizer_file import read_tokenizer, tokenizer_errors
from inferlib.option_checks import brief

_MOST_ID = (1 << 31) - 1
_REPLACEMENT = "\ufffd"  # what decoders put for bytes that are not UTF-8


class TokenizerError(ValueError):
    """A text or tokens that the tokenizer of a checkpoint fails on."""


class Tokenizer:
    """A `tokenizers.Tokenizer` with the ids and the chat template that generation needs.

    bos_token_id: None if there is none. eos_token_ids: tokens that end an answer, maybe none.
    chat_template: None if the model has none.
    """

    # What `from_directory` reads beside config.json.
    FILES = (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "chat_template.json",
    )

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self._backend = backend
        self._special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._bytes = frozenset(backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)) - {None}

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of tokenizer.json and the configuration files beside it.

        Raises CheckpointError if tokenizer.json is missing or a file is damaged.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{file} is missing; without it prompts must be lists of token ids")
        backend = read_tokenizer(file)
        settings = _read_json(directory / "tokenizer_config.json")
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json")
        bos, eos = (_content(directory, settings, name) for name in ("bos_token", "eos_token"))
        # Without a tokenizer_config.json the model's own configuration is the next best.
        bos_id = next(iter(_ids(config.get("bos_token_id"))), None)
        if settings:
            bos_id = backend.token_to_id(bos) if bos else None
        # Models end answers with tokens that only one of the files knows.
        ends = (generation.get("eos_token_id"), config.get("eos_token_id"), eos and backend.token_to_id(eos))
        source = _template_source(directory, settings)
        return cls(
            backend,
            bos_token_id=bos_id,
            eos_token_ids=tuple(dict.fromkeys(token for end in ends for token in _ids(end))),
            chat_template=ChatTemplate(source, bos, eos) if source else None,
        )

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of the key-value pairs of a GGUF file.

        Raises CheckpointError if keys are missing or the kind of tokenizer is not supported.
        """
        vocabulary = GGUFVocabulary(metadata)
        source = metadata.get("tokenizer.chat_template")
        if not isinstance(source, str | None):
            raise CheckpointError("the GGUF file's tokenizer.chat_template must be text")
        bos, eos = vocabulary.token("bos_token_id"), vocabulary.token("eos_token_id")
        return cls(
            vocabulary.build(),
            bos_token_id=vocabulary.token_id("bos_token_id"),
            eos_token_ids=vocabulary.eos_token_ids(),
            chat_template=ChatTemplate(source, bos, eos) if source else None,
        )

    def save(self, directory: Path) -> None:
        """Write what `from_directory` reads."""
        self._backend.save(str(directory / "tokenizer.json"))
        settings = {"eos_token": next(map(self._backend.id_to_token, self.eos_token_ids), None)}
        if self.bos_token_id is not None:
            settings["bos_token"] = self._backend.id_to_token(self.bos_token_id)
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template.source
        _write_json(directory / "tokenizer_config.json", settings)
        _write_json(directory / "generation_config.json", {"eos_token_id": list(self.eos_token_ids)})

    def to_json(self) -> str:
        """What tokenizer.json has."""
        return self._backend.to_str()

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def knows(self, token_id: int) -> bool:
        """Whether the id is in the vocabulary; models may have more rows than that."""
        return self._backend.id_to_token(token_id) is not None

    def is_special(self, token: str) -> bool:
        """Whether this is the text of a special token, which decoding can leave out."""
        return self._backend.token_to_id(token) in self._special

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in it are recognised.

        add_special_tokens: also add those the model expects around a text, such as BOS.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}")
        try:
            with tokenizer_errors("the tokenizer cannot encode this text", TokenizerError):
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TokenizerError:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("text holds a lone surrogate, which UTF-8 cannot express; remove it") from None
            raise

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        with tokenizer_errors("the tokenizer cannot decode these tokens", TokenizerError):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)


class TextStream:
    """The text of a growing list of tokens, in pieces; joined, they equal `Tokenizer.decode` of all tokens.

    A piece never ends inside a character: what later tokens may still complete is held back. Where single
    bytes are tokens, a run of them is held back until it ends, since one wrong byte spoils its whole run.
    The cost of a token does not depend on how many came before.
    """

    # Tokens that the next ones are decoded with. One shows that the text goes on, since some decoders strip
    # the space of the first word; three hold the beginning of an unfinished character.
    _CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._run: list[int] = []  # byte tokens behind the window
        self._sent = 0  # characters of the window's text that were returned

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens, after all earlier ones, complete; often empty."""
        before = len(self._window)
        for token in token_ids:
            if token in self._skipped or not self._tokenizer.knows(token):
                continue
            self._run.append(token)
            if token not in self._tokenizer._bytes:
                self._window += self._run
                self._run = []
        if len(self._window) == before:
            return ""
        text = self._decode(self._window)
        piece = text[self._sent : _complete(text)]
        self._window = self._window[-self._CONTEXT :]
        self._sent = _complete(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """What was held back. The stream is empty again afterwards."""
        piece = self._decode(self._window + self._run)[self._sent :]
        self._window, self._run, self._sent = [], [], 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _complete(text: str) -> int:
    """Characters of `text` that later bytes cannot change: all but a last one that may be unfinished."""
    return len(text) - text.endswith(_REPLACEMENT)


# Hugging Face directories


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _content(directory: Path, settings: Mapping[str, Any], name: str) -> str | None:
    """A token of tokenizer_config.json, in either form."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(token, str | None):
        raise CheckpointError(f"{name} in {directory / 'tokenizer_config.json'} must be text, it is {brief(token)}")
    return token


def _ids(value: Any) -> list[int]:
    """Token ids as configurations have them: nothing, one or a list; negative ones stand for nothing."""
    ids = value if isinstance(value, list) else [value]
    if odd := [token for token in ids if token is not None and (type(token) is not int or token > _MOST_ID)]:
        raise CheckpointError(f"token ids must be whole numbers, and configuration files have {brief(odd[0])}")
    return [token for token in ids if token is not None and token >= 0]


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template, where newer and older checkpoints keep it."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return _read_text(file)
    template = _read_json(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, Mapping)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise CheckpointError(f"the chat_template of {directory} must be text, it is {brief(template)}")
    return template


def _read_text(file: Path) -> str:
    size_of(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8: {error}") from None
