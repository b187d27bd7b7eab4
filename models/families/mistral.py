"""Mistral, Ministral, Ministral 3 and Mixtral."""

from __future__ import annotations

from inferlib.models.config import ConfigError, LayerSpec, ModelConfig, MoeSpec, QueryTemperature, RouterSpec
from inferlib.models.families.common import (
    LAYER,
    Family,
    Hf,
    activation,
    attention,
    mlp,
    model,
    need,
    rope_parameters,
    rope_spec,
    text_of,
    windows,
)

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MINISTRAL3_DEFAULTS = DEFAULTS | {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
MIXTRAL_DEFAULTS = DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
MIXTRAL_LAYER = LAYER | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.{e}.w1.weight",
    "mlp.experts.up": "block_sparse_moe.experts.{e}.w3.weight",
    "mlp.experts.down": "block_sparse_moe.experts.{e}.w2.weight",
}


def mistral(hf: Hf) -> ModelConfig:
    """One window, or none, for all layers."""
    if hf.get("layer_types"):
        raise ConfigError("a Mistral has one window for all layers; with layer_types it is a MinistralForCausalLM")
    layer = LayerSpec(attention(hf, rope_spec(hf), hf["sliding_window"]), mlp(hf))
    return model(hf, "mistral", [layer] * need(hf, "num_hidden_layers"))


def ministral(hf: Hf) -> ModelConfig:
    rope = rope_spec(hf)
    layers = [
        LayerSpec(attention(hf, rope, window), mlp(hf))
        for window in windows(hf, lambda i: hf["sliding_window"] is not None)
    ]
    return model(hf, "ministral", layers)


def ministral3(hf: Hf) -> ModelConfig:
    """Mistral with YaRN and a query temperature that grows with the position."""
    options = rope_parameters(hf)
    context = options.get("original_max_position_embeddings") or need(hf, "max_position_embeddings")
    temperature = QueryTemperature(need(options, "llama_4_scaling_beta"), context)
    layer = LayerSpec(attention(hf, rope_spec(hf), hf["sliding_window"], temperature=temperature), mlp(hf))
    return model(hf, "ministral3", [layer] * need(hf, "num_hidden_layers"))


def mixtral(hf: Hf) -> ModelConfig:
    """Mistral, every feed-forward of which is a mixture of experts."""
    router = RouterSpec(need(hf, "num_local_experts"), need(hf, "num_experts_per_tok"), renormalize=True)
    experts = MoeSpec(router, need(hf, "intermediate_size"), activation(hf, "hidden_act"))
    layer = LayerSpec(attention(hf, rope_spec(hf), hf["sliding_window"]), experts)
    return model(hf, "mixtral", [layer] * need(hf, "num_hidden_layers"))


MISTRAL = Family("mistral", ("MistralForCausalLM",), mistral, DEFAULTS)
MINISTRAL = Family("ministral", ("MinistralForCausalLM",), ministral, DEFAULTS)
MINISTRAL3 = Family("ministral3", ("Ministral3ForCausalLM",), ministral3, MINISTRAL3_DEFAULTS)
MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), mixtral, MIXTRAL_DEFAULTS, MIXTRAL_LAYER)
# Mistral Small 3.1 and later, Ministral 3.
MISTRAL_TEXT, MINISTRAL3_TEXT = (
    text_of(family, "Mistral3ForConditionalGeneration", whole=True, text_type=family.name)
    for family in (MISTRAL, MINISTRAL3)
)
