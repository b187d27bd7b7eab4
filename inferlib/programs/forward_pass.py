"""A pass of the model over the tokens of a step, and the logits behind it.

Shapes: B decode rows; C tokens of a row, 1 and its drafts; P prefill chunks; T tokens in all; D width; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from inferlib.attention_values import SharedPrefixes
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import CacheLevel, StepBatch, StepContext, last_of_chunks
from inferlib.models.blocks import sums_feed_norms
from inferlib.models.config import ModelConfig
from inferlib.models.decoder import Decoder
from inferlib.models.depth import Depths
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.replay import replay
from inferlib.ops.backend import Backend
from inferlib.ops.residual_norm import Mailboxes, choose_all_reduce, open_mailboxes
from inferlib.programs.context import ProgramContext
from inferlib.programs.keys import ProgramKey
from inferlib.programs.row_state import RowState
from inferlib.programs.unsettled import Inputs
from inferlib.programs.verification import hidden_of_tokens, verification_batch
from inferlib.sharding import axes
from inferlib.speculation.drafter import Caches

Arrays = tuple[jax.Array, ...]  # flat: of weights, or of the cache


def fuses_all_reduce(model: AbstractModel, config: EngineConfig, key: ProgramKey) -> bool:
    """True if one kernel sums a layer's branches over devices and computes the norms that follow."""
    if config.scan or key.chunks or not sums_feed_norms(model.config, sharded=True):
        return False
    choice = choose_all_reduce(key.decoded, model.config.dim, model.dtype, backend=config.backend.all_reduce)
    return choice.name != "xla"


def rows_batch(rows: RowState) -> StepBatch:
    """A step of each row's last token."""
    return StepBatch.of_rows(rows.token, jnp.where(rows.active, rows.length + 1, 0))


class Pass(NamedTuple):
    """A pass of the model. hidden [T, D]; decoder: for its head; load: of experts, if that is counted; features
    [T, N, D]: if a model that drafts reads some. inputs: of each block, what its layers have yet to replay. core: steps
    of a loop's core, if tokens may leave it; taken [T]: how many of them each token took. wanted: see `StepOutput`."""

    hidden: jax.Array
    decoder: Decoder
    cache: Arrays
    mailboxes: Mailboxes | None
    load: jax.Array | None
    features: jax.Array | None
    inputs: Inputs
    core: jax.Array | None
    taken: jax.Array | None
    wanted: jax.Array | None


