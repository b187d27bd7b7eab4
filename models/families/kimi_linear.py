"""Kimi Linear: three layers of Kimi Delta Attention, then one of latent attention without positions; experts."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import (
    Family,
    Hf,
    expect,
    grouped_sigmoid_router,
    layer_types,
    model,
    need,
    shared_and_routed,
)
from inferlib.models.families.deepseek import feeds
from inferlib.models.families.latent import LATENT, latent_attention
from inferlib.models.families.mistral import MIXTRAL_LAYER
from inferlib.models.mixers.kimi_delta import KimiDeltaSpec

DEFAULTS = {
    "max_position_embeddings": 1048576,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
}
# Option names in published configs -> DeepSeek's names.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# The same for names in `linear_attn_config`.
_LINEAR_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
LAYER = (
    LATENT
    | {name: module for name, module in MIXTRAL_LAYER.items() if name.startswith("mlp.")}
    | {
        "mlp.router.correction": "block_sparse_moe.gate.e_score_correction_bias",
        "mlp.shared.gate": "block_sparse_moe.shared_experts.gate_proj",
        "mlp.shared.up": "block_sparse_moe.shared_experts.up_proj",
        "mlp.shared.down": "block_sparse_moe.shared_experts.down_proj",
        "delta.decay": "self_attn.A_log",
        "delta.decay_shift": "self_attn.dt_bias",
        "delta.norm": "self_attn.o_norm",
        "delta.fade_a": "self_attn.f_a_proj",
        "delta.fade_b": "self_attn.f_b_proj",
        "delta.gate_a": "self_attn.g_a_proj",
        "delta.gate_b": "self_attn.g_b_proj",
    }
    | {f"delta.{part}": f"self_attn.{part}_proj" for part in "qkvob"}
    | {f"delta.{part}_conv": f"self_attn.{part}_conv1d" for part in "qkv"}
)


def kimi_linear(hf: Hf) -> ModelConfig:
    expect(hf, "hidden_act", "silu")
    expect(hf, "moe_router_activation_func", "sigmoid")
    expect(hf, "mla_use_nope", True)
    expect(hf, "rope_scaling")
    linear = hf.get("linear_attn_config") or {}
    hf = {_NAMES.get(key, key): value for key, value in hf.items()}
    hf |= {_LINEAR_NAMES[key]: value for key, value in linear.items() if key in _LINEAR_NAMES}
    attends = linear.get("full_attn_layers", range(5, need(hf, "num_hidden_layers") + 1, 4))  # the first layer is 1
    kinds = layer_types(hf, "linear_attention", lambda i: i + 1 not in attends)
    heads, size, eps = need(hf, "linear_num_heads"), need(hf, "linear_head_dim"), need(hf, "rms_norm_eps")
    delta = KimiDeltaSpec(heads, heads, size, size, need(hf, "linear_conv_kernel_dim"), eps)
    full = latent_attention(hf, interleaved=False, rotates=False)
    experts = shared_and_routed(hf, grouped_sigmoid_router(hf))
    mixers = [full if kind == "full_attention" else delta for kind in kinds]
    layers = [LayerSpec(mixer, feed) for mixer, feed in zip(mixers, feeds(hf, experts), strict=True)]
    return model(hf, "kimi_linear", layers)


KIMI_LINEAR = Family("kimi_linear", ("KimiLinearForCausalLM",), kimi_linear, DEFAULTS, LAYER)
