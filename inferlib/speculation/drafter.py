"""The contract of what drafts tokens: by the text of a row alone, or by a model with a cache of its own.

Shapes: B rows of a program; M positions of the longest sequence; k drafted tokens; P chunks of C tokens; T tokens of a
step; N features of a token, W wide, which are stored as one of D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax

from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.decoder import Decoder
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.ops.backend import Backend
from inferlib.sharding.shards import Shards

Caches: TypeAlias = tuple[LayerCache, ...]


def arrays_of(caches: Caches) -> tuple[tuple[jax.Array, ...], ...]:
    """What a loop carries of caches."""
    return tuple(cache.arrays for cache in caches)


def with_arrays(caches: Caches, arrays: tuple[tuple[jax.Array, ...], ...]) -> Caches:
    """The caches with others in their place, see `arrays_of`."""
    return tuple(replace(cache, arrays=of_one) for cache, of_one in zip(caches, arrays, strict=True))


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens. It must be hashable, and equal to another only if both guess alike."""

    def propose(self, history: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        """The next `count` tokens of each of B rows: int32 [B, count], -1 where it has none. Traced into programs.

        history [B, M] int32: the tokens of a row from its first on, of which lengths [B] count; what is behind them,
        and in rows that do not run, is anything. A wrong guess, out of the vocabulary even, changes no result.
        """
        ...


class Pending(NamedTuple):
    """What a drafter has yet to run of each row, if it `defers`: the tokens from position first [B] on, at most C, as
    many as a step verifies. features [B, C, D]: of these, up to the row's last cell, if it reads some."""

    features: jax.Array | None
    first: jax.Array


class DraftRows(NamedTuple):
    """Rows that drafts are made for. history [B, M]: see `Drafter.propose`. lengths [B]: tokens that have a cell; one
    more is known, at that position. room [B]: how many positions from there on the row may write, 0 if it does not
    run. pending: of a drafter that defers."""

    history: jax.Array
    lengths: jax.Array
    room: jax.Array
    pending: Pending | None = None


class Followed(NamedTuple):
    """A step of the target in which nothing was drafted. batch: its chunks [P, C] and the last tokens of rows [B, 1],
    or with drafts of the host [B, C].
    following [P, C]: the token behind each of the chunks' tokens, -1 behind a prompt; where those are dealt out, of
    this device's. rows: as they were before it.
    features [T, N, W]: of all tokens of the batch, if the drafter reads some."""

    batch: StepBatch
    following: jax.Array
    rows: DraftRows
    features: jax.Array | None = None


class AfterStep(NamedTuple):
    """What a drafter leaves of a step. rows: what is pending of the B rows; ends: of rows whose prompts end with the P
    chunks, features [P, D]. None of one that does not defer."""

    caches: Caches
    rows: Pending | None = None
    ends: Pending | None = None


@dataclass(frozen=True)
class DraftTools:
    """What a program lends to a model that drafts.

    module: the model over its weights; target: the one that it drafts for. context: of a step of the model, whose rows
    have the pages of the target's. choose: the token [B] that each row would choose by logits [B, V], some tokens
    behind its next one. columns: V, of the target on this device. most: C, tokens of a row that a step verifies at
    most. shards: of both models.
    """

    module: Any
    target: Decoder
    context: Callable[[StepBatch], StepContext]
    choose: Callable[[jax.Array, jax.Array | int], jax.Array]
    columns: int
    most: int
    shards: Shards


class ModelDrafter(Protocol):
    """Guesses tokens by a model that has weights, and a cache in the pages of the target's.

    backend: of its operations. feature_layers: after how many layers of the target it reads hidden states, its
    features; it may read none. defers: it runs tokens of a row later than the step that the target runs them in. It
    must be hashable, and equal to another only if both are of the same shapes.
    """

    @property
    def model(self) -> AbstractModel: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def defers(self) -> bool: ...

    def follow(self, tools: DraftTools, caches: Caches, step: Followed) -> AfterStep:
        """The caches after a step in which nothing was drafted, and what is pending then. Traced."""
        ...

    def propose(self, tools: DraftTools, caches: Caches, rows: DraftRows, count: int) -> tuple[Caches, jax.Array]:
        """The caches, and drafts as those of `Drafter.propose`. Traced. No cell is written beyond a row's room."""
        ...

    def pending(
        self, tools: DraftTools, rows: DraftRows, features: jax.Array | None, counts: jax.Array
    ) -> Pending | None:
        """What is pending of rows after a step that verified `counts` [B] tokens of each; None of a drafter that does
        not defer. features [T, N, W]: of these, B * N of them. Traced."""
        ...
