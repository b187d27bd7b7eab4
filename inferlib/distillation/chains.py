"""How many tokens a verification gives, on texts that the target continued: the head drafts in chains, as it will in
the engine, and a draft stands if it is the token that the target chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ChainScore(NamedTuple):
    """verified: tokens that verifications gave; verifications: how many there were; drafted, stood: of the drafts, how
    many could stand, as those before them did, and how many did."""

    verified: int
    verifications: int
    drafted: int
    stood: int

    @property
    def tokens(self) -> float:
        """Tokens of a verification."""
        return self.verified / max(self.verifications, 1)

    @property
    def acceptance(self) -> float:
        """The share of drafts that stand, of those whose predecessors do."""
        return self.stood / max(self.drafted, 1)


def score(drafts: Sequence[np.ndarray], tokens: Sequence[np.ndarray], begin: Sequence[int]) -> ChainScore:
    """Follow each text from its beginning on, a verification at a time.

    drafts: of each text, [T, k] ids: the chain behind token t + 1, drafted from position t. tokens: of each text, [T].
    begin: how many tokens are the prompt. A prompt's last verification is left out if the text ends within it.
    """
    verified = verifications = drafted = stood = 0
    for chains, text, first in zip(drafts, tokens, begin, strict=True):
        last, size = first, chains.shape[1]  # the engine has the prompt's next token without a draft
        while last + 1 + size < len(text):
            agrees = chains[last - 1] == text[last + 1 : last + 1 + size]
            standing = int(np.argmin(agrees)) if not agrees.all() else size
            verified, verifications = verified + 1 + standing, verifications + 1
            drafted, stood = drafted + min(standing + 1, size), stood + standing
            last += 1 + standing
    return ChainScore(verified, verifications, drafted, stood)
