"""Results of generation; names follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "deadline", "abort"]


@dataclass(frozen=True)
class Logprob:
    """logprob: natural logarithm of the probability. rank: 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated sequence.

    finish_reason: "stop", "length", "deadline", or "abort" if `AsyncLLM.abort` ended it; None while it is generated.
    stop_reason: the stop token or stop string, None for the end of sequence.
    logprobs: for each token, the log-probabilities of the token itself and of the alternatives that were asked for.
    cumulative_logprob: sum over the tokens of their log-probabilities.
    depths: of a looped model with `early_exit`, for each token how many steps of its core were taken to choose it.
        None of other models.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    depths: list[int] | None = None


@dataclass
class RequestMetrics:
    """When a request arrived and was answered, in seconds of a monotonic clock that stands still while programs are
    compiled: `LLM.stats.compile_seconds` counts that time.

    generated: tokens of all outputs. ttft: time to the first token, including the wait for a row. itl: mean time
    between the tokens of a sequence after its first. Times are None while they are unknown.
    """

    arrival_time: float = 0.0
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
    """A prompt and the outputs generated for it.

    prompt: None if the prompt came as token ids. prompt_logprobs: one entry per prompt token; the first is None. None
    if a deadline passed before the prompt was read.
    request_id: the id that `AsyncLLM` was given, if it was given one; else a number. finished: False if more follows.
    num_cached_tokens: how many of the prompt's tokens were in the cache when the first output began.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = False
    num_cached_tokens: int | None = None


@dataclass(frozen=True)
class BeamSearchSequence:
    """A prompt with a continuation that beam search returned.

    tokens, text: those of the prompt and the continuation; the text has no special tokens, and is "" if there is no
    tokenizer. cum_logprob: sum of the log-probabilities of the continuation's tokens. score: this sum over a power of
    the length, see `BeamSearchParams`. finish_reason: "stop" or "length". stop_reason: the token that ended it.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The continuations of one prompt, the best first."""

    sequences: list[BeamSearchSequence]
