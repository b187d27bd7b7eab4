"""Qwen 2 (and 2.5) and Qwen 3."""

from __future__ import annotations

from typing import Any

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, mlp, model, rope_spec, windows

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _qwen(hf: Hf, family: str, **options: Any) -> ModelConfig:
    """Windows, where they are used at all, begin at layer `max_window_layers`."""
    hf = {**hf, "sliding_window": hf["sliding_window"] if hf["use_sliding_window"] else None}
    rope = rope_spec(hf)
    slides = windows(hf, lambda i: hf["sliding_window"] is not None and i >= hf["max_window_layers"])
    layers = [LayerSpec(attention(hf, rope, window, **options), mlp(hf)) for window in slides]
    return model(hf, family, layers)


def qwen2(hf: Hf) -> ModelConfig:
    return _qwen(hf, "qwen2", qkv_bias=True, o_bias=False)


def qwen3(hf: Hf) -> ModelConfig:
    return _qwen(hf, "qwen3", qk_norm="head")


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), qwen2, DEFAULTS)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), qwen3, DEFAULTS | {"head_dim": 128})
