"""What the recipes of families with multi-head latent attention (MLA) share."""

from __future__ import annotations

import math
from typing import Any

from inferlib.models.config import MlaSpec, RopeSpec
from inferlib.models.families.common import LAYER, Hf, need, rope_spec

LATENT = LAYER | {
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
}


def latent_attention(hf: Hf, *, interleaved: bool, query_scale: float = 1.0, **options: Any) -> MlaSpec:
    """DeepSeek's attention; RMS norms of latents have an epsilon of their own, whatever `rms_norm_eps` is.

    interleaved: see `RopeSpec`. query_scale: multiplies queries. options: fields of `MlaSpec` where a family differs.
    """
    rope = rope_spec({**hf, "head_dim": need(hf, "qk_rope_head_dim")}, interleaved=interleaved)
    nope, bias = need(hf, "qk_nope_head_dim"), bool(hf.get("attention_bias"))
    return MlaSpec(
        heads=need(hf, "num_attention_heads"),
        q_rank=hf.get("q_lora_rank"),
        kv_rank=need(hf, "kv_lora_rank"),
        nope_dim=nope,
        value_dim=need(hf, "v_head_dim"),
        rope=rope,
        scale=(nope + rope.dim) ** -0.5 * _mscale(rope) ** 2 * query_scale,
        latent_bias=bias,
        o_bias=bias,
        **options,
    )


def _mscale(rope: RopeSpec) -> float:
    """The factor on queries and keys in a stretched context (YaRN with `mscale_all_dim`)."""
    scaling = rope.scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
