"""MiMo-V2-Flash: values smaller than keys, and on layers with a window twice the KV heads and learned sinks."""

from __future__ import annotations

from inferlib.models.config import AttentionSpec, LayerSpec, ModelConfig, RopeSpec
from inferlib.models.families.common import (
    MOE_LAYER,
    Family,
    Hf,
    attention,
    expect,
    grouped_sigmoid_router,
    model,
    need,
    rope_specs,
    shared_and_routed,
    windows,
)
from inferlib.models.families.deepseek import feeds

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "attention_value_scale": 0.707,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": 129,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 1,
}
LAYER_MAP = MOE_LAYER | {"attn.sinks": "self_attn.attention_sink_bias"}


def mimo_v2_flash(hf: Hf) -> ModelConfig:
    """`sliding_window_size`, where a config has it, does not count the query's own position."""
    hf = _by_other_names(hf)
    expect(hf, "scoring_func", "sigmoid")
    expect(hf, "topk_method", "noaux_tc")
    expect(hf, "attention_projection_layout", "split")
    scale, previous = hf.get("routed_scaling_factor"), hf.get("sliding_window_size")
    hf = {**hf, "routed_scaling_factor": 1.0 if scale is None else scale}
    hf = hf if previous is None else {**hf, "sliding_window": previous + 1}
    of_windows = {**hf, **_of_windows(hf)}
    full, sliding = rope_specs(hf, 1e4, partial=True)[0], rope_specs(of_windows, hf["swa_rope_theta"], partial=True)[1]
    feed = feeds(hf, shared_and_routed(hf, grouped_sigmoid_router(hf)))
    layers = [
        LayerSpec(_attention(hf, full, None) if window is None else _attention(of_windows, sliding, window), feed[i])
        for i, window in enumerate(windows(hf, lambda i: i > 0 and (i + 1) % 6 != 0))
    ]
    return model(hf, "mimo_v2_flash", layers)


def _attention(hf: Hf, rope: RopeSpec, window: int | None) -> AttentionSpec:
    options = {"value_dim": need(hf, "v_head_dim"), "value_scale": hf["attention_value_scale"] or 1.0, "o_bias": False}
    sinks = hf["add_full_attention_sink_bias" if window is None else "add_swa_attention_sink_bias"]
    return attention(hf, rope, window, sinks=sinks, **options)


def _by_other_names(hf: Hf) -> Hf:
    """Spell the options of a published config as transformers does."""
    options = {}
    if (pattern := hf.get("hybrid_layer_pattern")) is not None:
        options["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if isinstance(kinds := hf.get("moe_layer_freq"), (list, tuple)):
        options |= {"mlp_layer_types": ["sparse" if kind else "dense" for kind in kinds], "moe_layer_freq": None}
    if (eps := hf.get("layernorm_epsilon")) is not None:
        options["rms_norm_eps"] = eps
    return {**hf, **options}


def _of_windows(hf: Hf) -> Hf:
    """The head sizes of layers with a window."""
    ours = {"num_key_value_heads": 2 * need(hf, "num_key_value_heads")}
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    return ours | {key: hf["swa_" + key] for key in keys if hf.get("swa_" + key) is not None}


MIMO_V2_FLASH = Family(
    "mimo_v2_flash", ("MiMoV2FlashForCausalLM",), mimo_v2_flash, DEFAULTS, LAYER_MAP, drafts=("model.mtp.",)
)
