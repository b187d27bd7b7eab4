"""Drafting by a layer of its own that reads the target's hidden states.

Position t of the layer takes what the target's hidden states of token t are fused to, and the embedding of token t + 1.
So a row whose target has cells of L tokens, and whose next one is known, has the layer's cells of all L positions once
what is pending has run: the tokens of the last step, whose hidden states a step stores in the row's state. Drafts
behind the first take the layer's own hidden state; their cells are written again with the target's, if they stand.

A prompt that begins as another takes its pages with the layer's cells. The last of them was made with the token that
follows there, which may be another one here: that costs a draft at most.

Shapes: B rows; k drafts; D width of the layer; N hidden states of the target, W wide; V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch, StepContext, last_of_chunks, rolled
from inferlib.ops.backend import Backend
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.speculation.drafter import (
    AfterStep,
    Caches,
    DraftRows,
    DraftTools,
    Followed,
    Pending,
    arrays_of,
    with_arrays,
)


@dataclass(frozen=True, eq=False)
class FeatureDrafter:
    """See `inferlib.speculation.drafter.ModelDrafter`. A subclass says what is fused, embedded and chosen."""

    backend: Backend

    @property
    def model(self) -> AbstractModel:
        raise NotImplementedError

    @property
    def defers(self) -> bool:
        return True

    @property
    def feature_layers(self) -> tuple[int, ...]:
        raise NotImplementedError

    def fused(self, tools: DraftTools, features: jax.Array) -> jax.Array:
        """What is stored of features [T, N, W]: [T, D]."""
        raise NotImplementedError

    def embedding(self, tools: DraftTools, context: StepContext) -> jax.Array:
        """The embeddings [T, D] of the tokens of a step of the layer."""
        raise NotImplementedError

    def logits(self, tools: DraftTools, hidden: jax.Array) -> jax.Array:
        """Logits [B, V] of drafts by the layer's hidden states [B, D], of this device's tokens."""
        raise NotImplementedError

    def passed_on(self, tools: DraftTools, hidden: jax.Array) -> jax.Array:
        """What a draft takes of the layer's hidden states [B, D] of the one before it."""
        return hidden

    def follow(self, tools: DraftTools, caches: Caches, step: Followed) -> AfterStep:
        """One pass over what is pending of rows and over chunks, but for the last token of a prompt, whose next one is
        not chosen yet."""
        assert step.features is not None
        fused, split = self.fused(tools, step.features), step.following.size
        rows, hidden = _pending(step.rows)
        batch = step.batch._replace(
            chunk_tokens=jnp.maximum(step.following, 0),
            chunk_lengths=tools.shards.sum(jnp.sum(_has_known_successor(step, tools.shards), axis=1), axes.TOKENS),
            decode_tokens=rows.decode_tokens,
            decode_lengths=rows.decode_lengths,
            decode_counts=rows.decode_counts,
        )
        inputs = jnp.concatenate([fused[:split], hidden.reshape(-1, hidden.shape[-1])])
        _, caches = self._run(tools, batch, inputs, caches)
        stored = fused[split:].reshape(*step.batch.decode_tokens.shape, fused.shape[1])
        pending = _stored(step.rows, stored, step.batch.decode_counts)
        chunks = fused[:split].reshape(*step.following.shape, fused.shape[1])
        ends = step.batch.chunk_starts + step.batch.chunk_lengths - 1
        return AfterStep(caches, pending, Pending(last_of_chunks(chunks, step.batch.chunk_lengths, tools.shards), ends))

    def pending(
        self, tools: DraftTools, rows: DraftRows, features: jax.Array | None, counts: jax.Array
    ) -> Pending | None:
        assert features is not None
        fused = self.fused(tools, features)
        return _stored(rows, fused.reshape(counts.size, -1, fused.shape[1]), counts)

    def propose(self, tools: DraftTools, caches: Caches, rows: DraftRows, count: int) -> tuple[Caches, jax.Array]:
        batch, hidden = _pending(rows)
        out, caches = self._run(tools, batch, hidden.reshape(-1, hidden.shape[-1]), caches)
        last = out.reshape(hidden.shape)[:, -1]
        drafts = jnp.zeros((last.shape[0], count), jnp.int32).at[:, 0].set(self._chosen(tools, last, 0))
        if count == 1:
            return caches, drafts

        def step(i: jax.Array, carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
            arrays, last, drafts = carry
            token = lax.dynamic_index_in_dim(drafts, i - 1, axis=1, keepdims=False)
            batch = StepBatch.of_rows(token, jnp.where(rows.room > i, rows.lengths + i, 0))
            last, after = self._run(tools, batch, self.passed_on(tools, last), with_arrays(caches, arrays))
            drafts = lax.dynamic_update_index_in_dim(drafts, self._chosen(tools, last, i), i, axis=1)
            return arrays_of(after), last, drafts

        arrays, _, drafts = lax.fori_loop(1, count, step, (arrays_of(caches), last, drafts))
        return with_arrays(caches, arrays), drafts

    def _run(self, tools: DraftTools, batch: StepBatch, hidden: jax.Array, caches: Caches) -> tuple[jax.Array, Caches]:
        """The layer's hidden states [T, D] of a batch: tokens, each at the position of the one before it, and what
        takes the place of the target's hidden states there."""
        context = tools.context(batch)
        out, cache = tools.module(self.embedding(tools, context), hidden, context, caches[0])
        return out, (cache,)

    def _chosen(self, tools: DraftTools, hidden: jax.Array, ahead: jax.Array | int) -> jax.Array:
        """The drafts [B] by the layer's hidden states [B, D]."""
        return tools.choose(self.logits(tools, hidden), ahead)


def _stored(rows: DraftRows, features: jax.Array, counts: jax.Array | None) -> Pending:
    """The features [B, N, D] of a step's tokens as pending ones. counts [B]: how many of a row's count; they are behind
    padding."""
    assert rows.pending is not None
    assert rows.pending.features is not None
    features = features if counts is None else rolled(features, -counts)
    return Pending(rows.pending.features.at[:, : features.shape[1]].set(features), rows.lengths)


def _has_known_successor(step: Followed, shards: Shards) -> jax.Array:
    """[P, C] of which tokens of chunks the next one is known."""
    stripe, width = shards.stripe(axes.TOKENS), step.following.shape[1]
    at = stripe.index + stripe.count * jnp.arange(width)
    return (at < step.batch.chunk_lengths[:, None]) & (step.following >= 0)


def _pending(rows: DraftRows) -> tuple[StepBatch, jax.Array]:
    """What is pending of rows that run: the tokens behind those that features [B, C, D] are of, and these. Both are
    behind padding."""
    assert rows.pending is not None
    features, first = rows.pending
    assert features is not None
    width, runs = features.shape[1], rows.room > 0
    counts = jnp.where(runs, jnp.clip(rows.lengths - first, 0, width), 0)
    positions = first[:, None] + 1 + jnp.arange(width)
    tokens = jnp.take_along_axis(rows.history, positions, axis=1, mode="clip")
    lengths = jnp.where(runs, rows.lengths, 0)
    return StepBatch.of_rows(rolled(tokens, counts), lengths, counts), rolled(features, counts)
