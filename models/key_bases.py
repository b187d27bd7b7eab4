"""Bases of keys: for each layer and KV head, the directions in which keys vary most, by which decode steps select what
they read (Singhania et al. 2024, "Loki", https://arxiv.org/abs/2406.02542; see `inferlib.ops.selected_pages`).

They are measured once on a text, of keys as the cache has them, behind their rotary embedding. A model has them as
weights if it is loaded for that.
"""

from __future__ import annotations

from dataclasses import replace

from inferlib.models.config import AttentionSpec, ConfigError, MlaSpec, ModelConfig
from inferlib.models.recurrent import Recurrent

KEY = "key_bases"  # in a config: true of a model that has them
FILE = "key_bases.npz"  # in a model's directory: an array [K, h, d] for each layer that has some, by its number
_SHARE = 4  # a quarter of the directions, as the paper takes: with a quarter of the positions it loses little


def directions(mixer: AttentionSpec | MlaSpec | Recurrent) -> int:
    """How many directions a layer's bases have, d; 0 if its steps read all that they see."""
    selects = isinstance(mixer, AttentionSpec) and mixer.reach is None
    return max(mixer.head_dim // _SHARE, 1) if selects else 0


def with_key_bases(config: ModelConfig) -> ModelConfig:
    """The model with bases in all layers that select. Raises ConfigError for layers that borrow a cache, whose queries
    would need the bases of other layers, and for models that repeat layers or have lanes."""
    if config.loop is not None:
        raise ConfigError(f"{config.family} repeats layers, whose keys differ from step to step: take quest, not loki")
    if config.lanes is not None:
        raise ConfigError(f"{config.family} has lanes, for which loki has no bases: take quest")
    layers = []
    for number, layer in enumerate(config.layers):
        mixer = layer.attention
        if isinstance(mixer, AttentionSpec) and (count := directions(mixer)):
            if mixer.cache_of is not None:
                raise ConfigError(
                    f"layer {number} of this model attends to the cache of another layer, for which loki has no bases: "
                    "take quest"
                )
            layer = replace(layer, attention=replace(mixer, key_basis=count))
        layers.append(layer)
    return replace(config, layers=tuple(layers))
