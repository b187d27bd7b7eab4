"""LongCat-Flash: each of its layers is two of ours, both with latent attention and a dense feed-forward. The first also
has experts, some of which do nothing, and their sum joins the second."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.families.common import MOE_LAYER, Family, Hf, expect, first_of, mlp, model, need
from inferlib.models.families.latent import LATENT, latent_attention

LAYER_MAP = (
    {part: module.replace("self_attn.", "self_attn.{sub}.") for part, module in LATENT.items()}
    | {part: module for part, module in MOE_LAYER.items() if part.startswith("mlp.experts.")}
    | {"mlp." + part: "mlps.{sub}." + part + "_proj" for part in ("gate", "up", "down")}
    | {"mlp.shared." + part: "mlps.{sub}." + part + "_proj" for part in ("gate", "up", "down")}
    | {
        "mlp.router": "mlp.router.classifier",
        "mlp.router.correction": "mlp.router.e_score_correction_bias",
        "pre_attn_norm": "input_layernorm.{sub}",
        "pre_mlp_norm": "post_attention_layernorm.{sub}",
    }
)
DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "moe_topk": 12,
    "expert_ffn_hidden_size": 2048,
    "routed_scaling_factor": 6.0,
    "rope_theta": 1e7,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def longcat_flash(hf: Hf) -> ModelConfig:
    expect(hf, "zero_expert_type", "identity")
    expect(hf, "router_bias", False)
    count = hf.get("num_layers") or need(hf, "num_hidden_layers") // 2
    width, hidden = need(hf, "hidden_size"), first_of(hf, "ffn_hidden_size", "intermediate_size")
    dense = mlp({**hf, "intermediate_size": hidden})
    attention = latent_attention(
        hf,
        interleaved=True,
        query_scale=(width / need(hf, "q_lora_rank")) ** 0.5,
        latent_scale=(width / need(hf, "kv_lora_rank")) ** 0.5,
    )
    zero = hf["zero_expert_num"] or 0
    router = RouterSpec(
        need(hf, "n_routed_experts") + zero,
        need(hf, "moe_topk"),
        scale=need(hf, "routed_scaling_factor"),
        correction=True,
    )
    experts = MoeSpec(
        router, need(hf, "expert_ffn_hidden_size"), dense.activation, shared=dense, identity=zero, deferred=True
    )
    pair = [LayerSpec(attention, experts), LayerSpec(attention, dense)]
    return model(hf, "longcat_flash", pair * count)


LONGCAT_FLASH = Family(
    "longcat_flash",
    ("LongcatFlashForCausalLM",),
    longcat_flash,
    DEFAULTS,
    LAYER_MAP,
    drafts=("model.mtp.",),
    sublayers=2,
)
