"""Embeddings: one vector of the hidden states of a prompt."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from inferlib.option_checks import brief

Pooling = Literal["last", "mean"]


def check_pooling(pooling: Any) -> Pooling:
    """A pooling. Raises ValueError for one that there is not."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be 'last' or 'mean', got {brief(pooling)}")
    return pooling


def pooled(detail: np.ndarray, tokens: int, pooling: Pooling, normalize: bool) -> np.ndarray:
    """The embedding [D] of a prompt of `tokens` tokens. detail [2, D]: its hidden states' sum, and the last one."""
    vector = detail[1] if pooling == "last" else detail[0] / np.float32(tokens)
    length = np.linalg.norm(vector)
    return vector / length if normalize and length > 0 else vector
