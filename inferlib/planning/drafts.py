"""What a planner takes for granted of speculative decoding: how many drafts stand, and what makes them."""

from __future__ import annotations

from dataclasses import dataclass

from inferlib.config import ConfigurationError, brief, speculation_option
from inferlib.models.config import ModelConfig
from inferlib.speculation.settings import Speculation


@dataclass(frozen=True)
class Drafts:
    """Drafts that decode steps may verify.

    speculation: its `counts` are what a step may draft. acceptance: the share of drafts that stand, of those whose
    predecessors do. model: runs on the same mesh, in the number formats of the model that it drafts for, one step for
    each draft; None: drafts take no time, as those of n-grams.

    Raises ConfigurationError for an acceptance that is no share.
    """

    speculation: Speculation
    acceptance: float
    model: ModelConfig | None = None

    def __post_init__(self):
        if not isinstance(self.acceptance, int | float) or not 0 <= self.acceptance <= 1:
            raise ConfigurationError(
                f"acceptance is a share of drafts from 0 to 1, such as 0.7, got {brief(self.acceptance)}"
            )

    @staticmethod
    def of(speculation: str | None, acceptance: float | None) -> Drafts | None:
        """Of two options, of which speculation is text such as "ngram:3". Raises ConfigurationError."""
        chosen = speculation_option(speculation)
        if chosen is None:
            if acceptance is not None:
                raise ConfigurationError("acceptance is about drafts: give speculation too, such as ngram:3")
            return None
        if acceptance is None:
            raise ConfigurationError(
                f"a plan with {chosen} needs acceptance, the share of drafts that stand: such as 0.7"
            )
        return Drafts(chosen, acceptance)

    def tokens(self, count: int) -> float:
        """Tokens that a row gets of a step with so many drafts, on average (Leviathan et al. 2023, equation 1)."""
        return sum(self.acceptance**i for i in range(count + 1))
