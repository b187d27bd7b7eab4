"""Beam search: the most likely continuations of a prompt, several at a time.

As transformers' `generate(num_beams=...)` does it, with its scores and its end; names of parameters are vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from inferlib.sampling.checks import check_bool, check_float, check_int
from inferlib.sampling.params import MAX_LOGPROBS


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search. Every field is checked on construction: a `ValueError` names what is allowed.

    Attributes:
        beam_width: continuations that are followed, and returned, at most 20; without `ignore_eos` fewer by the
            number of the model's end-of-sequence tokens.
        max_tokens: most tokens of a continuation.
        ignore_eos: go on past the end-of-sequence tokens.
        length_penalty: in [-100, 100]. A score is the sum of the log-probabilities of a continuation's tokens over
            their number to this power: above 0 favours long ones. vLLM also counts the prompt's tokens.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self):
        check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_float("length_penalty", self.length_penalty, -100.0, 100.0)


@dataclass(frozen=True)
class Beam:
    """A continuation. logprob: the sum over its tokens."""

    tokens: tuple[int, ...]
    logprob: float


class BeamSearch:
    """The search for one prompt. Whoever runs the model gives `extend` the next tokens of the `running` beams, until
    there are none; `finished` has the results then, best first.

    eos_ids: tokens that end a continuation.
    """

    def __init__(self, params: BeamSearchParams, eos_ids: Collection[int]):
        self.params, self.eos_ids = params, frozenset() if params.ignore_eos else frozenset(eos_ids)
        self.running, self.finished = [Beam((), 0.0)], []
        if self.candidates > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width must be at most {MAX_LOGPROBS - len(self.eos_ids)} for this model's {len(self.eos_ids)} "
                f"end-of-sequence tokens, got {params.beam_width}: lower it, or set ignore_eos"
            )

    @property
    def candidates(self) -> int:
        """How many of the most likely tokens of each beam can matter: `beam_width` that do not end it."""
        return self.params.beam_width + len(self.eos_ids)

    def score(self, beam: Beam) -> float:
        return beam.logprob / len(beam.tokens) ** self.params.length_penalty

    def ends(self, beam: Beam) -> bool:
        return len(beam.tokens) >= self.params.max_tokens or beam.tokens[-1] in self.eos_ids

    def extend(self, following: Iterable[Iterable[tuple[int, float]]]) -> None:
        """Follow the best continuations. following: the most likely tokens of each running beam, with their
        log-probabilities.

        Those that end are finished if they are among the best `beam_width` of all. The search ends once that many are
        finished, and the best that runs scores no more than the worst of them.
        """
        width = self.params.beam_width
        pairs = zip(self.running, following, strict=True)
        extended = [Beam((*b.tokens, token), b.logprob + logprob) for b, tokens in pairs for token, logprob in tokens]
        extended.sort(key=lambda beam: -beam.logprob)
        self.finished += [beam for beam in extended[:width] if self.ends(beam)]
        self.finished = sorted(self.finished, key=lambda beam: -self.score(beam))[:width]
        self.running = [beam for beam in extended if not self.ends(beam)][:width]
        full = len(self.finished) == width
        if full and self.running and self.score(self.running[0]) <= self.score(self.finished[-1]):
            self.running = []
