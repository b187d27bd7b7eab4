"""HunYuan (dense): Llama with QK-norm after the rotation, and a stretched rotary base."""

from __future__ import annotations

from dataclasses import replace

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import LAYER, Family, Hf, attention, mlp, model, need, rope_parameters, rope_spec

LAYER_MAP = LAYER | {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}
DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hunyuan(hf: Hf) -> ModelConfig:
    rope, alpha = rope_spec(hf), rope_parameters(hf).get("alpha")
    if alpha and rope.scaling is not None and rope.scaling.kind == "dynamic":
        rope = replace(rope, scaling=replace(rope.scaling, alpha=alpha))
    layer = LayerSpec(attention(hf, rope, qk_norm="head", qk_norm_after_rope=True), mlp(hf))
    return model(hf, "hunyuan", [layer] * need(hf, "num_hidden_layers"))


HUNYUAN = Family("hunyuan", ("HunYuanDenseV1ForCausalLM",), hunyuan, DEFAULTS, LAYER_MAP)
