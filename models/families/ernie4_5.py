"""ERNIE 4.5, dense and MoE: Llama with interleaved rotary pairs and one switch for all biases."""

from __future__ import annotations

from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.families.common import (
    MOE_LAYER,
    Family,
    Hf,
    activation,
    attention,
    expect,
    mlp,
    model,
    need,
    rope_spec,
)

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
MOE_DEFAULTS = {key: value for key, value in DEFAULTS.items() if key != "head_dim"} | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
MOE_NAMES = MOE_LAYER | {"mlp.router.correction": "mlp.moe_statics.e_score_correction_bias[0]"}


def _attention(hf: Hf) -> AttentionSpec:
    bias = bool(hf["use_bias"])
    return attention(hf, rope_spec(hf, interleaved=True), qkv_bias=bias, o_bias=bias)


def ernie4_5(hf: Hf) -> ModelConfig:
    layer = LayerSpec(_attention(hf), mlp(hf, bias_key="use_bias"))
    return model(hf, "ernie4_5", [layer] * need(hf, "num_hidden_layers"))


def ernie4_5_moe(hf: Hf) -> ModelConfig:
    """Experts in every `moe_layer_interval`-th layer from the start to the end index, both included."""
    expect(hf, "moe_norm_min", 1e-12)
    attn, dense, hidden = _attention(hf), mlp(hf, bias_key="use_bias"), need(hf, "moe_intermediate_size")
    router = RouterSpec(need(hf, "moe_num_experts"), need(hf, "moe_k"), renormalize=True, correction=True)
    act, count = activation(hf, "hidden_act"), need(hf, "num_hidden_layers")
    shared = MlpSpec(hidden * hf["moe_num_shared_experts"], act, dense.bias) if hf["moe_num_shared_experts"] else None
    experts = MoeSpec(router, hidden, act, shared=shared)
    end = hf["moe_layer_end_index"] if hf["moe_layer_end_index"] >= 0 else count - 1
    sparse = [hf["moe_layer_start_index"] <= i <= end and (i + 1) % hf["moe_layer_interval"] == 0 for i in range(count)]
    layers = [LayerSpec(attn, experts if some else dense) for some in sparse]
    return model(hf, "ernie4_5_moe", layers, head_bias=dense.bias)


ERNIE4_5 = Family("ernie4_5", ("Ernie4_5ForCausalLM",), ernie4_5, DEFAULTS)
ERNIE4_5_MOE = Family(
    "ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), ernie4_5_moe, MOE_DEFAULTS, MOE_NAMES, drafts=("model.mtp_",)
)
