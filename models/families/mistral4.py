"""Mistral 4: DeepSeek-V3's layers with a softmax router, YaRN and a query temperature."""

from __future__ import annotations

from inferlib.models.config import ConfigError, ModelConfig, QueryTemperature
from inferlib.models.families.common import (
    Family,
    Hf,
    model,
    need,
    rope_parameters,
    shared_and_routed,
    softmax_router,
    text_of,
)
from inferlib.models.families.deepseek import LAYER_MAP, latent_layers
from inferlib.models.families.latent import latent_attention

DEFAULTS = {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1048576,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 0,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "rope_interleave": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER = LAYER_MAP | {"mlp.experts.gate_up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj"}


def mistral4(hf: Hf) -> ModelConfig:
    options = dict(rope_parameters(hf))
    rotated, size = need(hf, "qk_rope_head_dim"), need(hf, "qk_nope_head_dim") + need(hf, "qk_rope_head_dim")
    fraction = options.pop("partial_rotary_factor", None)
    if fraction is not None and int(size * fraction) != rotated:
        raise ConfigError(f"partial_rotary_factor={fraction} of {size} contradicts qk_rope_head_dim={rotated}")
    temperature = QueryTemperature(
        need(options, "llama_4_scaling_beta"), need(options, "original_max_position_embeddings")
    )
    hf = {**hf, "rope_parameters": options, "rope_scaling": None}
    attention = latent_attention(hf, interleaved=need(hf, "rope_interleave"), temperature=temperature)
    router = softmax_router(
        hf,
        need(hf, "n_routed_experts"),
        scale=need(hf, "routed_scaling_factor"),
        groups=need(hf, "n_group"),
        chosen_groups=need(hf, "topk_group"),
    )
    return model(hf, "mistral4", latent_layers(hf, attention, shared_and_routed(hf, router)))


MISTRAL4 = Family("mistral4", ("Mistral4ForCausalLM",), mistral4, DEFAULTS, LAYER)
MISTRAL4_TEXT = text_of(MISTRAL4, "Mistral3ForConditionalGeneration", whole=True, text_type="mistral4")
