"""What a user decides about speculative decoding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from inferlib.speculation.ngram import NgramDrafter

MOST_DRAFTS = 15


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens. It must be hashable, and equal to another only if both guess alike."""

    def propose(self, history: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        """The next `count` tokens of each of B rows: int32 [B, count], -1 where it has none. Traced into programs.

        history [B, M] int32: the tokens of a row from its first on, of which lengths [B] count; what is behind them,
        and in rows that do not run, is anything. A wrong guess, out of the vocabulary even, changes no result.
        """
        ...


_DRAFTERS: Mapping[str, Drafter] = {"ngram": NgramDrafter()}


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: tokens are drafted, and one step verifies them all (Leviathan et al., ICML 2023).

    method: "ngram", which looks for the end of a row among its own tokens, or a `Drafter`.
    tokens: most tokens that are drafted for a step, 1 to 15. Programs for fewer are compiled too: see `counts`.

    Raises ValueError for others.
    """

    method: str | Drafter = "ngram"
    tokens: int = 3

    def __post_init__(self):
        if isinstance(self.method, str):
            if self.method not in _DRAFTERS:
                raise ValueError(f"speculation has the methods {', '.join(_DRAFTERS)}, got {self.method[:100]!r}")
        elif isinstance(self.method, type) or not isinstance(self.method, Drafter):
            raise ValueError(f"the method of speculation is 'ngram' or a Drafter, got {self.method!r:.100}")
        if type(self.tokens) is not int or not 1 <= self.tokens <= MOST_DRAFTS:
            raise ValueError(f"speculation drafts 1 to {MOST_DRAFTS} tokens, got {self.tokens!r:.100}")

    @staticmethod
    def read(value: Any) -> Speculation | None:
        """Of an option: a `Speculation`, text such as "ngram:3", or None. Raises ValueError."""
        if value is None or isinstance(value, Speculation):
            return value
        parts = re.fullmatch(r"([a-z]+)(?::(\d{1,4}))?", value) if isinstance(value, str) else None
        if parts is None:
            raise ValueError(f"speculation is Speculation(...) or text such as 'ngram:3', got {value!r:.100}")
        return Speculation(parts[1], *([int(parts[2])] if parts[2] else []))

    def __str__(self) -> str:
        return f"{self.method}:{self.tokens}"

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tokens a step may draft, ascending: with the one before them they are powers of two, or all."""
        return (*(n for n in (1, 3, 7) if n < self.tokens), self.tokens)

    @property
    def drafter(self) -> Drafter:
        return _DRAFTERS[self.method] if isinstance(self.method, str) else self.method
