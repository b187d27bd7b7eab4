"""GLM-4: `Glm4ForCausalLM` (0414, norms on both sides of the branches) and the earlier `GlmForCausalLM`."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import LAYER, Family, Hf, attention, mlp, model, need, rope_spec

LAYER_MAP = LAYER | {
    "mlp.gate_up": "mlp.gate_up_proj",
    "post_attn_norm": "post_self_attn_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-07,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": (151329, 151336, 151338),
}


def _glm(hf: Hf, family: str, post_norm: bool) -> ModelConfig:
    attn = attention(hf, rope_spec(hf, partial=True, interleaved=True), o_bias=False)
    layer = LayerSpec(attn, mlp(hf), post_norm=post_norm)
    return model(hf, family, [layer] * need(hf, "num_hidden_layers"))


def glm(hf: Hf) -> ModelConfig:
    return _glm(hf, "glm", post_norm=False)


def glm4(hf: Hf) -> ModelConfig:
    return _glm(hf, "glm4", post_norm=True)


GLM = Family("glm", ("GlmForCausalLM",), glm, DEFAULTS, LAYER_MAP)
GLM4 = Family("glm4", ("Glm4ForCausalLM",), glm4, DEFAULTS, LAYER_MAP)
