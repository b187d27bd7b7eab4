"""Feed-forwards that follow one another, as one that computes them side by side (Bercovich et al. 2025, "FFN Fusion:
Rethinking Sequential Computation in Large Language Models", https://arxiv.org/abs/2503.18908).

x + f1(n1(x)) + f2(n2(x)) stands for f2 after f1. All norms divide x by the same number, so their weights go into the
products that read them, and one feed-forward as wide as all together computes the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from inferlib.models.blocks import FeedForwardBlock, PreNormBlock, kind_of_block
from inferlib.models.config import ConfigError, MlpSpec, ModelConfig
from inferlib.models.recurrent import is_absent

KEY = "fused_feed_forwards"  # in config.json: true of a model that was fused
_NORM = "pre_mlp_norm"


def fused_layers(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """For each layer of the fused model, the layers that it is made of.

    Raises ConfigError for models whose layers are more than a sum, and those without feed-forwards to fuse.
    """
    if config.norm.kind != "rms" or config.norm.bias or config.loop is not None or config.per_layer is not None:
        raise ConfigError(f"feed-forwards of {config.family} cannot be fused: that needs RMS norms, and nothing else")
    if any(layer.attention.cache_of is not None for layer in config.layers):
        raise ConfigError(f"feed-forwards of {config.family} cannot be fused: its layers share caches by their numbers")
    groups: list[list[int]] = []
    for number in range(len(config.layers)):
        if groups and _joins(config, groups[-1][-1], number):
            groups[-1].append(number)
        else:
            groups.append([number])
    if len(groups) == len(config.layers):
        raise ConfigError(f"{config.family} has no dense feed-forwards that follow one another: there are none to fuse")
    return tuple(map(tuple, groups))


def _joins(config: ModelConfig, before: int, number: int) -> bool:
    """Whether a layer is a feed-forward like that of the layer before it, and nothing else."""
    first, second = config.layers[before], config.layers[number]
    if not (isinstance(first.mlp, MlpSpec) and isinstance(second.mlp, MlpSpec) and is_absent(second.attention)):
        return False
    alike = replace(first.mlp, hidden=second.mlp.hidden) == second.mlp
    return alike and {kind_of_block(layer, config) for layer in (first, second)} <= {PreNormBlock, FeedForwardBlock}


def fused_config(config: ModelConfig) -> ModelConfig:
    """The config of the fused model. Raises ConfigError as `fused_layers` does."""
    layers = []
    for group in fused_layers(config):
        first = config.layers[group[0]]
        if len(group) > 1:
            feeds: list[Any] = [config.layers[number].mlp for number in group]
            first = replace(first, mlp=replace(feeds[0], hidden=sum(feed.hidden for feed in feeds)))
        layers.append(first)
    return replace(config, layers=tuple(layers))


def fused_weights(config: ModelConfig, layers: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """The weights of one layer of the fused model, by their parts, from those of the layers that it is made of, all in
    float32."""
    if len(layers) == 1:
        return dict(layers[0])
    offset = 1.0 if config.norm.unit_offset else 0.0
    new = dict(layers[0])
    scaled = [(layer[_NORM] + offset)[:, None, None] * layer["mlp.gate_up"] for layer in layers]  # [D, halves, F]
    new["mlp.gate_up"] = jnp.concatenate(scaled, axis=2)
    new["mlp.down"] = jnp.concatenate([layer["mlp.down"] for layer in layers], axis=0)
    if "mlp.gate_up_bias" in new:
        new["mlp.gate_up_bias"] = jnp.concatenate([layer["mlp.gate_up_bias"] for layer in layers], axis=1)
        new["mlp.down_bias"] = sum((layer["mlp.down_bias"] for layer in layers[1:]), layers[0]["mlp.down_bias"])
    new[_NORM] = jnp.full_like(new[_NORM], 1.0 - offset)
    return new
