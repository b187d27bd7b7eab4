"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, mlp, model, need, rope_spec

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def seed_oss(hf: Hf) -> ModelConfig:
    layer = LayerSpec(attention(hf, rope_spec(hf), o_bias=hf["attention_out_bias"]), mlp(hf))
    return model(hf, "seed_oss", [layer] * need(hf, "num_hidden_layers"))


SEED_OSS = Family("seed_oss", ("SeedOssForCausalLM",), seed_oss, DEFAULTS)
