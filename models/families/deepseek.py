"""DeepSeek-V2, and DeepSeek-V3, whose class R1 and Kimi-K2 share: latent attention and a mixture of experts."""

from __future__ import annotations

from inferlib.models.config import ConfigError, LayerSpec, MlaSpec, MlpSpec, ModelConfig, MoeSpec
from inferlib.models.families.common import (
    MOE_LAYER,
    MTP_BEHIND_LAST,
    Family,
    Hf,
    expect,
    grouped_sigmoid_router,
    mlp,
    model,
    need,
    shared_and_routed,
    softmax_router,
)
from inferlib.models.families.latent import LATENT, latent_attention

LAYER_MAP = MOE_LAYER | LATENT
DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
V2_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
V3_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "rope_interleave": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def feeds(hf: Hf, experts: MoeSpec) -> list[MlpSpec | MoeSpec]:
    """The feed-forward of each layer: experts, except in the first `first_k_dense_replace` layers, or where
    `mlp_layer_types` says "dense"."""
    expect(hf, "moe_layer_freq", 1)
    count = need(hf, "num_hidden_layers")
    dense = hf.get("first_k_dense_replace") or 0
    kinds = hf.get("mlp_layer_types") or ["dense"] * min(dense, count) + ["sparse"] * (count - dense)
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types must say dense or sparse of {count} layers, not {kinds}")
    return [mlp(hf) if kind == "dense" else experts for kind in kinds]


def latent_layers(hf: Hf, attention: MlaSpec, experts: MoeSpec) -> list[LayerSpec]:
    return [LayerSpec(attention, feed) for feed in feeds(hf, experts)]


def deepseek_v2(hf: Hf) -> ModelConfig:
    """A softmax router; with the method "group_limited_greedy", over the experts of the best groups."""
    expect(hf, "topk_method", "greedy", "group_limited_greedy")
    expect(hf, "scoring_func", "softmax")
    expect(hf, "norm_topk_prob", False)
    expect(hf, "mlp_bias", False)
    groups = {}
    if hf["topk_method"] == "group_limited_greedy":
        groups = {"groups": need(hf, "n_group"), "chosen_groups": need(hf, "topk_group"), "group_score": "max"}
    router = softmax_router(hf, need(hf, "n_routed_experts"), scale=hf["routed_scaling_factor"], **groups)
    layers = latent_layers(hf, latent_attention(hf, interleaved=True), shared_and_routed(hf, router))
    return model(hf, "deepseek_v2", layers)


def deepseek_v3(hf: Hf) -> ModelConfig:
    expect(hf, "topk_method", "noaux_tc")
    expect(hf, "scoring_func", "sigmoid")
    attention = latent_attention(hf, interleaved=need(hf, "rope_interleave"))
    return model(hf, "deepseek_v3", latent_layers(hf, attention, shared_and_routed(hf, grouped_sigmoid_router(hf))))


# One more layer, which predicts further tokens.
_DRAFTS = (MTP_BEHIND_LAST.prefix,)
DEEPSEEK_V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), deepseek_v2, V2_DEFAULTS, LAYER_MAP)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    deepseek_v3,
    V3_DEFAULTS,
    LAYER_MAP,
    drafts=_DRAFTS,
    mtp=MTP_BEHIND_LAST,
)
