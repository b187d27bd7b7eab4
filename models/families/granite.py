"""Granite 3 (dense): Llama with multipliers on the embedding, the attention, the branches and the logits."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, mlp, model, need, rope_spec

DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def granite(hf: Hf) -> ModelConfig:
    layer = LayerSpec(attention(hf, rope_spec(hf), scale=hf["attention_multiplier"]), mlp(hf))
    return model(
        hf,
        "granite",
        [layer] * need(hf, "num_hidden_layers"),
        embed_scale=hf["embedding_multiplier"],
        residual_scale=hf["residual_multiplier"],
        logit_scale=1 / hf["logits_scaling"],
    )


GRANITE = Family("granite", ("GraniteForCausalLM",), granite, DEFAULTS)
