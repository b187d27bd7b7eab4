"""ERNIE 4.5 (dense): Llama with interleaved rotary pairs and one switch for all biases."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, mlp, model, need, rope_spec

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
    "rope_theta": 5e5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def ernie4_5(hf: Hf) -> ModelConfig:
    bias = bool(hf["use_bias"])
    attn = attention(hf, rope_spec(hf, interleaved=True), qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(attn, mlp(hf, bias_key="use_bias"))
    return model(hf, "ernie4_5", [layer] * need(hf, "num_hidden_layers"))


ERNIE4_5 = Family("ernie4_5", ("Ernie4_5ForCausalLM",), ernie4_5, DEFAULTS)
