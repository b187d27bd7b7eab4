"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B) and Qwen3-MoE."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, MlpSpec, ModelConfig, MoeSpec
from inferlib.models.families.common import (
    MOE_LAYER,
    Family,
    Hf,
    activation,
    attention,
    first_of,
    mlp,
    model,
    need,
    rope_spec,
    softmax_router,
    windows,
)

DEFAULTS = {
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "norm_topk_prob": False,
}
QWEN2_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 16,
    "max_window_layers": 28,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
QWEN2_LAYER = MOE_LAYER | {
    "mlp.shared_gate": "mlp.shared_expert_gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
}
QWEN3_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 4,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def _is_dense(hf: Hf, i: int) -> bool:
    return i in (hf["mlp_only_layers"] or ()) or (i + 1) % hf["decoder_sparse_step"] != 0


def qwen2_moe(hf: Hf) -> ModelConfig:
    """Qwen2 with experts: if windows are used, every other layer up to `max_window_layers` has one."""
    act = activation(hf, "hidden_act")
    experts = MoeSpec(
        softmax_router(hf, need(hf, "num_experts")),
        need(hf, "moe_intermediate_size"),
        act,
        shared=MlpSpec(need(hf, "shared_expert_intermediate_size"), act),
        shared_gate=True,
    )
    rope, bias = rope_spec(hf), bool(hf["qkv_bias"])
    slides = windows(hf, lambda i: hf["use_sliding_window"] and i % 2 == 0 and i < hf["max_window_layers"])
    layers = [
        LayerSpec(attention(hf, rope, window, qkv_bias=bias, o_bias=False), mlp(hf) if _is_dense(hf, i) else experts)
        for i, window in enumerate(slides)
    ]
    return model(hf, "qwen2_moe", layers)


def qwen3_moe(hf: Hf) -> ModelConfig:
    """One window, or none, for all layers."""
    router = softmax_router(hf, first_of(hf, "num_experts", "num_local_experts"))
    experts = MoeSpec(router, need(hf, "moe_intermediate_size"), activation(hf, "hidden_act"))
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    attn = attention(hf, rope_spec(hf), window, qk_norm="head")
    count = need(hf, "num_hidden_layers")
    layers = [LayerSpec(attn, mlp(hf) if _is_dense(hf, i) else experts) for i in range(count)]
    return model(hf, "qwen3_moe", layers)


QWEN2_MOE = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), qwen2_moe, QWEN2_DEFAULTS, QWEN2_LAYER)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), qwen3_moe, QWEN3_DEFAULTS, MOE_LAYER)
