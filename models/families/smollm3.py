"""SmolLM3: Llama with some layers that have no positional embedding."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, mlp, model, rope_spec, rotates, windows

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layer_interval": 4,
    "rope_theta": 2e6,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def smollm3(hf: Hf) -> ModelConfig:
    """`no_rope_layers` marks the layers that do rotate; the other layers have windows, if windows are used."""
    has_rope = rotates(hf)
    hf = {**hf, "sliding_window": hf["sliding_window"] if hf["use_sliding_window"] else None}
    rope = rope_spec(hf)
    layers = [
        LayerSpec(attention(hf, rope if has_rope[i] else None, window), mlp(hf))
        for i, window in enumerate(windows(hf, lambda i: hf["sliding_window"] is not None and not has_rope[i]))
    ]
    return model(hf, "smollm3", layers)


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM",), smollm3, DEFAULTS)
