"""What a user decides about speculative decoding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlib.ops.option_text import read_option
from inferlib.speculation.drafter import Drafter
from inferlib.speculation.ngram import NgramDrafter

MOST_DRAFTS = 15
_DRAFTERS: Mapping[str, Drafter] = {"ngram": NgramDrafter()}
_WITH_FILES = ("draft", "eagle3")  # methods that need files of their own
_BY_MODEL = (*_WITH_FILES, "mtp")  # methods by which layers draft
METHODS = (*_DRAFTERS, *_BY_MODEL)
_TEXT = re.compile(r"([a-z0-9]+)(?::(?!\d+$)(.+?))?(?::(\d{1,4}))?", re.DOTALL)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: tokens are drafted, and one step verifies them all (Leviathan et al., ICML 2023).

    method: "ngram", which looks for the end of a row among its own tokens; "draft", a smaller model of the same
        vocabulary; "eagle3", a head that reads the model's hidden states; "mtp", the layer for further tokens that
        the model's own checkpoint has (DeepSeek-V3, Qwen3-Next); or a `Drafter`.
    tokens: most tokens that are drafted for a step, 1 to 15. Programs for fewer are compiled too: see `counts`.
    model: of "draft": a model as for `LLM`; of "eagle3": the head's directory.

    Raises ValueError for others.
    """

    method: str | Drafter = "ngram"
    tokens: int = 3
    model: str | Path | None = None

    def __post_init__(self):
        if isinstance(self.method, str):
            if self.method not in METHODS:
                raise ValueError(f"speculation has the methods {', '.join(METHODS)}, got {self.method[:100]!r}")
        elif isinstance(self.method, type) or not isinstance(self.method, Drafter):
            raise ValueError(f"the method of speculation is 'ngram' or a Drafter, got {self.method!r:.100}")
        if type(self.tokens) is not int or not 1 <= self.tokens <= MOST_DRAFTS:
            raise ValueError(f"speculation drafts 1 to {MOST_DRAFTS} tokens, got {self.tokens!r:.100}")
        self._check_model()

    def _check_model(self) -> None:
        if self.method not in _WITH_FILES:
            if self.model is not None:
                raise ValueError(
                    f"speculation by {self.method!r:.100} takes no model: leave {str(self.model)!r:.100} out"
                )
            return
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ValueError(
                f"speculation by {self.method!r} needs a model, such as '{self.method}:NAME:4' or "
                f"Speculation({self.method!r}, model=NAME), got {self.model!r:.100}"
            )
        object.__setattr__(self, "model", str(self.model))

    @staticmethod
    def read(value: Any) -> Speculation | None:
        """The speculation that an option stands for: a `Speculation`, text such as "ngram:3", "draft:NAME:3" or
        "eagle3:DIR:3", or None. Raises ValueError for anything else."""
        usage = "speculation is Speculation(...) or text such as 'ngram:3' or 'draft:NAME:3'"
        make = lambda x: Speculation(x[1], *([int(x[3])] if x[3] else []), model=x[2])  # noqa: E731
        return read_option(value, Speculation, _TEXT, make, usage)

    def __str__(self) -> str:
        return ":".join(str(x) for x in (self.method, self.model, self.tokens) if x is not None)

    @property
    def by_model(self) -> bool:
        """True if a model, or a layer of one, drafts."""
        return self.method in _BY_MODEL

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tokens a step may draft, ascending: with the one before them they are powers of two, or all."""
        return (*(n for n in (1, 3, 7) if n < self.tokens), self.tokens)

    @property
    def drafter(self) -> Drafter:
        """What drafts, if no model does."""
        return _DRAFTERS[self.method] if isinstance(self.method, str) else self.method
