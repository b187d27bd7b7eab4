"""GLM-4: `Glm4ForCausalLM` (0414, norms on both sides of the branches) and the earlier `GlmForCausalLM`; GLM-4.5 and
4.6, mixtures of experts."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import (
    LAYER,
    MOE_LAYER,
    MTP_BEHIND_LAST,
    Family,
    Hf,
    attention,
    grouped_sigmoid_router,
    mlp,
    model,
    need,
    rope_spec,
    shared_and_routed,
)

LAYER_MAP = LAYER | {
    "mlp.gate_up": "mlp.gate_up_proj",
    "post_attn_norm": "post_self_attn_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-07,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": (151329, 151336, 151338),
}
MOE_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}


def _glm(hf: Hf, family: str, post_norm: bool) -> ModelConfig:
    attn = attention(hf, rope_spec(hf, partial=True, interleaved=True), o_bias=False)
    layer = LayerSpec(attn, mlp(hf), post_norm=post_norm)
    return model(hf, family, [layer] * need(hf, "num_hidden_layers"))


def glm(hf: Hf) -> ModelConfig:
    return _glm(hf, "glm", post_norm=False)


def glm4(hf: Hf) -> ModelConfig:
    return _glm(hf, "glm4", post_norm=True)


def glm4_moe(hf: Hf) -> ModelConfig:
    """The first `first_k_dense_replace` layers are dense."""
    norm = "head" if hf["use_qk_norm"] else None
    attn = attention(hf, rope_spec(hf, partial=True), o_bias=False, qk_norm=norm)
    dense, experts = mlp(hf), shared_and_routed(hf, grouped_sigmoid_router(hf))
    first, count = hf["first_k_dense_replace"], need(hf, "num_hidden_layers")
    return model(hf, "glm4_moe", [LayerSpec(attn, dense if i < first else experts) for i in range(count)])


GLM = Family("glm", ("GlmForCausalLM",), glm, DEFAULTS, LAYER_MAP)
GLM4 = Family("glm4", ("Glm4ForCausalLM",), glm4, DEFAULTS, LAYER_MAP)
GLM4_MOE = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    glm4_moe,
    MOE_DEFAULTS,
    MOE_LAYER,
    drafts=(MTP_BEHIND_LAST.prefix,),
    mtp=MTP_BEHIND_LAST,
)
