"""Phi-3, Phi-3.5 and Phi-4 (text)."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import LAYER, Family, Hf, attention, mlp, model, need, rope_parameters, rope_spec

LAYER_MAP = LAYER | {"attn.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"}
DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 32000,
}


def phi3(hf: Hf) -> ModelConfig:
    options = rope_parameters(hf)
    kind = options.get("rope_type") or options.get("type")
    if kind in ("su", "yarn"):  # the names of longrope in the first published configs
        options = {**options, "rope_type": "longrope"}
    rope = rope_spec(hf, options, partial=True)
    layer = LayerSpec(attention(hf, rope, hf["sliding_window"]), mlp(hf))
    return model(hf, "phi3", [layer] * need(hf, "num_hidden_layers"))


PHI3 = Family("phi3", ("Phi3ForCausalLM",), phi3, DEFAULTS, LAYER_MAP)
