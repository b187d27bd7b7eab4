"""Drafts from a row's own tokens: what followed the last place that looks like its end (prompt lookup decoding, Saxena
2023; the n-gram drafter of vLLM).

Shapes: B rows; M positions of the longest sequence; k drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class NgramDrafter:
    """longest: most tokens of the end that are looked for; fewer do where no place has as many."""

    longest: int = 4

    def propose(self, history: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        """See `inferlib.speculation.settings.Drafter`.

        Of the places that agree with most of the last tokens, the latest counts. Where its continuation reaches the
        end, it goes on as if that repeated for ever.
        """
        positions, last = jnp.arange(history.shape[1]), lengths[:, None] - 1
        agreeing = jnp.zeros(history.shape, jnp.int32)
        agrees = positions < last
        for back in range(self.longest):
            ending = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
            shifted = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, : history.shape[1]]
            agrees &= (shifted == ending) & (positions >= back)
            agreeing += agrees
        # The most agreement, then the latest place. Two reductions: Trainium has no argmax.
        rank = jnp.where(agreeing > 0, agreeing * history.shape[1] + positions, -1)
        best = rank.max(axis=1, keepdims=True)
        place = best % history.shape[1]
        ahead = jnp.arange(count) % jnp.maximum(last - place, 1)
        drafts = jnp.take_along_axis(history, jnp.clip(place + 1 + ahead, 0, history.shape[1] - 1), axis=1)
        return jnp.where(best >= 0, drafts, -1)