@dataclass(frozen=True)
class ForwardPass:
    """Passes of the model of a program, and its caches."""

    program: ProgramContext

    def __call__(
        self,
        weights: Arrays,
        cache: Arrays,
        batch: StepBatch,
        rows: RowState,
        counted: jax.Array,
        *,
        mailboxes: Mailboxes | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> Pass:
        """A pass over a batch. rows: those of the batch, with the pages of all. counted [T]: tokens whose choices of
        experts are counted, if any are."""
        program, some = self.program, counted if self.program.config.expert_load else None
        decoder = program.model.merge(weights[: len(program.model.specs)])
        ctx = replace(self.context_of_rows(rows, batch), counted=some, prefixes=prefixes)
        caches, of_drafts = self.split(cache)
        caches = tuple(self.counting(cache, batch) for cache in caches)
        hidden, caches, mailboxes, load, features, core = decoder(ctx, caches, mailboxes)
        inputs, wanted = tuple(cache.inputs for cache in caches), [x.wanted for x in caches if x.wanted is not None]
        caches = tuple(replace(cache, inputs=(), wanted=None) for cache in caches)
        cache, load = program.plan.flatten(caches + of_drafts), None if load is None else load[None, None]
        counts, taken = (None, None) if core is None else (core.counts[None, None], core.steps)
        total = sum(wanted[1:], wanted[0]) if wanted else None
        return Pass(hidden, decoder, cache, mailboxes, load, features, inputs, counts, taken, total)

    def counting(self, cache: LayerCache, batch: StepBatch) -> LayerCache:
        """The cache of a block, ready to count the pages that decode rows want, if these may be missing."""
        rows = batch.decode_lengths.size
        if not cache.summaries_of_rows or not rows:
            return cache
        return replace(cache, wanted=jnp.zeros((rows, self.program.plan.columns + 1), jnp.int32))

    def context_of_rows(self, rows: RowState, batch: StepBatch) -> StepContext:
        """A step of the model for a batch of these rows, with the pages of all."""
        config, columns = self.program.config, self.program.plan.columns
        ctx = self.context(self.program.model.config, config.backend, rows.pages[:, :columns], batch)
        ctx = replace(ctx, adapters=rows.adapter, feature_layers=self.program.feature_layers)
        ctx = replace(ctx, sparse=config.block_lists, dropped=rows.dropped, levels=self.levels(rows))
        ctx = replace(ctx, propagation=config.propagation, skipped=rows.skipped)
        if rows.depth is not None:
            ctx = replace(ctx, depths=Depths(rows.depth, rows.threshold, whole=config.counted))
        if config.attention_pages is not None:
            ctx = replace(ctx, selected=config.attention_pages.count)
        return ctx

    def levels(self, rows: RowState) -> tuple[CacheLevel, ...]:
        """The levels above 0 of these rows' caches, with the pages of all."""
        program, made = self.program, []
        first, *more = program.plan.level_columns
        if rows.ahead is None:
            return ()
        for level, columns in enumerate(more, 1):
            table, ahead = rows.pages[:, first : first + columns], rows.ahead[:, level - 1]
            made.append(CacheLevel(table, ahead, program.config.limit_of(program.key.limit, level)))
            first += columns
        return tuple(made)

    def context(self, model: ModelConfig, backend: Backend, table: jax.Array, batch: StepBatch) -> StepContext:
        """A step of a model whose rows have these pages."""
        config, limits = self.program.config, (self.program.plan.max_len, self.program.key.limit)
        return StepContext(batch, model, *limits, backend, config.shards, table=table, run=config.prefill_unit)

    def split(self, cache: Arrays) -> tuple[Caches, Caches]:
        """The caches of the model, and of one that drafts."""
        caches, count = self.program.plan.view(cache), len(self.program.plan.blocks)
        return caches[:count], caches[count:]

    def mailboxes(self) -> Mailboxes | None:
        """State of the fused all-reduce, if decode steps take it. It is opened once; each step passes it on."""
        model, config, key = self.program.model, self.program.config, self.program.key
        if self.program.feature_layers or not fuses_all_reduce(model, config, key):
            return None
        axis = config.shards.only_axis
        assert axis is not None  # `fuses_all_reduce` needs one
        return open_mailboxes(key.decoded, model.config.dim, axis)

    def counted_rows(self, rows: RowState) -> jax.Array:
        """The rows [B] whose choices of experts this device counts. Devices that prompts are dealt out to have the same
        rows."""
        return rows.active & (self.program.config.shards.index(axes.TOKENS) == 0)

    def logits(self, decoder: Decoder, hidden: jax.Array) -> jax.Array:
        config = self.program.config
        return decoder.logits(hidden, config.shards, config.backend.matmul)

    def row_logits(
        self,
        weights: Arrays,
        cache: Arrays,
        rows: RowState,
        mailboxes: Mailboxes | None,
        prefixes: SharedPrefixes | None = None,
    ) -> tuple[Pass, jax.Array]:
        """A pass over each row's last token, and logits [B, V] of the next one."""
        rows = self.program.with_room(rows)
        counted = self.counted_rows(rows)
        ran = self(weights, cache, rows_batch(rows), rows, counted, mailboxes=mailboxes, prefixes=prefixes)
        return ran, self.logits(ran.decoder, ran.hidden)

    def draft_logits(
        self, weights: Arrays, cache: Arrays, rows: RowState, drafts: jax.Array, mailboxes: Mailboxes | None
    ) -> tuple[Pass, jax.Array, jax.Array]:
        """A pass over each row's last token and its drafts [B, C - 1]; logits [B, C, V] behind them; and how many
        tokens [B] of each row that are."""
        batch, counts = verification_batch(rows, drafts, self.program.model.config.vocab)
        counted = (batch.decode_positions >= 0) & self.counted_rows(rows)[:, None]
        ran = self(weights, cache, batch, rows, counted.reshape(-1), mailboxes=mailboxes)
        hidden = hidden_of_tokens(ran.hidden, counts)
        logits = self.logits(ran.decoder, hidden.reshape(-1, hidden.shape[-1]))
        return ran, logits.reshape(*hidden.shape[:2], -1), counts

    def replay(self, decoder: Decoder, cache: Arrays, inputs: Inputs, counts: jax.Array) -> Arrays:
        """The cache after a decode step in which `counts` [B] tokens of each row stand: states of recurrent layers have
        these alone. inputs: of each block, what the step read."""
        if not any(inputs):
            return cache
        caches, of_drafts = self.split(cache)
        caches = tuple(replace(cache, inputs=of_block) for cache, of_block in zip(caches, inputs, strict=True))
        return self.program.plan.flatten(replay(decoder, caches, counts) + of_drafts)

    def depths_of_rows(self, ran: Pass, counts: jax.Array | None = None) -> jax.Array | None:
        """How many steps of a loop's core the tokens of a pass over decode rows took, [C, B], if they may leave it.
        counts [B]: of a pass that verifies drafts, how many tokens of each row it has."""
        if ran.taken is None:
            return None
        if counts is None or not self.program.key.drafts:
            return ran.taken[None]
        return hidden_of_tokens(ran.taken[:, None], counts)[..., 0].T

    def depths(self, ran: Pass, chunks: tuple[int, ...], lengths: jax.Array) -> dict[str, jax.Array | None]:
        """The output's fields with depths, if tokens may leave. chunks: P and C; lengths [P]: tokens of each chunk."""
        if ran.taken is None:
            return {}
        split = prod(chunks)
        ends = last_of_chunks(ran.taken[:split].reshape(*chunks, 1), lengths, self.program.config.shards)[:, 0]
        return {"depths": ran.taken[None, split:] if self.program.key.rows else None, "chunk_depths": ends}

    def pooled(self, decoder: Decoder, chunks: jax.Array, valid: jax.Array, lengths: jax.Array) -> jax.Array:
        """Hidden states behind the final norm, float32 [P, 2, D]: the sum over a chunk's tokens, and the last token's.

        chunks [P, C, D]: hidden states. valid [P, C] bool: False for padding. lengths [P]: tokens of each chunk.
        """
        shards = self.program.config.shards
        every = decoder.normed(chunks, shards).astype(jnp.float32)
        total = shards.sum(jnp.where(valid[..., None], every, 0).sum(axis=1), axes.TOKENS)
        last = decoder.normed(last_of_chunks(chunks, lengths, shards), shards).astype(jnp.float32)
        return jnp.stack([total, last], axis=1)
