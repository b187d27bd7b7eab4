"""The grammar of one sequence, and how far its output has come in it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from inferlib.sampling.sampler import mask_words
from inferlib.sampling.structured import StructuredOutputError
from inferlib.tokenizer import Tokenizer


class Constraint:
    """Follows the tokens of a sequence through its grammar.

    matcher: an `LLMatcher` at the beginning, of this sequence alone. tokens: its `LLTokenizer`. after: the text up to
    which the output is free, or None. ends: the tokens that end the grammar.
    """

    def __init__(self, matcher: Any, tokens: Any, tokenizer: Tokenizer, after: str | None):
        self.matcher, self.ends, self.words = matcher, tuple(tokens.eos_tokens), mask_words(tokens.vocab_size)
        self._tokenizer, self._after = tokenizer, after
        self._tail: list[int] = []  # the last tokens of the free part

    @property
    def free(self) -> bool:
        """True as long as the grammar has not begun."""
        return self._after is not None

    def accept(self, token: int) -> None:
        """Go on by a token that was chosen. Raises StructuredOutputError if the grammar does not have it."""
        if self._after is None:
            if not self.matcher.consume_token(token):
                raise StructuredOutputError(
                    f"token {token} does not follow the grammar of structured_outputs: allowed_token_ids, bad_words, "
                    "min_tokens, logit_bias or logits_processors leave none of the tokens that do"
                )
            return
        self._tail = [*self._tail, token][-len(self._after.encode()) :]
        if self._after in self._tokenizer.decode(self._tail, skip_special_tokens=False):
            self._after, self._tail = None, []

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves one alone."""
        return [] if self.free else self.matcher.compute_ff_tokens()

    def fitting(self, tokens: list[int]) -> list[int]:
        """The first of these tokens, as many as may follow one after the other."""
        return tokens[: self.matcher.validate_tokens(tokens)] if tokens and not self.free else []

    def check(self) -> None:
        """Raise StructuredOutputError if the grammar became too complex to follow, or leads nowhere."""
        if self.matcher.is_error():
            raise StructuredOutputError(
                f"llguidance cannot follow the grammar of structured_outputs any further: {self.matcher.get_error()}"
            )

    def without_ends(self, mask: np.ndarray) -> bool:
        """Take the ends of the grammar out of a mask [W]. Returns whether it has another token."""
        words = mask.view(np.uint32)
        for token in self.ends:
            if token // 32 < len(words):
                words[token // 32] &= ~np.uint32(1 << token % 32)
        return bool(words.any())


class Asked(NamedTuple):
    """The masks that a sequence needs: one at row `at` of a mask, and one behind each draft in the rows that follow."""

    constraint: Constraint
    at: int
    drafts: list[int]


def fill(asked: list[Asked], mask: np.ndarray) -> None:
    """Write the tokens that follow in these grammars to their rows of a mask [N, W], in several threads."""
    if not asked:
        return
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    words = asked[0].constraint.words  # all are of one tokenizer
    whole = mask if words == mask.shape[1] else np.zeros((len(mask), words), np.int32)
    if without := [(x.constraint.matcher, x.at) for x in asked if not x.drafts]:
        fill_next_token_bitmask_par(_threads(), without, whole)
    if with_drafts := [(x.constraint.matcher, x.at, x.drafts) for x in asked if x.drafts]:
        fill_next_token_bitmask_par_with_draft_tokens(_threads(), with_drafts, whole)
    if whole is not mask:  # a tokenizer may have more tokens than the model
        rows = [row for one in asked for row in range(one.at, one.at + 1 + len(one.drafts))]
        mask[rows] = whole[rows, : mask.shape[1]]


@cache
def _threads() -> Any:
    import llguidance

    return llguidance.LLExecutor()
