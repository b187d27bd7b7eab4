"""What a planner takes for granted of speculative decoding: how many drafts stand, and what makes them."""

from __future__ import annotations

from dataclasses import dataclass

from inferlib.config import check_draft
from inferlib.models.config import ModelConfig
from inferlib.models.eagle3 import Eagle3Config
from inferlib.option_checks import ConfigurationError, brief
from inferlib.speculation.settings import Speculation


@dataclass(frozen=True)
class Drafts:
    """Drafts that decode steps may verify.

    speculation: its `counts` are what a step may draft. acceptance: the share of drafts that stand, of those whose
    predecessors do. model: what drafts, if a model does; head: an EAGLE-3 head. These, and a model's own layer for
    further tokens, run on the same mesh, in the number formats of the model that they draft for, one step for each
    draft, of which the first runs the tokens since the last draft, too. Other drafts take no time.

    Raises ConfigurationError for an acceptance that is no share, and for a model or head that is missing or does not
    draft.
    """

    speculation: Speculation
    acceptance: float
    model: ModelConfig | None = None
    head: Eagle3Config | None = None

    def __post_init__(self):
        if not isinstance(self.acceptance, int | float) or not 0 <= self.acceptance <= 1:
            raise ConfigurationError(
                f"acceptance is a share of drafts from 0 to 1, such as 0.7, got {brief(self.acceptance)}"
            )

        for name, what, method in (("model", self.model, "draft"), ("head", self.head, "eagle3")):
            if (what is not None) != (self.speculation.method == method):
                need = f"have no {name}" if what is not None else f"need a {name}"
                raise ConfigurationError(
                    f"drafts of {self.speculation} {need}: give a {name} with Speculation({method!r}), and none with "
                    "others"
                )

    def check(self, target: ModelConfig) -> None:
        """Raise ConfigurationError if the model cannot draft for a target."""
        if self.model is not None:
            check_draft(self.model, target)

    @staticmethod
    def of(
        chosen: Speculation | None,
        acceptance: float | None,
        model: ModelConfig | None = None,
        head: Eagle3Config | None = None,
    ) -> Drafts | None:
        """The drafts that two options ask for. model, head: the model or head that drafts, if one does.

        Raises ConfigurationError.
        """
        if chosen is None:
            if acceptance is not None:
                raise ConfigurationError("acceptance is about drafts: give speculation too, such as ngram:3")
            return None
        if acceptance is None:
            raise ConfigurationError(
                f"a plan with {chosen} needs acceptance, the share of drafts that stand: such as 0.7"
            )
        return Drafts(chosen, acceptance, model, head)

    def tokens(self, count: int) -> float:
        """Tokens that a row gets of a step with `count` drafts, on average (Leviathan et al. 2023, equation 1)."""
        return sum(self.acceptance**i for i in range(count + 1))
