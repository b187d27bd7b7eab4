"""Qwen3-Next and Qwen3.5, dense and with experts (text): three layers of linear attention, by the gated delta rule,
then one of gated attention."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, MlpSpec, ModelConfig, MoeSpec, NormSpec, OutputGate, RouterSpec
from inferlib.models.families.common import (
    LAYER,
    Family,
    Hf,
    MtpNames,
    activation,
    attention,
    expect,
    layer_types,
    mlp,
    model,
    need,
    rope_spec,
    softmax_router,
    text_of,
)
from inferlib.models.families.qwen_moe import QWEN2_LAYER
from inferlib.models.mixers.gated_delta import GatedDeltaSpec

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
NEXT_DEFAULTS = DEFAULTS | _EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
NEXT_DEFAULTS |= {"decoder_sparse_step": 1, "mlp_only_layers": ()}
MOE_DEFAULTS = DEFAULTS | _EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8}

_LAYER = {
    # Queries and their gates are one tensor, each head's in turn.
    "attn.gate": "self_attn.q_proj",
    "delta.conv": "linear_attn.conv1d",
    "delta.decay": "linear_attn.A_log",
    "delta.decay_shift": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.norm",
    "delta.o": "linear_attn.out_proj",
}
_APART = _LAYER | {f"delta.{part}": f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")}
_TOGETHER = _LAYER | {f"delta.{part}": f"linear_attn.in_proj_{part}" for part in ("qkvz", "ba")}


def qwen3_next(hf: Hf) -> ModelConfig:
    router = softmax_router(hf, need(hf, "num_experts"))
    dense = hf["mlp_only_layers"] or ()
    sparse = [i not in dense and (i + 1) % hf["decoder_sparse_step"] == 0 for i in range(need(hf, "num_hidden_layers"))]
    return _hybrid(hf, "qwen3_next", [_experts(hf, router) if experts else mlp(hf) for experts in sparse])


def qwen3_5(hf: Hf) -> ModelConfig:
    return _hybrid(hf, "qwen3_5", [mlp(hf)] * need(hf, "num_hidden_layers"))


def qwen3_5_moe(hf: Hf) -> ModelConfig:
    router = RouterSpec(need(hf, "num_experts"), need(hf, "num_experts_per_tok"), renormalize=True)
    return _hybrid(hf, "qwen3_5_moe", [_experts(hf, router)] * need(hf, "num_hidden_layers"))


def _experts(hf: Hf, router: RouterSpec) -> MoeSpec:
    act = activation(hf, "hidden_act")
    shared = MlpSpec(need(hf, "shared_expert_intermediate_size"), act)
    return MoeSpec(router, need(hf, "moe_intermediate_size"), act, shared=shared, shared_gate=True)


def _hybrid(hf: Hf, family: str, feeds: list[MlpSpec | MoeSpec]) -> ModelConfig:
    expect(hf, "attention_bias", False)
    expect(hf, "hidden_act", "silu")
    every, eps = hf["full_attention_interval"], need(hf, "rms_norm_eps")
    delta = GatedDeltaSpec(
        need(hf, "linear_num_value_heads"),
        need(hf, "linear_num_key_heads"),
        need(hf, "linear_key_head_dim"),
        need(hf, "linear_value_head_dim"),
        need(hf, "linear_conv_kernel_dim"),
        eps,
    )
    gate = OutputGate("sigmoid", per_head=False)
    full = attention(hf, rope_spec(hf, partial=True), qk_norm="head", gate=gate)
    kinds = layer_types(hf, "linear_attention", lambda i: (i + 1) % every != 0)
    mixers = [full if kind == "full_attention" else delta for kind in kinds]
    layers = [LayerSpec(mixer, feed) for mixer, feed in zip(mixers, feeds, strict=True)]
    return model(hf, family, layers, NormSpec(eps=eps, unit_offset=True))


# As published in bfloat16; in fp8 experts are apart.
_FUSED = {"mlp.experts.gate_up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj"}
_MTP = MtpNames("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", normed=True)
_DRAFTS = (_MTP.prefix,)

QWEN3_NEXT = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
    qwen3_next,
    NEXT_DEFAULTS,
    QWEN2_LAYER | _TOGETHER,
    drafts=_DRAFTS,
    mtp=_MTP,
)
QWEN3_5 = Family("qwen3_5", ("Qwen3_5ForCausalLM",), qwen3_5, DEFAULTS, LAYER | _APART, drafts=_DRAFTS, mtp=_MTP)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    ("Qwen3_5MoeForCausalLM",),
    qwen3_5_moe,
    MOE_DEFAULTS,
    QWEN2_LAYER | _APART,
    fused=_FUSED,
    drafts=_DRAFTS,
    mtp=_MTP,
)
QWEN3_5_TEXT = text_of(QWEN3_5, "Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE_TEXT = text_of(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration")
