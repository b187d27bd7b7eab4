"""GLM-4 MoE Lite (GLM-4.7-Flash): DeepSeek-V3's layers in GLM's sizes."""

from __future__ import annotations

from inferlib.models.config import ModelConfig
from inferlib.models.families.common import (
    MTP_BEHIND_LAST,
    Family,
    Hf,
    grouped_sigmoid_router,
    model,
    need,
    shared_and_routed,
)
from inferlib.models.families.deepseek import LAYER_MAP, latent_layers
from inferlib.models.families.latent import latent_attention

DEFAULTS = {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "rope_interleave": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def glm4_moe_lite(hf: Hf) -> ModelConfig:
    attention = latent_attention(hf, interleaved=need(hf, "rope_interleave"))
    layers = latent_layers(hf, attention, shared_and_routed(hf, grouped_sigmoid_router(hf)))
    return model(hf, "glm4_moe_lite", layers)


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    ("Glm4MoeLiteForCausalLM",),
    glm4_moe_lite,
    DEFAULTS,
    LAYER_MAP,
    drafts=(MTP_BEHIND_LAST.prefix,),
    mtp=MTP_BEHIND_LAST,
)
