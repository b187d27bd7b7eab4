"""What is measured of each token of a text, and its mean with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DEVIATIONS = 1.96  # of a normal distribution, on either side, for 95 %


@dataclass(frozen=True)
class Mean:
    """A mean over tokens and half of its 95 % confidence interval; None from a single window."""

    value: float
    margin: float | None

    @staticmethod
    def of(windows: Sequence[np.ndarray]) -> Mean:
        """The mean of all tokens' numbers, which are given by window. Tokens of a window resemble each other, so the
        interval is from the spread of windows."""
        sums, counts = np.array([w.sum() for w in windows]), np.array([len(w) for w in windows])
        value = float(sums.sum() / counts.sum())
        if len(windows) < 2:
            return Mean(value, None)
        rest = sums - value * counts
        variance = len(windows) / (len(windows) - 1) * float(np.sum(rest**2)) / float(counts.sum()) ** 2
        return Mean(value, _DEVIATIONS * math.sqrt(variance))

    def text(self, digits: int) -> str:
        return f"{self.value:.{digits}f}" + ("" if self.margin is None else f" ± {self.margin:.{digits}f}")


@dataclass(frozen=True)
class Scores:
    """Numbers of the tokens of one window of W tokens.

    surprisal [W - 1]: -log p of each token but the first, in nats. divergence [W]: Kullback-Leibler divergence of the
    next token's distribution from the other model's, in nats; agreement [W]: whether both find the same token most
    likely. Both are None without another model.
    """

    surprisal: np.ndarray
    divergence: np.ndarray | None = None
    agreement: np.ndarray | None = None

    @staticmethod
    def of(tokens: np.ndarray, logits: np.ndarray, other: np.ndarray | None = None) -> Scores:
        """tokens [W]; logits [W, V], of the model and perhaps of the other one."""
        logp = log_probabilities(logits)
        surprisal = -logp[np.arange(len(tokens) - 1), tokens[1:]]
        if other is None:
            return Scores(surprisal)
        base = log_probabilities(other)
        with np.errstate(invalid="ignore"):  # tokens without probability add nothing
            terms = np.where(base > -np.inf, np.exp(base) * (base - logp), 0.0)
        return Scores(surprisal, terms.sum(axis=1), logp.argmax(axis=1) == base.argmax(axis=1))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """[W, V] float64."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
