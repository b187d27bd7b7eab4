"""What several kernels' cases draw, at random or not, the same each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shuffled_pages(lengths: Sequence[int], page: int) -> np.ndarray:
    """A table [rows, columns] int32 of pages of `page` positions in no order, as long as the longest row needs."""
    columns = -(-max(lengths) // page)
    return np.random.default_rng(1).permutation(len(lengths) * columns).reshape(-1, columns).astype(np.int32)


def unequal(most: int, rows: int) -> tuple[int, ...]:
    """Lengths of rows, in even steps up to the largest."""
    return tuple(most * (row + 1) // rows for row in range(rows))


def tokens_of_experts(tokens: int, experts: int, chosen: int) -> np.ndarray:
    """[experts]: how many of `tokens` tokens, each of which takes `chosen` different experts, took each."""
    rng = np.random.default_rng(0)
    picks = np.concatenate([rng.permutation(experts)[:chosen] for _ in range(tokens)])
    return np.bincount(picks, minlength=experts)
