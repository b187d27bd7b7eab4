"""OLMo 2 and OLMo 3."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import (
    LAYER,
    Family,
    Hf,
    attention,
    mlp,
    model,
    need,
    rope_spec,
    rope_specs,
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


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), olmo2, DEFAULTS, POST_NORM)
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), olmo3, OLMO3_DEFAULTS, POST_NORM)
