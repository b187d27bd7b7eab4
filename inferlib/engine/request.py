"""A user's request: the sequences that the engine runs for it, and their results as users read them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from inferlib.engine.sequence import Sequence, Status, TokenLogprobs
from inferlib.engine.text import OutputText
from inferlib.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from inferlib.sampling.logits_processors import LogitsProcessorError
from inferlib.sampling.params import SamplingParams
from inferlib.tokenizer import Tokenizer


@dataclass(eq=False)
class Request:
    """A validated prompt and its `params.n` sequences, each with its text."""

    id: int
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
        """Raise RuntimeError if an error lost results of its sequences; LogitsProcessorError of its own functions."""
        for s in self.sequences:
            if isinstance(s.error, LogitsProcessorError):
                raise s.error
            if s.error is not None:
                raise RuntimeError(f"an earlier error lost the results of this request: {s.error!r}") from s.error

    @property
    def finished(self) -> bool:
        return all(s.status is Status.FINISHED for s in self.sequences)


def request_output(request: Request, tokenizer: Tokenizer | None) -> RequestOutput:
    """The result of a finished request. Without a tokenizer it has no texts."""
    pairs = zip(request.sequences, request.texts, strict=True)
    return RequestOutput(
        request.id,
        request.prompt,
        request.token_ids,
        [_completion(i, s, text.text, tokenizer) for i, (s, text) in enumerate(pairs)],
        _prompt_logprobs(request, tokenizer),
        _metrics(request.sequences),
        finished=True,
    )


def _metrics(sequences: list[Sequence]) -> RequestMetrics:
    firsts = [s.first_token_time for s in sequences if s.first_token_time is not None]
    return RequestMetrics(
        arrival_time=sequences[0].arrival,
        first_token_time=min(firsts, default=None),
        finished_time=max(s.finished_time for s in sequences if s.finished_time is not None),
        generated=sum(len(s.tokens) for s in sequences),
        itl=_mean_itl(sequences),
    )


def _mean_itl(sequences: list[Sequence]) -> float | None:
    """Mean seconds between the tokens of a sequence after its first; None if none has a second token."""
    seconds, count = 0.0, 0
    for s in sequences:
        if len(s.tokens) > 1 and s.first_token_time is not None and s.finished_time is not None:
            seconds += s.finished_time - s.first_token_time
            count += len(s.tokens) - 1
    return seconds / count if count else None


def _completion(index: int, s: Sequence, text: str, tokenizer: Tokenizer | None) -> CompletionOutput:
    logprobs = total = None
    if s.params.logprobs is not None:
        logprobs = [_alternatives(entry, s.params.logprobs, tokenizer) for entry in s.logprobs]
        total = float(sum(entry.logprob for entry in s.logprobs))
    return CompletionOutput(
        index,
        text,
        list(s.tokens),
        s.finish_reason,
        s.stop_reason,
        cumulative_logprob=total,
        logprobs=logprobs,
    )


def _prompt_logprobs(request: Request, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    chunks = request.sequences[0].prompt_details
    if sum(len(chunk.logprob) for chunk in chunks) < len(request.token_ids):
        return None  # a deadline came first
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
