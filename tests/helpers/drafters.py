"""Drafters for tests: they know what the model says, and may say something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["right", "wrong", "beyond", "negative", "none"]


@dataclass(frozen=True)
class Prompter:
    """Drafts of texts that are known: prompts and their outputs. A row whose history is the beginning of none of them
    gets no draft.

    kinds: of the drafts of each text, by their position in turn: right, wrong, out of the vocabulary, below it, or
    none.
    """

    texts: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[Kind, ...], ...]

    @staticmethod
    def of(texts: Sequence[Sequence[int]], *kinds: Kind) -> Prompter:
        return Prompter(tuple(map(tuple, texts)), (kinds or ("right",),) * len(texts))

    def propose(self, history: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        size = history.shape[1]
        texts = np.full((len(self.texts), size + count), -1, np.int32)
        for i, text in enumerate(self.texts):
            texts[i, : len(text)] = text
        behind = jnp.arange(size) >= lengths[:, None]
        agrees = jnp.all((history[:, None] == texts[:, :size]) | behind[:, None], axis=2)
        positions = lengths[:, None] + jnp.arange(count)
        chosen = jnp.argmax(agrees, axis=1)
        text = jnp.asarray(texts)[chosen]
        right = jnp.take_along_axis(text, jnp.minimum(positions, size + count - 1), axis=1)
        forms = jnp.stack([right, (right + 1) % 90, right + (1 << 20), -right - 2, jnp.full_like(right, -1)])
        order = ("right", "wrong", "beyond", "negative", "none")
        turns = [[order.index(kinds[i % len(kinds)]) for i in range(size + count)] for kinds in self.kinds]
        numbers = jnp.asarray(np.array(turns))[chosen[:, None], positions]
        drafts = jnp.take_along_axis(forms, numbers[None], axis=0)[0]
        return jnp.where(jnp.any(agrees, axis=1)[:, None] & (right >= 0), drafts, -1)
