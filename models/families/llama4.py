"""The text model of Llama 4: chunked attention, layers without positions but with a query temperature, and experts
whose inputs are multiplied by the router's weights."""

from __future__ import annotations

from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, QueryTemperature, RouterSpec
from inferlib.models.families.common import (
    LAYER,
    Family,
    FusedExperts,
    Hf,
    activation,
    attention,
    layer_types,
    model,
    need,
    rope_spec,
    rotates,
    text_of,
)

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "intermediate_size_mlp": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "rope_theta": 5e5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER_MAP = LAYER | {
    "mlp.gate": "feed_forward.gate_proj",
    "mlp.up": "feed_forward.up_proj",
    "mlp.down": "feed_forward.down_proj",
    "mlp.router": "feed_forward.router",
    "mlp.experts.gate_up": "feed_forward.experts.gate_up_proj",
    "mlp.experts.down": "feed_forward.experts.down_proj",
    "mlp.shared.gate": "feed_forward.shared_expert.gate_proj",
    "mlp.shared.up": "feed_forward.shared_expert.up_proj",
    "mlp.shared.down": "feed_forward.shared_expert.down_proj",
}


def _attention(hf: Hf, rotates: bool, chunked: bool) -> AttentionSpec:
    temperature = None
    if hf["attn_temperature_tuning"] and not rotates:
        temperature = QueryTemperature(hf["attn_scale"], hf["floor_scale"], first=1)
    return attention(
        hf,
        rope_spec(hf, interleaved=True) if rotates else None,
        chunk=need(hf, "attention_chunk_size") if chunked else None,
        qk_norm="unit" if hf["use_qk_norm"] and rotates else None,
        qk_norm_after_rope=True,
        temperature=temperature,
    )


def llama4(hf: Hf) -> ModelConfig:
    """`no_rope_layers` marks the layers that do rotate, which are also those in chunks unless `layer_types` differ."""
    count, act = need(hf, "num_hidden_layers"), activation(hf, "hidden_act")
    hidden, step = need(hf, "intermediate_size"), hf["interleave_moe_layer_step"]
    experts = MoeSpec(
        RouterSpec(need(hf, "num_local_experts"), need(hf, "num_experts_per_tok"), score="sigmoid"),
        hidden,
        act,
        shared=MlpSpec(hidden, act),
        scale_input=True,
    )
    dense = MlpSpec(need(hf, "intermediate_size_mlp"), act)
    of_experts = hf.get("moe_layers")
    of_experts = range(step - 1, count, step) if of_experts is None else of_experts
    has_rope = rotates(hf)
    kinds = layer_types(hf, "chunked_attention", has_rope.__getitem__)
    layers = [
        LayerSpec(
            _attention(hf, bool(has_rope[i]), kinds[i] == "chunked_attention"), experts if i in of_experts else dense
        )
        for i in range(count)
    ]
    return model(hf, "llama4", layers)


LLAMA4 = Family(
    "llama4", ("Llama4ForCausalLM",), llama4, DEFAULTS, LAYER_MAP, fused_experts=FusedExperts(transposed=True)
)
LLAMA4_TEXT = text_of(LLAMA4, "Llama4ForConditionalGeneration", whole=True)
