"""Phi-3.5-MoE."""

from __future__ import annotations

from inferlib.models.config import ConfigError, LayerSpec, ModelConfig, MoeSpec, NormSpec, RouterSpec
from inferlib.models.families.common import (
    Family,
    Hf,
    activation,
    attention,
    expect,
    model,
    need,
    rope_parameters,
    rope_spec,
)
from inferlib.models.families.mistral import MIXTRAL_LAYER

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
    "router_jitter_noise": 0.01,
    "lm_head_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def phimoe(hf: Hf) -> ModelConfig:
    """Mixtral with layer norms, more biases, and a router of its own."""
    expect(hf, "num_experts_per_tok", 2)
    router = RouterSpec(
        need(hf, "num_local_experts"), hf["num_experts_per_tok"], "sparsemixer", jitter=need(hf, "router_jitter_noise")
    )
    experts = MoeSpec(router, need(hf, "intermediate_size"), activation(hf, "hidden_act"))
    layer = LayerSpec(attention(hf, rope_spec(hf, _rope(hf)), hf["sliding_window"]), experts)
    norm = NormSpec("layer", need(hf, "rms_norm_eps"), bias=True)
    return model(hf, "phimoe", [layer] * need(hf, "num_hidden_layers"), norm, head_bias=bool(hf["lm_head_bias"]))


def _rope(hf: Hf) -> Hf:
    """In scaled embeddings, cosines and sines are multiplied by `short_mscale` or, beyond the trained context,
    `long_mscale`."""
    options = rope_parameters(hf)
    short, long = options.get("short_mscale"), options.get("long_mscale")
    if short != long:
        raise ConfigError(f"short_mscale={short} and long_mscale={long}: only equal ones are supported")
    return options if short is None else {**options, "attention_factor": short}


PHIMOE = Family("phimoe", ("PhimoeForCausalLM",), phimoe, DEFAULTS, MIXTRAL_LAYER)
