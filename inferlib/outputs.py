"""What a generation returns; names follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Logprob:
    """logprob: natural logarithm of the probability; rank: 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated sequence.

    finish_reason: "stop" (stop token or string; `stop_reason` says which, None for end of sequence) or "length".
    logprobs: for each token, the asked-for alternatives and the token itself; cumulative_logprob: their sum.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestMetrics:
    """Seconds on a monotonic clock, and what follows from them.

    ttft: time to first token, waiting included; itl: mean time between a sequence's later tokens; None until known.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    generated: int = 0
    itl: float | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens over the time from arrival to the end."""
        if self.finished_time is None:
            return None
        return self.generated / max(self.finished_time - self.arrival_time, 1e-9)


@dataclass
class RequestOutput:
    """A prompt and what was generated for it.

    prompt: None if the prompt was given as token ids. prompt_logprobs: one entry per prompt token, None for the
    first.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    finished: bool = False
