"""The contract of what drafts tokens: by the text of a row alone, or by a model with a cache of its own.

Shapes: B rows of a program, of R on a replica; M positions of the longest sequence; k drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax

from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.decoder import Decoder
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.ops.backend import Backend

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


class DraftRows(NamedTuple):
    """Rows that drafts are made for. history [B, M]: see `Drafter.propose`. lengths [B]: tokens that have a cell; one
    more is known, at that position. room [B]: how many positions from there on the row may write, 0 if it does not
    run."""

    history: jax.Array
    lengths: jax.Array
    room: jax.Array


@dataclass(frozen=True)
class DraftTools:
    """What a program lends to a model that drafts.

    decoder: the model over its weights. context: of a step of it, whose rows have the pages of the target's. choose:
    the token [B] that each row would choose by logits [B, V], so many tokens behind its next one.
    """

    decoder: Decoder
    context: Callable[[StepBatch], StepContext]
    choose: Callable[[jax.Array, jax.Array | int], jax.Array]

    def run(self, batch: StepBatch, caches: Caches) -> tuple[jax.Array, Caches]:
        """Hidden states [T, D] of a step's tokens, and the caches with them."""
        ran = self.decoder(self.context(batch), caches)
        return ran.hidden, ran.cache

    def draft(self, batch: StepBatch, caches: Caches, ahead: jax.Array | int) -> tuple[jax.Array, Caches]:
        """Drafts [B] behind the last token of each row of a step, `ahead` tokens behind its next one; and the
        caches."""
        context = self.context(batch)
        ran = self.decoder(context, caches)
        last = ran.hidden.reshape(*batch.decode_tokens.shape, -1)[:, -1]
        return self.choose(self.decoder.logits(last, context.shards, context.backend.matmul), ahead), ran.cache


class ModelDrafter(Protocol):
    """Guesses tokens by a model that has weights, and a cache in the pages of the target's.

    backend: of its operations. It must be hashable, and equal to another only if both are of the same shapes.
    """

    @property
    def model(self) -> AbstractModel: ...

    @property
    def backend(self) -> Backend: ...

    def follow(self, tools: DraftTools, caches: Caches, batch: StepBatch) -> Caches:
        """The caches after a step of the target's chunks and rows in which nothing was drafted. Traced."""
        ...

    def propose(self, tools: DraftTools, caches: Caches, rows: DraftRows, count: int) -> tuple[Caches, jax.Array]:
        """The caches, and drafts as those of `Drafter.propose`. Traced. No cell is written beyond a row's room."""
        ...
