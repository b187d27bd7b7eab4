"""OLMo 2, OLMo 3 and OLMoE."""

from __future__ import annotations

from inferlib.models.config import ConfigError, LayerSpec, ModelConfig, MoeSpec
from inferlib.models.families.common import (
    LAYER,
    MOE_LAYER,
    Family,
    Hf,
    activation,
    attention,
    mlp,
    model,
    need,
    rope_spec,
    rope_specs,
    softmax_router,
    windows,
)

# Norms stand on the branches' outputs only.
POST_NORM = LAYER | {
    "post_attn_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 50279,
}
OLMOE_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
OLMO3_DEFAULTS = DEFAULTS | {"sliding_window": 4096, "rope_theta": 5e5}


def olmo2(hf: Hf) -> ModelConfig:
    attn = attention(hf, rope_spec(hf), qk_norm="full")
    layer = LayerSpec(attn, mlp(hf), pre_norm=False, post_norm=True)
    return model(hf, "olmo2", [layer] * need(hf, "num_hidden_layers"))


def olmo3(hf: Hf) -> ModelConfig:
    """OLMo 2 with a window on three layers of four; only the fourth has scaled rotary frequencies."""
    full, sliding = rope_specs(hf, hf["rope_theta"])
    layers = [
        LayerSpec(
            attention(hf, full if window is None else sliding, window, qk_norm="full"),
            mlp(hf),
            pre_norm=False,
            post_norm=True,
        )
        for window in windows(hf, lambda i: (i + 1) % 4 != 0)
    ]
    return model(hf, "olmo3", layers)


def olmoe(hf: Hf) -> ModelConfig:
    """A mixture of experts in every layer, with the usual norms before the branches."""
    if hf.get("clip_qkv") is not None:
        raise ConfigError(f"clip_qkv={hf['clip_qkv']}: clamped queries, keys and values are not supported")
    router = softmax_router(hf, need(hf, "num_experts"))
    experts = MoeSpec(router, need(hf, "intermediate_size"), activation(hf, "hidden_act"))
    layer = LayerSpec(attention(hf, rope_spec(hf), qk_norm="full"), experts)
    return model(hf, "olmoe", [layer] * need(hf, "num_hidden_layers"))


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), olmo2, DEFAULTS, POST_NORM)
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), olmo3, OLMO3_DEFAULTS, POST_NORM)
OLMOE = Family("olmoe", ("OlmoeForCausalLM",), olmoe, OLMOE_DEFAULTS, MOE_LAYER)
