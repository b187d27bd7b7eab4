"""A draft model whose layers keep states.

A state does not go back, so it has tokens that stand and no others. A drafting step first runs what was generated since
the step before, up to the row's last token, and leaves this in the states. From there each further draft goes on, on
states that are dropped in the end. Cells of its layers with attention lie in pages, and are overwritten as ever.

Shapes: B rows; C tokens of a row that a step verifies at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepBatch, rolled
from inferlib.models.decoder import Forward
from inferlib.models.recurrent import Recurrent
from inferlib.models.replay import replay
from inferlib.speculation.draft_model import DraftModel
from inferlib.speculation.drafter import AfterStep, Caches, DraftRows, DraftTools, Followed, Pending


@dataclass(frozen=True, eq=False)
class RecurrentDraftModel(DraftModel):
    """See `inferlib.speculation.drafter.ModelDrafter`."""

    @property
    def defers(self) -> bool:
        return True

    def follow(self, tools: DraftTools, caches: Caches, step: Followed) -> AfterStep:
        """One pass over chunks and what is pending of rows, the last token of each among it. Drafts of the host, if
        they stand, are pending then."""
        rows = _pending(step.rows, tools.most)
        batch = step.batch._replace(
            decode_tokens=rows.decode_tokens, decode_lengths=rows.decode_lengths, decode_counts=rows.decode_counts
        )
        caches = _settled(tools, batch, tools.module(tools.context(batch), caches))
        ends = step.batch.chunk_starts + step.batch.chunk_lengths
        return AfterStep(caches, _without_features(step.rows), Pending(None, ends))

    def pending(
        self, tools: DraftTools, rows: DraftRows, features: jax.Array | None, counts: jax.Array
    ) -> Pending | None:
        return _without_features(rows)

    def begin(self, tools: DraftTools, caches: Caches, rows: DraftRows) -> tuple[jax.Array, Caches]:
        batch = _pending(rows, tools.most)
        ran = tools.module(tools.context(batch), caches)
        return self.chosen(tools, batch, ran, 0), _settled(tools, batch, ran)

    def after(self, tools: DraftTools, begun: Caches, caches: Caches) -> Caches:
        pairs = zip(tools.module.blocks, begun, caches, strict=True)
        return tuple(old if isinstance(block.spec.attention, Recurrent) else new for block, old, new in pairs)


def _pending(rows: DraftRows, most: int) -> StepBatch:
    """What is pending of rows that run, [B, C] behind padding."""
    assert rows.pending is not None
    first, runs = rows.pending.first, rows.room > 0
    counts = jnp.where(runs, jnp.clip(rows.lengths + 1 - first, 0, most), 0)
    tokens = jnp.take_along_axis(rows.history, first[:, None] + jnp.arange(most), axis=1, mode="clip")
    return StepBatch.of_rows(rolled(tokens, counts), jnp.where(runs, rows.lengths + 1, 0), counts)


def _without_features(rows: DraftRows) -> Pending:
    """No pending features; each row that runs is done up to its last token."""
    assert rows.pending is not None
    return Pending(None, jnp.where(rows.room > 0, rows.lengths + 1, rows.pending.first))


def _settled(tools: DraftTools, batch: StepBatch, ran: Forward) -> Caches:
    """The caches after a pass, with all tokens of its rows in the states."""
    assert batch.decode_counts is not None
    return tuple(replace(cache, inputs=()) for cache in replay(tools.module, ran.cache, batch.decode_counts))
