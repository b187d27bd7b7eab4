"""Grammars that outputs follow, compiled by llguidance for the tokens of a model."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from inferlib.engine.constraint import Constraint
from inferlib.option_checks import ConfigurationError
from inferlib.sampling.structured import StructuredOutputs
from inferlib.tokenizer import Tokenizer

_CACHED = 32  # compiled grammars, some of which take megabytes
_MATCHERS = 16  # most matchers of a grammar
_QUICK = 0.05  # seconds; what takes longer to compile is compiled once


@dataclass
class _Matcher:
    """A compiled grammar at its beginning, and the sequences that follow copies of it.

    matcher: an `LLMatcher`. Its copies share a lexer and its lock, so only one of them makes a mask at a time.
    """

    matcher: Any
    users: weakref.WeakSet[Constraint] = field(default_factory=weakref.WeakSet)


@dataclass
class _Compiled:
    """The matchers of a grammar. quick: compiling another one takes little time."""

    matchers: list[_Matcher]
    quick: bool

    def least_used(self) -> _Matcher:
        return min(self.matchers, key=lambda x: len(x.users))

    @property
    def wants_more(self) -> bool:
        """True if a further sequence should get a matcher of its own, to make its masks beside the others'."""
        most = min(_MATCHERS, os.cpu_count() or 1)
        return self.quick and len(self.matchers) < most and len(self.least_used().users) > 0


class Grammars:
    """Compiles grammars, each once while it is among the last that were asked for. Any thread may call it.

    vocab: how many tokens the model has.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], vocab: int):
        self.tokenizer, self._eos_ids, self._vocab = tokenizer, eos_ids, vocab
        self._compiled: OrderedDict[StructuredOutputs, _Compiled] = OrderedDict()
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
            if self._tokens is None:
                self._tokens = self._read_tokens(_llguidance())
            compiled = self._compiled.get(key)
            more = compiled is None or compiled.wants_more
        if more:
            start = time.perf_counter()
            another = _Matcher(self._compile(key))
            quick = time.perf_counter() - start < _QUICK
        with self._lock:
            compiled = self._compiled.setdefault(key, _Compiled([], quick=False))
            if more:
                compiled.matchers.append(another)
                compiled.quick = quick
            self._compiled.move_to_end(key)
            while len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            chosen = compiled.least_used()
            constraint = Constraint(chosen.matcher.deep_copy(), self._tokens, self.tokenizer, wanted.after)
            chosen.users.add(constraint)
        return constraint

    def _compile(self, wanted: StructuredOutputs) -> Any:
        library = _llguidance()
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
