"""Drafts inside a program: from a row's own history, or by a model that drafts.

Shapes: B rows; C tokens of a row, 1 and its drafts; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepBatch
from inferlib.programs.arguments import ChunkInput
from inferlib.programs.context import ProgramContext
from inferlib.programs.forward_pass import Arrays, ForwardPass, Pass
from inferlib.programs.row_state import RowState
from inferlib.sampling.sampler import sample, unpack
from inferlib.sharding import axes
from inferlib.speculation.drafter import DraftRows, DraftTools, Followed, ModelDrafter, Pending
from inferlib.speculation.settings import Speculation


@dataclass(frozen=True)
class Drafting:
    """What drafts for the rows, and what a model that drafts reads beside the model."""

    program: ProgramContext
    forward_pass: ForwardPass

    def propose(
        self, speculation: Speculation, weights: Arrays, cache: Arrays, rows: RowState
    ) -> tuple[Arrays, jax.Array]:
        """The cache, and the drafts of each row: as many as the key has, or one to see whether it would stand."""
        assert rows.history is not None
        count = max(self.program.key.drafts, 1)
        if (drafter := self.program.drafter) is None:
            return cache, speculation.drafter.propose(rows.history, rows.length + 1, count)
        caches, of_drafts = self.forward_pass.split(cache)
        tools = self.tools(drafter, weights, rows)
        of_drafts, drafts = drafter.propose(tools, of_drafts, self.draft_rows(rows), count)
        return self.program.plan.flatten(caches + of_drafts), drafts

    def follow(
        self, weights: Arrays, ran: Pass, state: RowState, batch: StepBatch, chunk: ChunkInput | None
    ) -> tuple[Arrays, RowState]:
        """The cache and the state after a step that drafts nothing, in which a model that drafts reads the same
        tokens."""
        if (drafter := self.program.drafter) is None:
            return ran.cache, state
        rows, following = state.head(self.program.key.rows), jnp.zeros((0, 0), jnp.int32)
        table = None if chunk is None else chunk.unpack()
        if chunk is not None and table is not None:
            following = self.program.config.shards.stripe(axes.TOKENS).take(chunk.following(table), dim=1)
        caches, of_drafts = self.forward_pass.split(ran.cache)
        step = Followed(batch, following, self.draft_rows(rows), ran.features)
        after = drafter.follow(self.tools(drafter, weights, state), of_drafts, step)
        if after.rows is not None:
            state = state.with_head(rows._replace(**after.rows._asdict()))
        if table is not None and after.ends is not None:
            at = jnp.where(table.last != 0, table.row, state.token.size)
            state = state.with_pending(at, *after.ends)
        return self.program.plan.flatten(caches + after.caches), state

    def with_pending(self, weights: Arrays, ran: Pass, rows: RowState, counts: jax.Array) -> RowState:
        """The rows with what is pending after a decode step that verified `counts` [B] tokens of each."""
        if (drafter := self.program.drafter) is None:
            return rows
        tools = self.tools(drafter, weights, rows)
        pending = drafter.pending(tools, self.draft_rows(rows), ran.features, counts)
        return rows if pending is None else rows._replace(**pending._asdict())

    def tools(self, drafter: ModelDrafter, weights: Arrays, rows: RowState) -> DraftTools:
        """What a model that drafts needs, for rows of this state."""
        model, config, count = drafter.model, self.program.config, len(self.program.model.specs)
        context = partial(self.forward_pass.context, model.config, drafter.backend, rows.pages)
        modules = model.module(weights[count:]), self.program.model.merge(weights[:count])
        speculation, columns = config.speculation, rows.counts.shape[1]
        most = 1 if speculation is None else 1 + speculation.tokens
        return DraftTools(*modules, context, partial(self.next_token, rows), columns, most, config.shards)

    def next_token(self, rows: RowState, logits: jax.Array, ahead: jax.Array | int) -> jax.Array:
        """The token [B] that each row would choose by logits [B, V], `ahead` tokens ahead of its next one."""
        vocabulary = self.program.vocabulary
        if self.program.key.mode == "greedy":
            return sample(logits, None, None, None, mode="greedy", vocabulary=vocabulary).token
        params, number = unpack(rows.ints, rows.floats), rows.generated + ahead
        return sample(logits, params, rows.counts, number, mode="sample", vocabulary=vocabulary).token

    def draft_rows(self, rows: RowState) -> DraftRows:
        """Rows as a model that drafts takes them."""
        assert rows.history is not None
        pending = None if rows.first is None else Pending(rows.features, rows.first)
        return DraftRows(rows.history, rows.length, jnp.where(rows.active, rows.budget, 0), pending)
