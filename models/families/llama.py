"""Llama 2 and 3."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, mlp, model, need, rope_spec

DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(hf: Hf) -> ModelConfig:
    layer = LayerSpec(attention(hf, rope_spec(hf)), mlp(hf))
    return model(hf, "llama", [layer] * need(hf, "num_hidden_layers"))


LLAMA = Family("llama", ("LlamaForCausalLM",), llama, DEFAULTS)
