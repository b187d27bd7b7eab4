"""MiMo-V2-Flash: values smaller than keys, and on layers with a window twice the KV heads and learned sinks."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import (
    MOE_LAYER,
    Family,
    Hf,
    attention,
    grouped_sigmoid_router,
    model,
    need,
    rope_specs,
    shared_and_routed,
    windows,
)
from inferlib.models.families.deepseek import feeds

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "attention_value_scale": 0.707,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": 129,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5e6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 1,
}
LAYER_MAP = MOE_LAYER | {"attn.sinks": "self_attn.attention_sink_bias"}


def mimo_v2_flash(hf: Hf) -> ModelConfig:
    """`sliding_window_size`, where a config has it, does not count the query's own position."""
    scale, previous = hf.get("routed_scaling_factor"), hf.get("sliding_window_size")
    hf = {**hf, "routed_scaling_factor": 1.0 if scale is None else scale}
    hf = hf if previous is None else {**hf, "sliding_window": previous + 1}
    full, sliding = rope_specs(hf, 1e4, partial=True)
    options = {"value_dim": need(hf, "v_head_dim"), "value_scale": hf["attention_value_scale"] or 1.0, "o_bias": False}
    whole = attention(hf, full, **options)
    kv_heads = 2 * whole.kv_heads
    feed = feeds(hf, shared_and_routed(hf, grouped_sigmoid_router(hf)))
    layers = [
        LayerSpec(
            whole if window is None else attention(hf, sliding, window, kv_heads=kv_heads, sinks=True, **options),
            feed[i],
        )
        for i, window in enumerate(windows(hf, lambda i: i > 0 and (i + 1) % 6 != 0))
    ]
    return model(hf, "mimo_v2_flash", layers)


MIMO_V2_FLASH = Family(
    "mimo_v2_flash", ("MiMoV2FlashForCausalLM",), mimo_v2_flash, DEFAULTS, LAYER_MAP, drafts=("model.mtp.",)
)
