"""Caches of latents, for tests of attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """rank, rotary: numbers of a latent and of its rotary key (r and R); slots: of a page (N); columns: pages of a row
    in a shuffled table (M), None: rows are pages; fold: positions of a row of rotary keys; layers: of a stacked cache,
    of which the last is read; loudness: standard deviation of queries."""

    rank: int = 128
    rotary: int = 64
    fold: int = 2
    slots: int = 512
    columns: int | None = None
    layers: int | None = None
    dtype: Any = jnp.float32
    loudness: float = 1.0

    def empty(self, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """A table [rows, M], and cells [P, N, r + R] of NaN and infinities; two pages are no row's."""
        columns = self.columns or 1
        count, table = rows * columns + 2, np.arange(rows)[:, None]
        if self.columns:
            table = rng.permutation(count)[: rows * columns].reshape(rows, columns)
        cells = np.full((count, self.slots, self.rank + self.rotary), np.nan)
        cells[:, ::2] = np.inf
        return table, cells
