"""Verification: a step computes drafted tokens as if they were known, and keeps those that it would have chosen.

Noise depends on the seed and the number of a token alone, so each position is sampled as it is without drafts, and a
draft stands if it is what was sampled before it. The tokens are therefore those of decoding one by one, whatever the
sampling options. For drafts without noise of their own, as many stand as by rejection sampling.

Shapes: B rows; k drafts; C = 1 + k tokens of a row in one step; V columns of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.models.batch import StepBatch, rolled
from inferlib.programs.row_state import RowState
from inferlib.sampling.sampler import Sampled

Advance = Callable[[RowState, Any], tuple[RowState, Sampled]]


def verification_batch(rows: RowState, drafts: jax.Array, vocab: int) -> tuple[StepBatch, jax.Array]:
    """Each row's last token and its drafts, as many as it may still generate [B]: no cell lies beyond its pages."""
    tokens = jnp.concatenate([rows.token[:, None], jnp.clip(drafts, 0, vocab - 1)], axis=1)
    counts = jnp.where(rows.active, jnp.minimum(tokens.shape[1], rows.budget), 0)
    lengths = jnp.where(rows.active, rows.length + counts, 0)
    return StepBatch.of_rows(rolled(tokens, counts), lengths, counts), counts


def hidden_of_tokens(hidden: jax.Array, counts: jax.Array) -> jax.Array:
    """Hidden states [B * C, D] of a verification batch -> [B, C, D], a row's first token first."""
    rows = counts.shape[0]
    return rolled(hidden.reshape(rows, -1, hidden.shape[1]), -counts)


class Tally(NamedTuple):
    """Drafts of each of B rows. tried: how many could stand, as all before them did and the row went on; stood: how
    many did."""

    tried: jax.Array
    stood: jax.Array


def accepted(
    advance: Advance, rows: RowState, drafts: jax.Array, positions: int, *, loop: bool = False
) -> tuple[RowState, Sampled, Tally]:
    """The rows after the tokens that they generate in a step; these, [C, B], of which those behind the first draft that
    does not stand are -1; and what became of the drafts.

    advance: accounts for the token of every active row at a position: 0 follows the last token, i the i-th draft.
    drafts: at least C - 1 of each row; one more is only compared. positions: C. loop: the program has `advance` once,
    in a loop over the positions, instead of C times.
    """

    def position(carry: tuple, at: tuple) -> tuple[tuple, Sampled]:
        (rows, going, tally), (i, draft, compared) = carry, at
        new, sampled = advance(rows._replace(active=going), i)
        floats = jnp.where(going[:, None], new.floats, rows.floats)
        rows = new._replace(active=jnp.where(going, new.active, rows.active), floats=floats)
        tried = going & rows.active & compared
        going = tried & (sampled.token == draft)
        return (rows, going, Tally(tally.tried + tried, tally.stood + going)), sampled

    numbers = np.arange(positions)
    places = numbers, jnp.take(drafts, numbers, axis=1, mode="clip").T, numbers < drafts.shape[1]
    carry: tuple = rows, rows.active, Tally(*jnp.zeros((2, rows.token.size), jnp.int32))
    if loop and positions > 1:
        carry, sampled = lax.scan(position, carry, places)
    else:
        steps = []
        for i, draft, compared in zip(*places, strict=True):
            carry, one = position(carry, (int(i), draft, bool(compared)))
            steps.append(one)
        sampled = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    return carry[0], sampled, carry[2]


def gathered(outs: Sampled, done: jax.Array, sampled: Sampled) -> Sampled:
    """`outs` [N, B, ...] with the tokens of a step, [C, B, ...], behind those that a row has: `done` [B]."""
    steps, rows = sampled.token.shape
    places = jnp.where(sampled.token >= 0, done + jnp.arange(steps)[:, None], outs.token.shape[0])
    return jax.tree.map(lambda out, x: out.at[places, jnp.arange(rows)].set(x, mode="drop"), outs, sampled)
