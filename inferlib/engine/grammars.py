"""Grammars that outputs follow, compiled by llguidance for the tokens of a model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from types import ModuleType
from typing import Any

from inferlib.config import ConfigurationError
from inferlib.engine.constraint import Constraint
from inferlib.sampling.structured import StructuredOutputs
from inferlib.tokenizer import Tokenizer

_CACHED = 32  # compiled grammars, some of which take megabytes


class Grammars:
    """Compiles grammars, each once while it is among the last that were asked for. Any thread may call it.

    vocab: how many tokens the model has.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], vocab: int):
        self.tokenizer, self._eos_ids, self._vocab = tokenizer, eos_ids, vocab
        self._compiled: OrderedDict[StructuredOutputs, Any] = OrderedDict()  # `LLMatcher`s
        self._lock = threading.Lock()
        self._tokens: Any = None  # the tokens as llguidance has them, `LLTokenizer`

    def check(self) -> None:
        """Raise ConfigurationError, which names the fix, if there can be no grammars."""
        _llguidance()
        if self.tokenizer is None:
            raise ConfigurationError(
                "structured_outputs need a tokenizer, and the model directory has no tokenizer.json: add it, or leave "
                "them out"
            )

    def constraint(self, wanted: StructuredOutputs) -> Constraint:
        """A constraint for one sequence, at its beginning. Takes about a millisecond, and up to a second the first time
        or for a large grammar. Raises ValueError if llguidance cannot use the grammar."""
        self.check()
        assert self.tokenizer is not None
        key = replace(wanted, after=None)
        with self._lock:
            compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(key)
        with self._lock:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            while len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        return Constraint(compiled.deep_copy(), self._tokens, self.tokenizer, wanted.after)

    def _compile(self, wanted: StructuredOutputs) -> Any:
        library = _llguidance()
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokens(library)
        where = f"structured_outputs.{wanted.kind}"
        try:
            if wanted.kind == "json":
                spaces = {"whitespace_pattern": wanted.whitespace}
                grammar = library.LLMatcher.grammar_from_json_schema(wanted.text, overrides=spaces)
            else:
                names = {"regex": "regex", "choice": "choice", "grammar": "ebnf"}
                grammar = library.grammar_from(names[wanted.kind], wanted.text)
        except ValueError as error:
            raise ValueError(f"{where}: {_explained(str(error))}") from None
        limits = library.LLParserLimits(verbose_errors=False)
        matcher = library.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # here and not in the engine's thread: the first one takes longest
        if matcher.is_error():
            raise ValueError(f"{where}: {_explained(matcher.get_error())}")
        return matcher

    def _read_tokens(self, library: ModuleType) -> Any:
        assert self.tokenizer is not None
        size = max(self._vocab, self.tokenizer.vocab_size)
        ends = [token for token in self._eos_ids if token < size]
        try:
            return library.LLTokenizer(self.tokenizer.to_json(), size, ends or None)
        except (ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"llguidance cannot use this model's tokenizer, so leave structured_outputs out: {error}"
            ) from None


def _explained(error: str) -> str:
    """An error of llguidance on one line, with the fix."""
    text = " ".join(error.split())
    if text.startswith("Unimplemented keys"):
        return f"{text}: llguidance does not follow these keywords, so leave them out"
    if text.startswith("Unknown format"):
        return f"{text}: leave it out, or give a pattern"
    if text.startswith("Unsatisfiable schema"):
        return f"{text}: no value fits it, so correct it"
    if "look-around" in text:
        return f"{text}; write the expression without (?=, (?!, (?<= and (?<!"
    return f"{text}; correct it"


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise ConfigurationError("structured_outputs need llguidance: pip install 'inferlib[structured]'") from None
    return llguidance
