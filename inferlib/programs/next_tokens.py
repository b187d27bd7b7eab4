"""The next token of each row: sampled from its logits, and accounted for in the row's state.

Shapes: B rows; C tokens of a row, 1 and its drafts; P chunks; V vocabulary; W words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.programs.arguments import ChunkInput, ChunkTable, Masks
from inferlib.programs.context import ProgramContext
from inferlib.programs.row_state import NUMBERS, RowState
from inferlib.programs.verification import Advance, accepted
from inferlib.sampling.drafted import sample_drafted
from inferlib.sampling.sampler import Sampled, count_tokens, follow_bad_words, is_stop, mark_prompt, sample, unpack


@dataclass(frozen=True)
class NextTokens:
    """How rows of a program get their tokens."""

    program: ProgramContext

    def advance(self, rows: RowState, logits: jax.Array, mask: jax.Array | None = None) -> tuple[RowState, Sampled]:
        """Sample the next token of every row, of those in its mask, and account for it; inactive rows yield -1."""
        params, program = unpack(rows.ints, rows.floats), self.program
        more: Any = dict(mode=program.sampling_mode, vocabulary=program.vocabulary, mask=mask)
        return self.account(rows, sample(logits, params, rows.counts, rows.generated, **more))

    def account(self, rows: RowState, sampled: Sampled) -> tuple[RowState, Sampled]:
        """The rows with their next token; inactive rows stay as they are and yield -1."""
        params = unpack(rows.ints, rows.floats)
        token, counts, floats = sampled.token, rows.counts, rows.floats
        if self.program.key.mode != "greedy":
            counts = count_tokens(counts, token, rows.active, self.program.vocabulary)
            floats = follow_bad_words(params, floats, token)
        live = rows.active.astype(jnp.int32)
        budget = rows.budget - live
        at = jnp.where(rows.active, rows.length + 1, self.program.plan.max_len)
        rows = rows.with_tokens(jnp.arange(token.size), at, token)
        rows = rows._replace(
            token=jnp.where(rows.active, token, rows.token),
            length=rows.length + live,
            budget=budget,
            generated=rows.generated + live,
            floats=floats,
            counts=counts,
            active=rows.active & ~is_stop(params, token) & (budget > 0),
            taken=None if rows.taken is None else jnp.where(rows.active, -1, rows.taken),
        )
        return rows, sampled._replace(token=jnp.where(live > 0, token, -1))

    def advance_any(self, rows: RowState, logits: jax.Array) -> tuple[RowState, Sampled]:
        """`advance`, which is left out if no row is active."""
        advance = self._traced_advance
        _, shapes = jax.eval_shape(advance, rows, logits)
        nothing = jax.tree.map(lambda s: jnp.full(s.shape, -1, s.dtype), shapes)
        return lax.cond(self.program.any_row(rows.active), advance, lambda rows, _: (rows, nothing), rows, logits)

    @cached_property
    def _traced_advance(self) -> Callable:
        """`advance`, which is traced once for all positions."""
        return jax.jit(self.advance)

    def advance_at(self, rows: RowState, logits: jax.Array, drafts: jax.Array) -> Advance:
        """How `accepted` advances the rows at each position of logits [B, C, V]."""
        if self.program.key.mode != "greedy" and self.program.branches_are_cheap:
            return lambda rows, i: self.advance_any(rows, logits[:, i])
        params = unpack(rows.ints, rows.floats)
        more: Any = dict(mode=self.program.sampling_mode, vocabulary=self.program.vocabulary)
        sampled = sample_drafted(logits, params, rows.counts, rows.generated, drafts, **more)
        return lambda rows, i: self.account(rows, jax.tree.map(lambda x: x[i], sampled))

    def advance_with_room(
        self, rows: RowState, logits: jax.Array, mask: jax.Array | None = None
    ) -> tuple[RowState, Sampled]:
        """`advance`; rows that wait for their cache to be compacted stay as they are, and yield -1."""
        able = self.program.with_room(rows)
        new, sampled = self.advance(able, logits, mask)
        if able is rows:
            return new, sampled
        waits = rows.active & ~able.active
        floats = jnp.where(waits[:, None], rows.floats, new.floats)
        return new._replace(active=new.active | waits, floats=floats), sampled

    def choose_rows(self, rows: RowState, logits: jax.Array, masks: Masks) -> tuple[RowState, Sampled]:
        """The rows after their next token, and this, [1, B]; or with drafts [C, B]."""
        if not self.program.key.drafts:
            rows, sampled = self.advance_with_room(rows, logits, masks.rows)
            return rows, jax.tree.map(lambda x: x[None], sampled)

        def advance(rows: RowState, i: int) -> tuple[RowState, Sampled]:
            return self.advance(rows, logits[:, i], masks.rows[:, i])

        rows, sampled, _ = accepted(advance, rows, masks.drafts, logits.shape[1])
        return rows, sampled

    def admit(
        self, state: RowState, logits: jax.Array, mask: jax.Array | None, chunk: ChunkInput, table: ChunkTable
    ) -> tuple[RowState, Sampled]:
        """Start decoding the rows whose prompt ends in this step, with their first token [P], from logits [P, V]."""
        total, samples = state.token.shape[0], self.program.key.mode != "greedy"
        last = table.last != 0
        zeros = jnp.zeros_like(table.row)
        counts = state.counts
        if samples:
            kinds = chunk.kinds(table)
            counts = mark_prompt(counts, table.row, chunk.tokens, kinds, table.first, self.program.vocabulary)
        fresh = RowState(
            token=zeros,
            length=table.start + table.length - 1,
            active=last,
            budget=table.budget,
            generated=jnp.maximum(table.start + table.length - table.generated, 0),
            ints=chunk.ints,
            floats=chunk.floats,
            counts=counts[jnp.minimum(table.row, total - 1)] if samples else zeros[:, None],
            pages=state.pages,
        )
        fresh, sampled = self.advance(fresh, logits, mask)
        rows = jnp.where(last, table.row, total)
        if samples:
            # Prompts stay marked if they go on in the next step.
            counts = counts.at[rows].set(fresh.counts, mode="drop")
        shared = dict.fromkeys(("counts", "pages", "history", "features", "core", "ahead", *NUMBERS))
        old, new = state._replace(**shared), fresh._replace(**shared)
        new = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), old, new)
        new = new._replace(**{name: getattr(state, name) for name in shared} | {"counts": counts}).not_begun(rows)
        at = jnp.arange(chunk.tokens.shape[1])
        positions = jnp.where(at < table.length[:, None], table.start[:, None] + at, self.program.plan.max_len)
        new = new.with_tokens(table.row[:, None], positions, chunk.tokens)
        return new.with_tokens(rows, table.start + table.length, sampled.token), sampled
