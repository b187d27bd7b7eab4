"""LFM2, dense and with experts: gated short convolutions, and some layers of attention with normed queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

from inferlib.models.config import ConfigError, LayerSpec, MlpSpec, ModelConfig, MoeSpec, NormSpec, RouterSpec
from inferlib.models.families.common import (
    LAYER,
    TOP,
    Family,
    Hf,
    attention,
    expect,
    layer_types,
    model,
    need,
    rope_spec,
)
from inferlib.models.mixers.short_conv import ShortConvSpec

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE_DEFAULTS = DEFAULTS | {
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
MOE_DEFAULTS = DEFAULTS | {
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
_LAYER = LAYER | {
    "attn.o": "self_attn.out_proj",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "conv.bcx": "conv.in_proj",
    "conv.conv": "conv.conv",
    "conv.o": "conv.out_proj",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "mlp.router": "feed_forward.gate",
    "mlp.router.correction": "feed_forward.expert_bias",
    "mlp.experts.gate": "feed_forward.experts.{e}.w1.weight",
    "mlp.experts.up": "feed_forward.experts.{e}.w3.weight",
    "mlp.experts.down": "feed_forward.experts.{e}.w2.weight",
    "pre_attn_norm": "operator_norm",
    "pre_mlp_norm": "ffn_norm",
}
_TOP = TOP | {"final_norm": "model.embedding_norm"}


def lfm2(hf: Hf) -> ModelConfig:
    hidden = hf.get("block_ff_dim") or need(hf, "intermediate_size")
    if hf["block_auto_adjust_ff_dim"]:
        hidden, multiple = int((hf["block_ffn_dim_multiplier"] or 1) * int(2 * hidden / 3)), hf["block_multiple_of"]
        hidden = -(-hidden // multiple) * multiple
    attends = hf.get("full_attn_idxs")
    kinds = layer_types(hf, "conv", lambda i: attends is not None and i not in attends)
    return _hybrid(hf, "lfm2", kinds, [MlpSpec(hidden)] * len(kinds))


def lfm2_moe(hf: Hf) -> ModelConfig:
    router = RouterSpec(
        need(hf, "num_experts"),
        need(hf, "num_experts_per_tok"),
        score="sigmoid",
        renormalize=hf["norm_topk_prob"],
        scale=hf["routed_scaling_factor"],
        correction=hf["use_expert_bias"],
    )
    dense, experts = MlpSpec(need(hf, "intermediate_size")), MoeSpec(router, need(hf, "moe_intermediate_size"))
    need(hf, "layer_types")
    kinds = layer_types(hf, "conv", lambda i: False)
    feeds = [dense if i < hf["num_dense_layers"] else experts for i in range(len(kinds))]
    return _hybrid(hf, "lfm2_moe", kinds, feeds)


def _hybrid(hf: Hf, family: str, kinds: Sequence[str], feeds: list[MlpSpec | MoeSpec]) -> ModelConfig:
    expect(hf, "conv_bias", False)
    channels, heads = need(hf, "hidden_size"), need(hf, "num_attention_heads")
    if channels % heads:
        raise ConfigError(f"hidden_size={channels} in config.json does not divide into num_attention_heads={heads}")
    conv = ShortConvSpec(heads, channels // heads, need(hf, "conv_L_cache"))
    full = attention(hf, rope_spec(hf), qk_norm="head")
    layers = [LayerSpec(conv if kind == "conv" else full, feed) for kind, feed in zip(kinds, feeds, strict=True)]
    tied = hf.get("tie_embedding")
    hf = hf if tied is None else {**hf, "tie_word_embeddings": tied}
    return model(hf, family, layers, NormSpec(eps=need(hf, "norm_eps")))


LFM2 = Family("lfm2", ("Lfm2ForCausalLM",), lfm2, DENSE_DEFAULTS, _LAYER, _TOP)
LFM2_MOE = Family("lfm2_moe", ("Lfm2MoeForCausalLM",), lfm2_moe, MOE_DEFAULTS, _LAYER, _TOP)
