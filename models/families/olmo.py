"""OLMo 2, OLMo 3, OLMo Hybrid and OLMoE."""

from __future__ import annotations

from inferlib.models.config import ConfigError, LayerSpec, ModelConfig, MoeSpec
from inferlib.models.families.common import (
    LAYER,
    MOE_LAYER,
    Family,
    Hf,
    activation,
    attention,
    expect,
    layer_types,
    mlp,
    model,
    need,
    rope_parameters,
    rope_spec,
    rope_specs,
    softmax_router,
    windows,
)
from inferlib.models.mixers.gated_delta import GatedDeltaSpec

# Norms stand on the branches' outputs only.
POST_NORM = LAYER | {
    "post_attn_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
HYBRID = POST_NORM | {
    "pre_attn_norm": "attention_layer_norm",
    "pre_mlp_norm": "feedforward_layer_norm",
    "delta.z": "linear_attn.g_proj",
    "delta.decay": "linear_attn.A_log",
    "delta.decay_shift": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.o_norm",
}
HYBRID |= {f"delta.{part}": f"linear_attn.{part}_proj" for part in "qkvbao"}
HYBRID |= {f"delta.{part}_conv": f"linear_attn.{part}_conv1d" for part in "qkv"}
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
HYBRID_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 100257,
    "rope_theta": 1e4,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
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


def olmo_hybrid(hf: Hf) -> ModelConfig:
    """Three layers of the gated delta rule, with the usual norms, then one of OLMo 3's attention; `rope_theta` null is
    without positions."""
    expect(hf, "hidden_act", "silu")
    count, heads = need(hf, "num_hidden_layers"), need(hf, "num_attention_heads")
    key_heads = hf.get("linear_num_key_heads") or heads
    size = hf.get("linear_key_head_dim") or int(0.75 * need(hf, "hidden_size") / key_heads)
    delta = GatedDeltaSpec(
        hf.get("linear_num_value_heads") or heads,
        key_heads,
        size,
        hf.get("linear_value_head_dim") or 2 * size,
        need(hf, "linear_conv_kernel_dim"),
        eps=1e-5,
        strength=2.0 if hf["linear_allow_neg_eigval"] else 1.0,
    )
    rotates = rope_parameters(hf).get("rope_theta", hf["rope_theta"]) is not None
    full = attention(hf, rope_spec(hf) if rotates else None, qk_norm="full")
    layers = {
        "linear_attention": LayerSpec(delta, mlp(hf)),
        "full_attention": LayerSpec(full, mlp(hf), pre_norm=False, post_norm=True),
    }
    kinds = layer_types(hf, "linear_attention", lambda i: i % 4 != 3 and (count >= 4 or i < count - 1))
    return model(hf, "olmo_hybrid", [layers[kind] for kind in kinds])


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
OLMO_HYBRID = Family("olmo_hybrid", ("OlmoHybridForCausalLM",), olmo_hybrid, HYBRID_DEFAULTS, HYBRID)
OLMOE = Family("olmoe", ("OlmoeForCausalLM",), olmoe, OLMOE_DEFAULTS, MOE_LAYER)
