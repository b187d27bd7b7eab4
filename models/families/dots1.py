"""dots.llm1: Qwen 3's attention with DeepSeek-V3's experts."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import (
    MOE_LAYER,
    Family,
    Hf,
    attention,
    grouped_sigmoid_router,
    mlp,
    model,
    rope_spec,
    shared_and_routed,
    windows,
)

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
}


def dots1(hf: Hf) -> ModelConfig:
    """The first `first_k_dense_replace` layers are dense; windows, if any, begin at layer `max_window_layers`."""
    rope, dense, experts = rope_spec(hf), mlp(hf), shared_and_routed(hf, grouped_sigmoid_router(hf))
    slides = windows(hf, lambda i: hf["sliding_window"] is not None and i >= hf["max_window_layers"])
    layers = [
        LayerSpec(attention(hf, rope, window, qk_norm="head"), dense if i < hf["first_k_dense_replace"] else experts)
        for i, window in enumerate(slides)
    ]
    return model(hf, "dots1", layers)


DOTS1 = Family("dots1", ("Dots1ForCausalLM",), dots1, DEFAULTS, MOE_LAYER)
