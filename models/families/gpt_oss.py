"""gpt-oss: learned sinks, a window on every other layer, and experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from inferlib.models.config import ClampedSwiglu, LayerSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.families.common import LAYER, Family, FusedExperts, Hf, attention, model, need, rope_spec, windows

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
LAYER_MAP = LAYER | {
    "attn.sinks": "self_attn.sinks",
    "mlp.router": "mlp.router",
    "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down": "mlp.experts.down_proj",
    "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
}


def gpt_oss(hf: Hf) -> ModelConfig:
    experts = MoeSpec(
        RouterSpec(need(hf, "num_local_experts"), need(hf, "num_experts_per_tok"), renormalize=True, bias=True),
        need(hf, "intermediate_size"),
        ClampedSwiglu(need(hf, "swiglu_alpha"), need(hf, "swiglu_limit")),
        bias=True,
    )
    rope = rope_spec(hf)
    layers = [
        LayerSpec(attention(hf, rope, window, sinks=True), experts) for window in windows(hf, lambda i: i % 2 == 0)
    ]
    return model(hf, "gpt_oss", layers)


GPT_OSS = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    gpt_oss,
    DEFAULTS,
    LAYER_MAP,
    fused_experts=FusedExperts(transposed=True, interleaved=True),
)
