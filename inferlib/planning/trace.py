"""Requests as a benchmark or a simulation offers them, and what a user sees of how they were served."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST = 1 << 24  # tokens of a request


class TraceError(ValueError):
    """A file of requests that cannot be read. The message names the line."""


@dataclass(frozen=True)
class Offer:
    """A request of `input_len` prompt tokens that generates `output_len` tokens, offered at `arrival`, in seconds.

    prompt: its token ids, if they are known.
    """

    input_len: int
    output_len: int
    arrival: float = 0.0
    prompt: tuple[int, ...] | None = None


def read_trace(path: Path) -> list[Offer]:
    """The requests of a file of JSON lines, or of one JSON list: objects with "input_len" or "prompt_token_ids", with
    "output_len" or "max_tokens", and perhaps with "arrival" in seconds. In the order of arrival. Raises TraceError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    whole = text.lstrip().startswith("[")
    lines = [text] if whole else [line for line in text.splitlines() if line.strip()]
    try:
        entries = [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON lines: {error}") from None
    offers = [_offer(entry, f"{path}, request {i}") for i, entry in enumerate(entries[0] if whole else entries, 1)]
    if not offers:
        raise TraceError(f"{path} has no requests")
    return sorted(offers, key=lambda offer: offer.arrival)


def _offer(entry: Any, where: str) -> Offer:
    if not isinstance(entry, dict):
        raise TraceError(f'{where}: write an object such as {{"input_len": 100, "output_len": 50, "arrival": 0.5}}')
    prompt = entry.get("prompt_token_ids")
    if prompt is not None and not (isinstance(prompt, list) and all(type(t) is int and t >= 0 for t in prompt)):
        raise TraceError(f'{where}: "prompt_token_ids" must be a list of token ids')
    sizes: dict[str, Any] = {"input_len": entry.get("input_len") if prompt is None else len(prompt)}
    sizes["output_len"] = entry.get("output_len", entry.get("max_tokens"))
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= _MOST:
            raise TraceError(f'{where}: "{name}" must be a whole number from 1, got {size!r}')
    arrival = entry.get("arrival", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < math.inf:
        raise TraceError(f'{where}: "arrival" must be seconds from the start, got {arrival!r}')
    return Offer(**sizes, arrival=float(arrival), prompt=None if prompt is None else tuple(prompt))


def usual_trace(count: int = 512, seed: int = 20241123) -> list[Offer]:
    """Requests of lengths that vary as a chat service's, all offered at once: lognormal, of prompts with median 160 in
    4 to 1024, of answers with median 140 in 8 to 768. The measurements of `configs/measurements` took the default."""
    rng = random.Random(seed)

    def length(median: int, sigma: float, least: int, most: int) -> int:
        return max(least, min(most, round(math.exp(math.log(median) + sigma * rng.gauss(0, 1)))))

    offers = []
    for _ in range(count):
        sizes = length(160, 1.0, 4, 1024), length(140, 0.8, 8, 768)
        offers.append(Offer(*sizes, prompt=tuple(rng.randrange(1000, 100_000) for _ in range(sizes[0]))))
    return offers


def at_rate(offers: Sequence[Offer], rate: float, seed: int = 0) -> list[Offer]:
    """The requests, offered `rate` a second on average with exponential times between them (a Poisson process)."""
    rng, now, offered = random.Random(seed), 0.0, []
    for offer in offers:
        offered.append(Offer(offer.input_len, offer.output_len, now, offer.prompt))
        now += rng.expovariate(rate)
    return offered


@dataclass
class Served:
    """When a request was offered and its tokens came, in seconds."""

    arrival: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def take(self, now: float, total: int) -> None:
        """There are `total` tokens by now."""
        if total > self.tokens:
            self.first = now if not self.tokens else self.first
            self.last, self.tokens = now, total

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first - self.arrival

    @property
    def itl(self) -> float:
        """Mean inter-token latency."""
        return (self.last - self.first) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Service:
    """How a trace was served: seconds from the first offer to the last token, and what each request saw."""

    seconds: float
    input_tokens: int
    output_tokens: int
    ttft: tuple[float, ...]
    itl: tuple[float, ...]

    @staticmethod
    def of(offers: Sequence[Offer], served: Sequence[Served]) -> Service:
        seconds = max(s.last for s in served) - min(s.arrival for s in served)
        several = [s.itl for s in served if s.tokens > 1]
        tokens = sum(offer.input_len for offer in offers), sum(s.tokens for s in served)
        return Service(seconds, *tokens, tuple(s.ttft for s in served), tuple(several))

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds

    def facts(self) -> dict[str, Any]:
        """The results as JSON values; times are in seconds."""
        return {
            "requests": len(self.ttft),
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_second": self.throughput,
            "ttft": percentiles(self.ttft),
            "itl": percentiles(self.itl),
        }


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The mean and the 50th, 90th and 99th percentile; empty of no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in (50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), **at}


@dataclass
class StepTotals:
    """Sums over the dispatches of an engine.

    seconds: by kind of step: "prefill", "decode" or "both". dispatches: the same. prompt, padded: prompt tokens, and
    those of them that were padding. row_seconds: rows that generated times seconds; program_row_seconds: rows of
    programs times seconds. preemptions: sequences that lost their rows and were computed again. cached: tokens that
    were not computed, as their cells were in the cache.
    """

    seconds: dict[str, float]
    dispatches: dict[str, int]
    prompt: int = 0
    padded: int = 0
    row_seconds: float = 0.0
    program_row_seconds: float = 0.0
    preemptions: int = 0
    cached: int = 0

    @staticmethod
    def none() -> StepTotals:
        return StepTotals({}, {})

    def add(self, kind: str, seconds: float, tokens: tuple[int, int], rows: tuple[float, int]) -> None:
        """tokens: of prompts, and that the program has room for. rows: that generate, and that the program has."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        self.dispatches[kind] = self.dispatches.get(kind, 0) + 1
        self.prompt += tokens[0]
        self.padded += tokens[1] - tokens[0]
        self.row_seconds += rows[0] * seconds
        self.program_row_seconds += rows[1] * seconds

    def facts(self) -> dict[str, Any]:
        busy = sum(self.seconds.values())
        return {
            "step_seconds": dict(self.seconds),
            "dispatches": dict(self.dispatches),
            "padding": self.padded / max(self.padded + self.prompt, 1),
            "rows": self.row_seconds / busy if busy else 0.0,
            "program_rows": self.program_row_seconds / busy if busy else 0.0,
            "preemptions": self.preemptions,
            "cached_tokens": self.cached,
        }
