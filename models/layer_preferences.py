"""Preferences of layers: which share of a bounded cache's cells each layer should have (Qin et al. 2025, "CAKE:
Cascading and Adaptive KV Cache Eviction with Layer Preferences", https://arxiv.org/abs/2503.12491).

A layer whose newest queries attend to many positions, and each of them to others, prefers a large cache. The paper
measures this of every prompt. Shapes of programs are static, so here it is measured once, on a text like the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from inferlib.models.cache_levels import cache_owners
from inferlib.models.config import ConfigError, ModelConfig

KEY = "layer_preferences"  # in a config: the share of each layer that has a cache of its own, by its number as text
FILE = "layer_preferences.npz"  # in a model's directory: an array [N] for each such layer, of N prompts


def mean_shares(preferences: Mapping[int, np.ndarray]) -> dict[str, float]:
    """The shares of layers, as configs have them: the mean of those that each of N prompts would give them. preferences
    [N]: of each layer, above 0. Raises ValueError for others."""
    each = np.stack([np.asarray(of_layer, np.float64) for of_layer in preferences.values()])
    if each.ndim != 2 or not each.size or not np.all((each > 0) & np.isfinite(each)):
        raise ValueError("preferences are finite numbers above 0, of each layer as many")
    shares = (each / each.sum(axis=0)).mean(axis=1)
    return {str(layer): float(share) for layer, share in zip(preferences, shares, strict=True)}


def with_layer_preferences(config: ModelConfig, shares: Any) -> ModelConfig:
    """The model with the shares of its layers. Raises ConfigError if they are not of these layers."""
    owners = [str(number) for number in cache_owners(config)]
    if not isinstance(shares, dict) or sorted(shares) != sorted(owners):
        raise ConfigError(
            f"{KEY} are not of the layers of this model that have a cache: remove {FILE}, or measure it again by "
            "`inferlib layer-preferences`"
        )
    values = tuple(shares[number] for number in owners)
    if not all(isinstance(value, float) and 0 < value <= 1 for value in values):
        raise ConfigError(f"{KEY} are shares between 0 and 1: measure them again by `inferlib layer-preferences`")
    return replace(config, layer_preferences=values)
