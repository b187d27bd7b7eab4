"""Cohere 2 (Command R7B, Command A): parallel branches, and no positions where there is no window."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig, NormSpec
from inferlib.models.families.common import Family, Hf, attention, mlp, model, need, rope_spec, windows

DEFAULTS = {
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}


def cohere2(hf: Hf) -> ModelConfig:
    hf = {**hf, "head_dim": None}  # always the width over the heads
    rope = rope_spec(hf, interleaved=True)
    layers = [
        LayerSpec(attention(hf, None if window is None else rope, window), mlp(hf), parallel=True)
        for window in windows(hf, lambda i: (i + 1) % hf["sliding_window_pattern"] != 0)
    ]
    norm = NormSpec(kind="layer", eps=need(hf, "layer_norm_eps"))
    return model(hf, "cohere2", layers, norm, logit_scale=hf["logit_scale"])


COHERE2 = Family("cohere2", ("Cohere2ForCausalLM",), cohere2, DEFAULTS)
