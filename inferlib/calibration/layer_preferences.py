"""`measure_layer_preferences`: which layers need much of a bounded cache, measured on a text (see
`inferlib.models.layer_preferences`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.attention_values import AttentionOptions
from inferlib.calibration.compiled import compiled
from inferlib.calibration.measured import Measurement
from inferlib.checkpoint.layer_arrays import PREFERENCES
from inferlib.config import check_compacted
from inferlib.model_files import ModelFiles
from inferlib.models.config import AttentionSpec, ConfigError
from inferlib.ops.cache_policy import CachePolicy
from inferlib.ops.recent_queries import recent_weights
from inferlib.option_checks import ConfigurationError, brief
from inferlib.texts import TextSample

_QUERIES = 32  # of the newest positions, by which the policy judges too by default
_LEAST_WINDOW = 2 * _QUERIES
_LEAST = 1e-30  # of a preference, so that each layer has some
_LEAST_TAU = 0.2  # with less, preferences of models with many heads are beyond float32
_POLICY = CachePolicy("cake", 1024, _QUERIES)


def measure_layer_preferences(
    model: str | Path,
    *,
    data: str | Path | Sequence[str] | TextSample,
    tau1: float = 1.0,
    tau2: float = 1.0,
    revision: str | None = None,
    progress: bool | None = None,
) -> Path:
    """Measure the preferences on a text, and write them beside the model, where `LLM(model, cache_policy="cake:2048")`
    finds them; returns the file.

    model, revision: as for `LLM`; an unquantised checkpoint with a tokenizer. data: text of the kind that the model
    will see, see `TextSample`; each window of it, of 64 tokens or more, stands for a prompt, so windows should be as
    long as prompts. Of the attention of a window's newest 32 positions to all older ones, the entropy shows how far it
    is spread, and the variance over these 32 how much it changes. A layer's preference is the entropy, to the power of
    1 / tau1, times the variance, to the power of 1 / tau2 (Qin et al. 2025, "CAKE",
    https://arxiv.org/abs/2503.12491). The larger these, the more alike are the budgets of layers. The paper tunes both
    for each model and budget, to values between 0.4 and 2.3.

    Layer by layer: the memory taken is a layer's, and the residual of the text on the host. Raises CheckpointError,
    ConfigError or ConfigurationError before long work, also if the file cannot be written, and OSError for a full disk.
    """
    for name, value in (("tau1", tau1), ("tau2", tau2)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not _LEAST_TAU <= value <= 100:
            raise ConfigurationError(f"{name} must be a number between {_LEAST_TAU} and 100, got {brief(value)}")
    sample = data if isinstance(data, TextSample) else TextSample(data)
    if sample.window < _LEAST_WINDOW:
        raise ConfigurationError(
            f"preferences are of the newest {_QUERIES} tokens of a window, which see the others: take windows of "
            f"{_LEAST_WINDOW} tokens or more, got {sample.window}"
        )
    statistic = partial(_statistic, powers=(1 / tau1, 1 / tau2))
    what = Measurement(PREFERENCES, "measure", "measuring attention", _check, statistic, keep_queries=True)
    return what.run(model, sample, revision=revision, progress=progress)


class Preferences:
    """The preference of a layer in each window of `width` tokens. options: how its queries weigh keys. powers: of the
    entropy and the variance."""

    def __init__(self, options: AttentionOptions, width: int, powers: tuple[float, float]):
        self.options, self.width, self.powers = options, width, powers
        self.of_windows: list[float] = []

    def add(self, arrays: tuple[jax.Array, ...]) -> None:
        """Keys [N, K, S, h] of N windows, in their first slots, and last their queries [N, K, W, G * h]."""
        keys, queries = arrays[0][:, :, : self.width], arrays[-1][:, :, self.width - _QUERIES : self.width]
        for window in zip(keys, queries, strict=True):  # one after the other, as weights are large
            both = _entropy_and_variance(*window, scale=self.options.scale, softcap=self.options.softcap)
            entropy, variance = np.maximum(np.asarray(both, np.float64), 0)
            self.of_windows.append(entropy ** self.powers[0] * variance ** self.powers[1])

    def result(self) -> np.ndarray:
        """[N] float32"""
        return np.maximum(self.of_windows, _LEAST).astype(np.float32)


@compiled(static_argnames=("scale", "softcap"))
def _entropy_and_variance(keys: jax.Array, queries: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """[2] float32 of keys [K, P, h] and the queries [K, W, G * h] of the newest positions, the oldest first: the
    entropy of attention to older positions, summed over queries; and its variance over queries, summed over these
    positions. Both are sums over heads."""
    count, window = keys.shape[1], queries.shape[1]
    options = AttentionOptions(scale, softcap=softcap)
    newest = jnp.int32(window - 1)  # of the places of queries
    weights = recent_weights(queries, keys.astype(jnp.float32), jnp.int32(count), newest, options)
    older = weights[..., : count - window]
    entropy = -jnp.sum(jax.scipy.special.xlogy(older, older))
    return jnp.stack([entropy, jnp.sum(jnp.var(older, axis=1, ddof=1))])


def _check(files: ModelFiles) -> None:
    """Raise ConfigError for a model that the policy is not for, and for too short a context."""
    check_compacted(files.config, _POLICY)
    if files.config.context < _LEAST_WINDOW:
        raise ConfigError(
            f"{files.config.family} sees {files.config.context} tokens, and preferences take {_LEAST_WINDOW}: leave "
            "cake out"
        )


def _statistic(mixer: Any, width: int, powers: tuple[float, float]) -> Preferences | None:
    if not isinstance(mixer, AttentionSpec) or mixer.cache_of is not None:
        return None
    return Preferences(AttentionOptions(mixer.scale, softcap=mixer.softcap), width, powers)
