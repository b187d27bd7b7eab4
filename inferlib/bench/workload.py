"""What is asked of a server: random prompts of lognormal lengths that may share prefixes, or those of a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferlib.option_checks import brief

# Short words, which most vocabularies have as one token each.
_TEXT = (
    "the of and to in is that for it with as was on are by this be from or have an they which one you had not but what "
    "all were when we there can more if no man out other so time up go about than into could state only new year some "
    "take come these know see use get like then first any work now may such give over think most even find day also "
    "after way many must look before great back through long where much should well people down own just because good"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Asked:
    """One request. prompt: text; or messages, for a chat. max_tokens: of the answer. at: seconds after the start at
    which it is sent; None: when the load says."""

    prompt: str | list[dict[str, Any]]
    max_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Lengths:
    """Lengths whose logarithm is normal: with this mean, in tokens, and the standard deviation `spread` of the
    logarithm; 0 makes all equal."""

    mean: int
    spread: float = 0.0

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = rng.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(np.rint(drawn), 1, 1_000_000).astype(int).tolist()


@dataclass(frozen=True)
class Prefixes:
    """Prompts begin with one of `count` texts of `tokens` words, drawn at random; 0: with none."""

    count: int = 0
    tokens: int = 0


def random_workload(
    requests: int, prompts: Lengths, outputs: Lengths, prefixes: Prefixes, seed: int = 0
) -> list[Asked]:
    """Prompts of random words: a server counts about a token for each, and reports how many. Prefixes come on top."""
    rng = np.random.default_rng(seed)
    beginnings = [_words(rng, prefixes.tokens) for _ in range(prefixes.count)] if prefixes.tokens else []
    sizes = zip(prompts.draw(rng, requests), outputs.draw(rng, requests), strict=True)
    asked = []
    for prompt_tokens, output_tokens in sizes:
        beginning = beginnings[rng.integers(len(beginnings))] + " " if beginnings else ""
        asked.append(Asked(beginning + _words(rng, prompt_tokens), output_tokens))
    return asked


def read_trace(path: Path, seed: int = 0) -> list[Asked]:
    """Requests of a file of JSON lines. Raises ValueError, naming the line, and OSError.

    A line has "prompt", "messages", or "prompt_tokens" (random words); "max_tokens" or "output_tokens"; and perhaps
    "at" or "timestamp", seconds from the first line's.
    """
    rng, asked = np.random.default_rng(seed), list[Asked]()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    asked.append(_traced(json.loads(line), rng))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not asked:
        raise ValueError(f"{path} has no requests")
    timed = [x for x in asked if x.at is not None]
    if timed and len(timed) < len(asked):
        raise ValueError(f"{path}: all lines have a time, at, or none has")
    start = min((x.at or 0.0 for x in asked), default=0.0)
    asked = [Asked(x.prompt, x.max_tokens, None if x.at is None else x.at - start) for x in asked]
    return sorted(asked, key=lambda x: x.at or 0.0)


def _traced(line: Any, rng: np.random.Generator) -> Asked:
    if not isinstance(line, dict):
        raise ValueError(f"a line is an object, got {brief(line)}")
    tokens = line.get("max_tokens", line.get("output_tokens"))
    if type(tokens) is not int or not 0 < tokens <= 10_000_000:
        raise ValueError(f"max_tokens must be a whole number above 0, got {brief(tokens)}")
    at = line.get("at", line.get("timestamp"))
    if at is not None and (type(at) not in (int, float) or not math.isfinite(at)):
        raise ValueError(f"at must be seconds, got {brief(at)}")
    prompt, size = line.get("messages", line.get("prompt")), line.get("prompt_tokens")
    if prompt is None and type(size) is int and 0 < size <= 10_000_000:
        prompt = _words(rng, size)
    messages = isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt)
    if not prompt or not (isinstance(prompt, str) or messages):
        raise ValueError("a line has prompt, messages or prompt_tokens")
    return Asked(prompt, tokens, at)


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(_WORDS[i] for i in rng.integers(len(_WORDS), size=count))


@dataclass(frozen=True)
class Load:
    """When requests are sent: `rate` a second, at random times (a Poisson process), or `concurrency` at a time; with
    both, at these times and no more than that many. Neither: all at once. A trace has its own times."""

    rate: float | None = None
    concurrency: int | None = None

    def times(self, asked: list[Asked], seed: int = 0) -> Iterator[float]:
        """Seconds after the start at which requests are sent, if there is room."""
        rng, now = np.random.default_rng(seed + 1), 0.0
        for request in asked:
            if request.at is not None:
                yield request.at
            elif self.rate is None:
                yield 0.0
            else:
                yield now
                now += rng.exponential(1 / self.rate)
