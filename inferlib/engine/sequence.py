"""One sequence that is being generated, as the host sees it."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np

from inferlib.cache.host_tier import Page
from inferlib.cache.prefix_tree import Node
from inferlib.cache.snapshots import Snapshot
from inferlib.engine.adapters import LoadedAdapter
from inferlib.engine.clock import Clock
from inferlib.engine.constraint import Constraint
from inferlib.engine.fetch import Fetch
from inferlib.models.depth import Depth
from inferlib.outputs import FinishReason
from inferlib.programs.keys import Mode
from inferlib.sampling.params import SamplingParams
from inferlib.sampling.structured import StructuredOutputError


class Status(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, and of the K most likely tokens."""

    token: int
    logprob: float
    rank: int
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated after it.

    max_tokens: the most tokens to generate; 0 if only the prompt is scored.
    detail: what to return for every position of the prompt, or "embed": its hidden states, pooled.
    priority: sequences of a lower number come first. order: its place among sequences, see `Scheduler`.
    adapter: the adapter that changes the weights for it. depth: how it takes the steps of a loop's core; None for
    models that repeat no layers. depths: how many of these steps each of its tokens' logits took, if tokens may leave.
    salt: it takes cached pages only of sequences with the same salt, adapter and depth.
    row: its row while it runs, else -1. pages: its pages in its row's replica, in the order of positions. level_pages:
    those of each level above 0 of a bounded cache, see `inferlib.engine.level_pages`.
    hosted: copies in the host's memory of pages that left the device, by their columns; such a page is -1 in `pages`.
    wanted: how often its queries would have read each page lately; None: that is not known. See
    `inferlib.engine.host_pages`.
    nodes: the nodes of the tree of pages for the first of its pages. encoded: its context as the tree takes it.
    waits_for: a page or a snapshot that it can read once another sequence has written it, or what is fetched for it or
    for another sequence.
    fetch: the pages that it brings from the tiers of the cache, see `inferlib.engine.tiers`.
    snapshots: the snapshots to save of it while it is prefilled, in the order of positions. serves: the first position
    at which another sequence can go on from its row, given what the row was restored from.
    context: the tokens that are prefilled: the prompt, and if the sequence was preempted its own tokens too.
    prefilled: how many tokens of the context were sent to the device, or were in the cache before. cached: how many
    tokens of the prompt were in the cache when it first got a row; None before that. hit: the same number when it last
    got a row.
    bound: the most cells that its row keeps while it decodes, if its cache is compacted. dropped: how many positions of
    its context its cache has lost while it is prefilled. boundary: the number of tokens at which it is compacted next,
    see `inferlib.engine.bounded`.
    ready: how many dispatches must have given results before it may get a row again.
    scheduled: output tokens that were received, plus the most that dispatches in flight generate. least: the same with
    the fewest that they generate, unless it ends.
    drafts: tokens that its grammar forces, which its last dispatch drafted.
    tried, stood: how many recent drafts were tried and how many stood; old ones count less, see `Profit`.
    prompt_details: an entry for each chunk, `Sampled` or logits of its valid positions; or one entry for all chunks so
    far, [2, D]: the sum of the hidden states, and the last one.
    clock: the clock of its times `arrival`, `first_token_time` and `finished_time`.
    mode: the mode that it needs of a program. choice: the mode of the program that chooses its tokens, which may be a
    second one.
    stop_ids: tokens that end it.
    constraint: what its text must follow until it is finished, by `params.structured_outputs`.
    error: what lost its results, if something did; it is finished then.
    """

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_ids: tuple[int, ...] = ()
    detail: Literal["", "logprobs", "logits", "embed"] = ""
    status: Status = Status.WAITING
    priority: float = 0
    order: float = 0
    salt: str | None = None
    adapter: LoadedAdapter | None = None
    depth: Depth | None = None
    row: int = -1
    pages: list[int] = field(default_factory=list)
    level_pages: list[list[int]] = field(default_factory=list)
    hosted: dict[int, Future[Page]] = field(default_factory=dict)
    wanted: np.ndarray | None = None
    nodes: list[Node] = field(default_factory=list)
    encoded: bytes = b""
    fetch: Fetch | None = None
    waits_for: Node | Snapshot | Fetch | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    serves: int = 0
    context: list[int] = field(default_factory=list)
    prefilled: int = 0
    cached: int | None = None
    hit: int = 0
    bound: int | None = None
    dropped: int = 0
    boundary: int = 0
    ready: int = 0
    scheduled: int = 0
    least: int = 0
    drafts: list[int] = field(default_factory=list)
    tried: float = 0.0
    stood: float = 0.0
    tokens: list[int] = field(default_factory=list)
    depths: list[int] | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_details: list = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    clock: Clock = field(default_factory=Clock)
    arrival: float = field(init=False)
    first_token_time: float | None = None
    finished_time: float | None = None
    error: BaseException | None = None
    constraint: Constraint | None = None
    mode: Mode = field(init=False)
    choice: Mode = field(init=False)
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self):
        self.arrival = self.clock.now()
        ids = set(self.params.stop_token_ids or ())
        self.stop_ids = frozenset(ids if self.params.ignore_eos else ids | set(self.eos_ids))
        if self.params.logprobs is not None or self.detail == "logprobs":
            self.choice = "logprobs"
        else:
            self.choice = "greedy" if self.params.takes_argmax else "sample"
        self.mode = "embed" if self.detail == "embed" else self.choice
        if self.params.chosen_with_host:
            self.mode = "processed"

    @property
    def cache_key(self) -> Hashable:
        """Sequences of another one have other cells for the same tokens, or must not share."""
        key = self.salt if self.adapter is None else (self.adapter.values.key, self.salt)
        return (tuple(self.depth), key) if self.depth and any(self.depth) else key

    @property
    def may_be_active(self) -> bool:
        """True if a decode dispatch may advance its row. All its tokens may be in flight: an earlier dispatch may
        have returned early."""
        return self.status is Status.DECODE and self.max_tokens > 1

    @property
    def max_length(self) -> int:
        """Most tokens that its cache may hold once every dispatch in flight has run, if it decodes."""
        return self.length_after(0)

    @property
    def unfinished(self) -> bool:
        """True if it has tokens left to generate once every dispatch in flight has run, as far as the host knows."""
        return self.least < self.max_tokens

    def length_after(self, count: int) -> int:
        """The length after `count` more tokens."""
        length, bound = self.position_after(count), self.bound
        return length if bound is None or length < bound else bound

    def position_after(self, count: int) -> int:
        """The position of its next token without a cell, at most, after `count` more tokens."""
        scheduled = self.scheduled + count
        return len(self.prompt) + (scheduled if scheduled < self.max_tokens else self.max_tokens) - 1

    @property
    def most_length(self) -> int:
        """Most tokens that its cache ever holds while it decodes."""
        return self.most_tokens if self.bound is None else min(self.most_tokens, self.bound)

    @property
    def most_tokens(self) -> int:
        """Most tokens that it ever has, but for the last, which gets no cell."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def length(self) -> int:
        """Tokens of the prompt, and generated."""
        return len(self.prompt) + len(self.tokens)

    @property
    def written(self) -> int:
        """How many of these have a cell, or get it in dispatches that are sent. The last that was generated has none,
        until the next one is."""
        return self.prefilled if self.length == len(self.context) else self.length - 1

    @property
    def most_written(self) -> int:
        """How many have a cell once all dispatches that are sent have run, at most."""
        return self.prefilled if self.status is Status.PREFILL else max(self.written, self.max_length)

    @property
    def takes_cached(self) -> bool:
        """False if all of its prompt is to be computed, for details that are not known yet."""
        return not self.detail or self.prefilled == len(self.prompt)

    def begin(self, cached: int) -> None:
        """Prepare to prefill it, the first time or again, but for its first `cached` tokens."""
        if self.takes_cached:
            self.detail = ""  # the prompt's details are known, if they were asked for
        self.prompt_details = self.prompt_details if not self.detail else []
        self.status, self.prefilled, self.hit, self.waits_for = Status.PREFILL, cached, cached, None
        self.cached = cached if self.cached is None else self.cached
        self.context = self.prompt + self.tokens if self.tokens else self.prompt

    def add_detail(self, detail: Any) -> None:
        """Append what is known of one more chunk of the prompt."""
        if self.detail == "embed" and self.prompt_details:
            detail = np.stack([self.prompt_details.pop()[0] + detail[0], detail[1]])
        self.prompt_details.append(detail)

    def accept(self, tokens: list[int]) -> int:
        """Append generated tokens and return how many were appended.

        A negative token means that no token was generated from there on. A stop token or max_tokens ends the sequence,
        and so does one that its grammar does not have, as an error.
        """
        if self.constraint is not None and not self._follows(tokens):
            return 0
        before = len(self.tokens)
        if not before and tokens[0] >= 0:
            self.first_token_time = self.clock.now()
        # The usual case, some hundred times per dispatch of a large batch: nothing ends here.
        if tokens[-1] >= 0 and before + len(tokens) < self.max_tokens and self.stop_ids.isdisjoint(tokens):
            self.tokens += tokens
            return len(tokens)
        for token in tokens:
            if token < 0:
                break
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish("stop", None if token in self.eos_ids else token)
                break
            if len(self.tokens) >= self.max_tokens:
                self.finish("length")
                break
        return len(self.tokens) - before

    def _follows(self, tokens: list[int]) -> bool:
        """Whether its grammar has these tokens; else it fails."""
        try:
            for token in tokens:
                if token >= 0 and self.constraint is not None:
                    self.constraint.accept(token)
        except StructuredOutputError as error:
            self.fail(error)
        return self.error is None

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, reason, stop_reason
        self.constraint = None
        self.finished_time = self.clock.now()

    def fail(self, error: BaseException) -> None:
        """End it without a result."""
        self.status, self.error, self.constraint = Status.FINISHED, error, None
