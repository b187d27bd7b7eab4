"""Llama models of which a search took attention, and parts of feed-forwards, layer by layer (Nemotron Super 49B and
Ultra 253B; Bercovich et al. 2024, "Puzzle", https://arxiv.org/abs/2411.19146)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferlib.models.config import ConfigError, LayerSpec, Mixer, MlpSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, activation, attention, model, need, rope_spec
from inferlib.models.families.llama import DEFAULTS
from inferlib.models.mixers.no_mixer import NoMixer

_WIDTH_UNIT = 256  # hidden sizes that are given by a factor are multiples of it
# What config.json can ask of a layer's parts beyond these; the published checkpoints of these names do not.
_ATTENTION = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink")
_FEED_FORWARD = ("replace_with_linear", "sparsify")


def nemotron_nas(hf: Hf) -> ModelConfig:
    blocks, layers = need(hf, "block_configs"), need(hf, "num_hidden_layers")
    if not isinstance(blocks, list) or len(blocks) != layers or not all(isinstance(x, Mapping) for x in blocks):
        raise ConfigError(f"block_configs in config.json must say what each of {layers} layers has")
    return model(hf, "nemotron_nas", [_layer(hf, number, block) for number, block in enumerate(blocks)])


def _layer(hf: Hf, number: int, block: Mapping[str, Any]) -> LayerSpec:
    heads, feed = (_part(block, number, *part) for part in (("attention", _ATTENTION), ("ffn", _FEED_FORWARD)))
    if heads is None and feed is None:
        raise ConfigError(f"layer {number} in block_configs has neither attention nor a feed-forward: leave it out")
    mixer = NoMixer() if heads is None else _attention(hf, number, heads)
    return LayerSpec(mixer, None if feed is None else _feed_forward(hf, number, feed))


def _part(block: Mapping[str, Any], number: int, name: str, others: tuple[str, ...]) -> Mapping[str, Any] | None:
    """What block_configs says of a layer's attention or feed-forward; None if the layer has none."""
    part = block.get(name)
    if not isinstance(part, Mapping):
        raise ConfigError(f"layer {number} in block_configs says nothing of {name}")
    if asked := [key for key in others if part.get(key)]:
        raise ConfigError(f"{name} of layer {number} has {asked[0]}={part[asked[0]]!r}, which is not supported")
    return None if part.get("no_op") else part


def _attention(hf: Hf, number: int, part: Mapping[str, Any]) -> Mixer:
    whole, group = attention(hf, rope_spec(hf)), part.get("n_heads_in_group")
    if type(group) is not int or group < 1 or whole.heads % group:
        raise ConfigError(f"layer {number} has n_heads_in_group={group!r}, which does not divide {whole.heads} heads")
    return replace(whole, kv_heads=whole.heads // group)


def _feed_forward(hf: Hf, number: int, part: Mapping[str, Any]) -> MlpSpec:
    factor, hidden = part.get("ffn_mult"), part.get("intermediate_size")
    if isinstance(factor, int | float) and factor > 0:
        hidden = -(-int(2 * factor * need(hf, "hidden_size") / 3) // _WIDTH_UNIT) * _WIDTH_UNIT
    if type(hidden) is not int or hidden < 1:
        raise ConfigError(
            f"the feed-forward of layer {number} in block_configs has neither ffn_mult nor intermediate_size"
        )
    return MlpSpec(hidden, activation(hf, "hidden_act"), bias=bool(hf.get("mlp_bias")))


NEMOTRON_NAS = Family("nemotron_nas", ("DeciLMForCausalLM",), nemotron_nas, DEFAULTS)
