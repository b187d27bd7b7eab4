"""A smaller model of the same vocabulary that drafts (Leviathan et al., ICML 2023; Chen et al. 2023).

Its cells lie in the pages of the target's: a row has one table of pages. So prompts that begin alike share both, and
rows that move, lose their pages or fetch them from a tier need nothing more. Cells of drafts that do not stand are
overwritten, as those of the target are.

Drafts are sampled by the row's own parameters, with the noise of the token's number. The target takes the same noise,
so at a temperature too both mostly choose alike where their distributions do.

Shapes: B rows; k drafts; D wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch
from inferlib.models.decoder import Forward
from inferlib.ops.backend import Backend
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
class DraftModel:
    """See `inferlib.speculation.drafter.ModelDrafter`."""

    model: AbstractModel
    backend: Backend

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def defers(self) -> bool:
        return False

    def follow(self, tools: DraftTools, caches: Caches, step: Followed) -> AfterStep:
        return AfterStep(tools.module(tools.context(_with_former(step.batch, step.rows)), caches).cache)

    def pending(
        self, tools: DraftTools, rows: DraftRows, features: jax.Array | None, counts: jax.Array
    ) -> Pending | None:
        return None

    def begin(self, tools: DraftTools, caches: Caches, rows: DraftRows) -> tuple[jax.Array, Caches]:
        """The first draft [B] of each row. The step takes a row's last two tokens: if all drafts stood before, the last
        of them has no cell."""
        positions = jnp.maximum(rows.lengths[:, None] + jnp.array([-1, 0]), 0)
        tokens, runs = jnp.take_along_axis(rows.history, positions, axis=1, mode="clip"), rows.room > 0
        batch = StepBatch.of_rows(tokens, jnp.where(runs, rows.lengths + 1, 0), jnp.where(runs, 2, 0))
        ran = tools.module(tools.context(batch), caches)
        return self.chosen(tools, batch, ran, 0), ran.cache

    def after(self, tools: DraftTools, begun: Caches, caches: Caches) -> Caches:
        """The caches that drafting leaves: `begun` behind the first draft, `caches` behind the last one."""
        return caches

    def propose(self, tools: DraftTools, caches: Caches, rows: DraftRows, count: int) -> tuple[Caches, jax.Array]:
        first, begun = self.begin(tools, caches, rows)

        def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            arrays, drafts = carry
            token = lax.dynamic_index_in_dim(drafts, i - 1, axis=1, keepdims=False)
            batch = StepBatch.of_rows(token, jnp.where(rows.room > i, rows.lengths + 1 + i, 0))
            ran = tools.module(tools.context(batch), with_arrays(begun, arrays))
            token = self.chosen(tools, batch, ran, i)
            return arrays_of(ran.cache), lax.dynamic_update_index_in_dim(drafts, token, i, axis=1)

        drafts = jnp.zeros((first.size, count), jnp.int32).at[:, 0].set(first)
        if count == 1:
            return begun, drafts
        arrays, drafts = lax.fori_loop(1, count, step, (arrays_of(begun), drafts))
        return self.after(tools, begun, with_arrays(begun, arrays)), drafts

    def chosen(self, tools: DraftTools, batch: StepBatch, ran: Forward, ahead: jax.Array | int) -> jax.Array:
        """Drafts [B] behind the last token of each row of a step, `ahead` tokens behind its next one."""
        last = ran.hidden.reshape(*batch.decode_tokens.shape, -1)[:, -1]
        return tools.choose(tools.module.logits(last, tools.shards, self.backend.matmul), ahead)


def _with_former(batch: StepBatch, rows: DraftRows) -> StepBatch:
    """A batch whose rows begin with one token more, the one before: it has no cell if all drafts stood before."""
    count, lengths = batch.decode_tokens.shape[1], batch.decode_lengths
    counts = (lengths > 0).astype(jnp.int32) if batch.decode_counts is None else batch.decode_counts
    former = jnp.take_along_axis(rows.history, jnp.maximum(rows.lengths - 1, 0)[:, None], axis=1, mode="clip")
    tokens = jnp.pad(batch.decode_tokens, ((0, 0), (1, 0)))
    tokens = jnp.where(jnp.arange(count + 1) == count - counts[:, None], former, tokens)
    return batch._replace(decode_tokens=tokens, decode_counts=jnp.where(counts > 0, counts + 1, 0))
