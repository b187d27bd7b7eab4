"""A user's request: the sequences that the engine runs for it, and their results as users read them."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from inferlib.engine.sequence import Sequence, Status, TokenLogprobs
from inferlib.engine.text import OutputText
from inferlib.outputs import BeamSearchSequence, CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from inferlib.sampling.beam_search import Beam, BeamSearch
from inferlib.sampling.logits_processors import LogitsProcessorError
from inferlib.sampling.params import SamplingParams
from inferlib.sampling.structured import StructuredOutputError
from inferlib.tokenizer import Tokenizer


class Progress(NamedTuple):
    """How far a sequence is: tokens that it has, and characters of its text that can no longer change. Those that it
    gets later are behind these, so a reader in another thread may take its time."""

    tokens: int
    characters: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(eq=False)
class Request:
    """A validated prompt and its `params.n` sequences, each with its text."""

    id: int | str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    texts: list[OutputText]
    _started: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def start(self) -> bool:
        """True the first time, in any thread: a request runs once."""
        return self._started.acquire(blocking=False)

    def check(self) -> None:
        """Raise RuntimeError if an error lost results of its sequences, or their `failure`."""
        if self.failure is not None:
            raise self.failure
        for s in self.sequences:
            if s.error is not None:
                raise RuntimeError(f"an earlier error lost the results of this request: {s.error!r}") from s.error

    @property
    def failure(self) -> RuntimeError | None:
        """The LogitsProcessorError of its functions, or the StructuredOutputError of its grammar, if there is one."""
        errors = (s.error for s in self.sequences)
        return next((e for e in errors if isinstance(e, LogitsProcessorError | StructuredOutputError)), None)

    @property
    def finished(self) -> bool:
        return all(s.status is Status.FINISHED for s in self.sequences)

    def progress(self) -> tuple[Progress, ...]:
        """How far each sequence is. To be called where the engine runs, or once the request is finished."""
        pairs = zip(self.sequences, self.texts, strict=True)
        return tuple(
            Progress(len(s.tokens), text.final_characters, s.finish_reason, s.stop_reason) for s, text in pairs
        )


def request_output(request: Request, tokenizer: Tokenizer | None) -> RequestOutput:
    """The result of a finished request. Without a tokenizer it has no texts."""
    return Outputs(request, tokenizer).at(request.progress())


class Outputs:
    """The results of a request as far as it is, each of which has all that the one before it had."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request, self.tokenizer = request, tokenizer
        self._logprobs: list[list[dict[int, Logprob]]] = [[] for _ in request.sequences]  # made so far

    def at(self, progress: Sequences[Progress]) -> RequestOutput:
        """The result at this progress. It has the prompt's log-probabilities if that is the last."""
        request = self.request
        finished = all(p.finish_reason is not None for p in progress)
        return RequestOutput(
            request.id,
            request.prompt,
            request.token_ids,
            [self._completion(i, p) for i, p in enumerate(progress)],
            _prompt_logprobs(request, self.tokenizer) if finished else None,
            _metrics(request.sequences, sum(p.tokens for p in progress), finished),
            finished,
            num_cached_tokens=request.sequences[0].cached,
        )

    def _completion(self, index: int, progress: Progress) -> CompletionOutput:
        s, text = self.request.sequences[index], self.request.texts[index].text
        logprobs = total = None
        if s.params.logprobs is not None:
            made = self._logprobs[index]
            entries = s.logprobs[: progress.tokens]
            made += [_alternatives(entry, s.params.logprobs, self.tokenizer) for entry in entries[len(made) :]]
            logprobs, total = list(made), float(sum(entry.logprob for entry in entries))
        return CompletionOutput(
            index,
            text[: progress.characters],
            s.tokens[: progress.tokens],
            progress.finish_reason,
            progress.stop_reason,
            cumulative_logprob=total,
            logprobs=logprobs,
            depths=None if s.depths is None else s.depths[: progress.tokens],
        )


def beam_sequence(prompt: list[int], beam: Beam, search: BeamSearch, tokenizer: Tokenizer | None) -> BeamSearchSequence:
    """A finished beam as users read it."""
    tokens = [*prompt, *beam.tokens]
    stopped = beam.tokens[-1] in search.eos_ids
    return BeamSearchSequence(
        tokens,
        tokenizer.decode(tokens) if tokenizer else "",
        beam.logprob,
        search.score(beam),
        "stop" if stopped else "length",
        beam.tokens[-1] if stopped else None,
    )


def _metrics(sequences: list[Sequence], generated: int, finished: bool) -> RequestMetrics:
    firsts = [s.first_token_time for s in sequences if s.first_token_time is not None]
    ends = [s.finished_time for s in sequences if s.finished_time is not None]
    return RequestMetrics(
        arrival_time=sequences[0].arrival,
        first_token_time=min(firsts, default=None),
        finished_time=max(ends) if finished else None,
        generated=generated,
        itl=_mean_itl(sequences) if finished else None,
    )


def _mean_itl(sequences: list[Sequence]) -> float | None:
    """Mean seconds between the tokens of a sequence after its first; None if none has a second token."""
    seconds, count = 0.0, 0
    for s in sequences:
        if len(s.tokens) > 1 and s.first_token_time is not None and s.finished_time is not None:
            seconds += s.finished_time - s.first_token_time
            count += len(s.tokens) - 1
    return seconds / count if count else None


def _prompt_logprobs(request: Request, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    chunks = request.sequences[0].prompt_details
    if sum(len(chunk.logprob) for chunk in chunks) < len(request.token_ids):
        return None  # it was ended first
    columns = [np.concatenate([np.asarray(chunk[i]) for chunk in chunks]) for i in range(1, 5)]
    entries: list[dict[int, Logprob] | None] = [None]
    for position, token in enumerate(request.token_ids[1:]):
        logprob, rank, ids, values = (column[position] for column in columns)
        entry = TokenLogprobs(token, float(logprob), int(rank), ids, values)
        entries.append(_alternatives(entry, request.params.prompt_logprobs, tokenizer))
    return entries


def _alternatives(entry: TokenLogprobs, count: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself, then the `count` most likely tokens."""

    def decoded(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    alternatives = {entry.token: Logprob(entry.logprob, entry.rank, decoded(entry.token))}
    for rank in range(min(count, len(entry.top_ids))):
        token = int(entry.top_ids[rank])
        alternatives.setdefault(token, Logprob(float(entry.top_logprobs[rank]), rank + 1, decoded(token)))
    return alternatives
