"""Laguna: a softplus gate on each head, and numbers of heads that differ from layer to layer."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, MlpSpec, ModelConfig, MoeSpec, OutputGate, RouterSpec
from inferlib.models.families.common import (
    MOE_LAYER,
    Family,
    Hf,
    activation,
    attention,
    expect,
    for_each_layer,
    model,
    need,
    rope_specs,
    windows,
)
from inferlib.models.families.deepseek import feeds

DEFAULTS = {
    "vocab_size": 100352,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_routed_scaling_factor": 1.0,
    "moe_router_logit_softcapping": 0.0,
    "gating": True,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}
LAYER_MAP = MOE_LAYER | {
    "attn.gate": "self_attn.g_proj",
    "mlp.router.correction": "mlp.experts.e_score_correction_bias",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
}


def laguna(hf: Hf) -> ModelConfig:
    """Laguna: without `layer_types` no layer has a window."""
    expect(hf, "gating", True, "per-head", "per-element")
    expect(hf, "moe_apply_router_weight_on_input", False)
    key, act = "num_attention_heads_per_layer", activation(hf, "hidden_act")
    heads = for_each_layer(hf, key, hf.get(key) or need(hf, "num_attention_heads"))
    router = RouterSpec(
        need(hf, "num_experts"),
        need(hf, "num_experts_per_tok"),
        score="sigmoid",
        renormalize=True,
        scale=hf["moe_routed_scaling_factor"],
        correction=True,
        softcap=hf["moe_router_logit_softcapping"] or None,
    )
    shared = MlpSpec(need(hf, "shared_expert_intermediate_size"), act)
    feed = feeds(hf, MoeSpec(router, need(hf, "moe_intermediate_size"), act, shared=shared))
    full, sliding = rope_specs(hf, 1e4, partial=True)
    gate = OutputGate("softplus", per_head=hf["gating"] != "per-element")
    layers = [
        LayerSpec(
            attention(hf, sliding if window else full, window, heads=heads[i], qk_norm="head", gate=gate),
            feed[i],
        )
        for i, window in enumerate(windows(hf, lambda i: False))
    ]
    return model(hf, "laguna", layers)


LAGUNA = Family("laguna", ("LagunaForCausalLM",), laguna, DEFAULTS, LAYER_MAP)
