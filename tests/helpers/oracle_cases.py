"""The oracle's cases: configurations of tiny models of every family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Small, yet with everything distinct: 3 queries per KV head, 2 KV heads, heads wider than their share
# of the model, and a window (where there is one) far shorter than a prompt.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Every part of a latent head has a size of its own.
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}
_DEEPSEEK = {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2}
_DEEPSEEK |= {"first_k_dense_replace": 1}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
_DELTA |= {"linear_value_head_dim": 20}
_CONV = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "norm_eps": 1e-3}
# One group of six heads of 32.
_STATES = {"mamba_n_heads": 6, "mamba_d_state": 12}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.25,
}
# Stacked: two layers, the second of which shares its cache, one that does too, and a pattern of two twice.
_SHARED = {"num_hidden_layers": 7, "num_kv_shared_layers": 4}
_SHARED |= {"layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 3]}
# What a family needs beyond the sizes to show its peculiarities at this scale.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "ministral": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "qwen2": {},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 20, "sliding_window": 8},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 2,
        "sliding_window": 8,
    },
    # Heads of layers without a window are larger, and their values are their keys.
    "gemma4_text": {"tie_word_embeddings": True, "num_hidden_layers": 7, "sliding_window": 8, "global_head_dim": 32}
    | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    "gemma3n_text": {**_SHARED, "tie_word_embeddings": True, "sliding_window": 8, "laurel_rank": 20}
    | {"intermediate_size": [80] * 3 + [72] * 4, "activation_sparsity_pattern": [0.7] * 2 + [0.0] * 5}
    | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 120, "altup_num_inputs": 3},
    "phi3": {"head_dim": None, "sliding_window": 8},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 5},
    "smollm3": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "granite": _GRANITE,
    "glm": {},
    "glm4": {},
    "cohere2": {"head_dim": None, "tie_word_embeddings": True, "sliding_window": 8, "logit_scale": 0.75},
    "exaone4": {"sliding_window": 8},
    "seed_oss": {},
    "ernie4_5": {"tie_word_embeddings": True},
    "hunyuan_v1_dense": {},
    "minicpm3": {**LATENT, "scale_emb": 3.0, "dim_model_base": 64},
    # Experts few enough that some are chosen by several of a few tokens, many enough that some are not.
    "mixtral": {"num_local_experts": 5},
    "qwen2_moe": {**_EXPERTS, "num_experts": 7, "shared_expert_intermediate_size": 56, "head_dim": None},
    "qwen3_moe": {**_EXPERTS, "num_local_experts": 7},
    # Two key heads with two value heads each; a segment of three layers that repeats, and one behind it.
    "qwen3_next": {**_EXPERTS, **_DELTA, "num_experts": 7},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA, "num_experts": 7},
    "kimi_linear": {
        **{k: v for k, v in LATENT.items() if k != "q_lora_rank"},
        **_EXPERTS,
        "n_group": 4,
        "topk_group": 2,
    }
    | {"num_local_experts": 8, "linear_num_heads": 3, "linear_head_dim": 20, "num_hidden_layers": 5},
    "olmo_hybrid": {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 20}
    | {"linear_value_head_dim": 20, "layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax": {"num_local_experts": 5, "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.7}
    | {"linear_attn_alpha_factor": 0.8, "linear_attn_beta_factor": 1.1, "mlp_alpha_factor": 0.9}
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
    "lfm2": {**_CONV, "block_multiple_of": 8},
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_experts": 7, "num_dense_layers": 1},
    # Alone and with a feed-forward, both kinds; its pattern of three layers repeats. Two groups of three heads.
    "nemotron_h": {
        "layers_block_type": [*["mamba", "mlp", "mamba", "attention", "mlp"] * 2, "attention"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 20,
        "ssm_state_size": 12,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-3,
        "time_step_min": 1e-9,  # which transformers takes for `time_step_limit`
        "time_step_floor": 0.5,  # of steps as they are drawn
    },
    "granitemoehybrid": {**_GRANITE, **_STATES, "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": None}
    | {"layer_types": ["mamba", "mamba", "attention"], "num_hidden_layers": 3, "shared_intermediate_size": 56},
    "bamba": {**_STATES, "attn_layer_indices": [1, 3], "head_dim": None},
    "deepseek_v2": {**LATENT, **_DEEPSEEK},
    "deepseek_v3": {**LATENT, **_DEEPSEEK},
    "glm4_moe_lite": {**LATENT, **_EXPERTS, "n_routed_experts": 7},
    "mistral4": {**LATENT, **_DEEPSEEK, "first_k_dense_replace": 0},
    "mimo_v2_flash": {**_EXPERTS, "n_routed_experts": 7, "num_key_value_heads": 1, "v_head_dim": 20}
    | {"sliding_window": 8, "num_hidden_layers": 7},
    # The temperature of queries changes within a prompt.
    "llama4_text": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size_mlp": 72}
    | {"attention_chunk_size": 8, "floor_scale": 12, "attn_scale": 0.3, "num_hidden_layers": 5},
    "longcat_flash": {**LATENT, "head_dim": 8, "n_routed_experts": 5, "zero_expert_num": 2, "moe_topk": 3}
    | {"expert_ffn_hidden_size": 40, "routed_scaling_factor": 2.0},
    "gpt2": {"tie_word_embeddings": True},
    "gpt_oss": {**_EXPERTS, "num_local_experts": 7, "sliding_window": 8},
    "olmoe": {"num_experts_per_tok": 3, "num_experts": 7, "head_dim": None},
    "granitemoe": {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": None},
    "phimoe": {"num_local_experts": 5, "head_dim": None},
    "glm4_moe": {**_DEEPSEEK, "routed_scaling_factor": 1.7},
    "dots1": {**_DEEPSEEK, "routed_scaling_factor": 0.7},
    "ernie4_5_moe": {"moe_intermediate_size": 40, "moe_k": 3, "moe_num_experts": 7, "head_dim": None},
    "minimax_m2": {"num_local_experts": 7, "num_experts_per_tok": 3},
    "afmoe": {**_EXPERTS, "num_experts": 7, "num_shared_experts": 2, "route_scale": 1.7, "sliding_window": 8},
    "laguna": {**_EXPERTS, "num_experts": 7, "shared_expert_intermediate_size": 56, "sliding_window": 8}
    | {"layer_types": ["full_attention", *["sliding_attention"] * 3], "num_attention_heads_per_layer": [6, 4, 4, 4]},
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_VISUAL = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 96}
# Models that see, whose text model has a family above: its `model_type`, and what sees.
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _VISUAL),
    "qwen3_5_moe": ("qwen3_5_moe_text", _VISUAL),
    "gemma3": ("gemma3_text", _VISION),
    "llama4": ("llama4_text", {**_VISION, **dict.fromkeys(("vision_output_dim", "projector_output_dim"), 16)}),
    "mistral3": ("mistral", {**_VISION, "model_type": "pixtral"}),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint to compare on a prompt of `length` tokens, run with `length` as the longest sequence. Prompts of one
    length share programs of single operations; states have chunks of 64 tokens."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    length: int = 80


def _rope(kind: str, theta: float = 1e4, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


_LLAMA3 = _rope(
    "llama3", 5e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
# The trained context is shorter than a prompt, so that the temperature of queries changes within it.
_SHORT_YARN = {"factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
_SHORT_YARN |= {"llama_4_scaling_beta": 0.3}
_LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0],
    "partial_rotary_factor": 0.75,
}
_PHIMOE_FACTORS = {
    "short_factor": [1 + i / 8 for i in range(8)],
    "long_factor": [1 + i for i in range(8)],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
}
_PHI_LONG = {**_rope("longrope", **_LONGROPE), "original_max_position_embeddings": 32}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_TWO_LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", _FULL]}

CASES = [
    Case("llama", "llama"),
    Case(
        "llama-options",
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
        | {"num_key_value_heads": None, "head_dim": None},
    ),
    Case("llama-linear", "llama", _rope("linear", factor=4.0)),
    Case("llama-dynamic-within", "llama", _rope("dynamic", factor=2.0)),
    Case("llama-dynamic-beyond", "llama", {**_rope("dynamic", factor=3.0), "max_position_embeddings": 27}),
    Case("llama-llama3", "llama", _LLAMA3),
    Case("llama-yarn-mscale", "llama", _rope("yarn", **_YARN, mscale=1.3, mscale_all_dim=0.7, truncate=False)),
    Case("llama-yarn-factor", "llama", _rope("yarn", **_YARN, attention_factor=0.8, beta_fast=16, beta_slow=2)),
    Case("mistral", "mistral"),
    Case("mistral-no-window", "mistral", {"sliding_window": None}),
    Case("ministral", "ministral"),
    Case("ministral3", "ministral3"),
    Case("qwen2", "qwen2"),
    Case("qwen2-windows", "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    Case("qwen3", "qwen3", {"tie_word_embeddings": True}),
    Case(
        "qwen3-windows",
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL],
            "attention_bias": True,
        },
    ),
    Case("gemma", "gemma"),
    Case("gemma2", "gemma2"),
    Case("gemma2-caps", "gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}),
    Case("gemma2-no-caps", "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Case("gemma3", "gemma3_text"),
    Case(
        "gemma3-linear",
        "gemma3_text",
        {
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
            "num_hidden_layers": 6,
        },
    ),
    Case("gemma3n", "gemma3n_text"),
    Case(
        "gemma3n-own-caches",
        "gemma3n_text",
        {"num_hidden_layers": 3, "layer_types": [_SLIDING, _FULL, _SLIDING], "num_kv_shared_layers": 0}
        | {"intermediate_size": 80, "activation_sparsity_pattern": None, "final_logit_softcapping": 4.0},
    ),
    Case("gemma4", "gemma4_text"),
    Case(
        "gemma4-shared",
        "gemma4_text",
        {**_SHARED, "use_double_wide_mlp": True, "attention_k_eq_v": False}
        | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131},
    ),
    Case(
        "gemma4-experts",
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 40}
        | {"num_hidden_layers": 4, "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL]},
    ),
    Case("gemma4-values", "gemma4_text", {"attention_k_eq_v": False, "final_logit_softcapping": 4.0}),
    Case("phi3", "phi3"),
    Case("phi3-partial", "phi3", {**_rope("default", partial_rotary_factor=0.5), "sliding_window": None}),
    Case("phi3-longrope-short", "phi3", _PHI_LONG | {"original_max_position_embeddings": 128}),
    Case("phi3-longrope-long", "phi3", _PHI_LONG),
    Case("olmo2", "olmo2"),
    Case("olmo2-biases", "olmo2", {"attention_bias": True}),
    Case("olmo3", "olmo3"),
    Case(
        "olmo3-yarn",
        "olmo3",
        {
            "rope_parameters": {
                _FULL: {"rope_type": "yarn", "rope_theta": 5e5, **_YARN, "attention_factor": 1.2},
                _SLIDING: {"rope_type": "default", "rope_theta": 5e5},
            }
        },
    ),
    Case("smollm3", "smollm3"),
    Case(
        "smollm3-windows",
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0, 0, 1, 1]},
    ),
    Case("granite", "granite"),
    Case(
        "granite-tied-biases",
        "granite",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    Case("glm", "glm"),
    Case("glm4", "glm4"),
    Case("glm4-full-rotary", "glm4", {**_rope("default", partial_rotary_factor=1.0), "attention_bias": False}),
    Case("cohere2", "cohere2"),
    Case("cohere2-biases", "cohere2", {"attention_bias": True, "num_hidden_layers": 5}),
    Case("exaone4", "exaone4"),
    Case("exaone4-global", "exaone4", {"sliding_window": None, "layer_types": [_FULL] * 4}),
    Case("seed-oss", "seed_oss"),
    Case("seed-oss-biases", "seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    Case("ernie4.5", "ernie4_5"),
    Case("ernie4.5-biases", "ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    Case("hunyuan", "hunyuan_v1_dense"),
    Case("hunyuan-alpha", "hunyuan_v1_dense", _rope("dynamic", factor=1.0, alpha=50.0)),
    Case("deepseek-v2", "deepseek_v2"),
    Case(
        "deepseek-v2-groups",
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None}
        | {"routed_scaling_factor": 2.0},
    ),
    Case("deepseek-v3", "deepseek_v3", _rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=1.0)),
    Case("deepseek-v3-halves", "deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    Case("glm4-moe-lite", "glm4_moe_lite"),
    Case("mistral4", "mistral4", {**_rope("yarn", **_SHORT_YARN), "first_k_dense_replace": 2}),
    Case("gpt-oss", "gpt_oss"),
    Case("gpt-oss-plain", "gpt_oss", {**_rope("default"), "layer_types": [_FULL, _SLIDING] * 2, "swiglu_limit": 0.5}),
    Case("mimo-v2-flash", "mimo_v2_flash"),
    Case("mimo-v2-flash-biases", "mimo_v2_flash", {"attention_bias": True, "attention_value_scale": None}),
    Case("llama4", "llama4_text"),
    Case(
        "llama4-mixed",
        "llama4_text",
        {"interleave_moe_layer_step": 2, "no_rope_layers": [0, 1, 1, 0, 1], "use_qk_norm": False}
        | {"attention_bias": True, "attn_temperature_tuning": False, "attention_chunk_size": 7},
    ),
    Case("longcat-flash", "longcat_flash"),
    Case("gpt2", "gpt2"),
    Case("gpt2-scales", "gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 72, "tie_word_embeddings": False}),
    Case("minicpm3", "minicpm3"),
    Case("minicpm3-whole-queries", "minicpm3", {"q_lora_rank": None, "attention_bias": True}),
    Case("minicpm3-yarn", "minicpm3", _rope("yarn", **_YARN, mscale=1.3, mscale_all_dim=0.7)),
    Case(
        "hunyuan-dynamic",
        "hunyuan_v1_dense",
        {**_rope("dynamic", factor=3.0), "max_position_embeddings": 20, "attention_bias": True},
    ),
    Case("mixtral", "mixtral"),
    Case("mixtral-windows", "mixtral", {"sliding_window": 8, "tie_word_embeddings": True}),
    Case("qwen2-moe", "qwen2_moe"),
    Case("qwen2-moe-mixed", "qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True, "num_hidden_layers": 6}),
    Case("qwen3-moe", "qwen3_moe"),
    Case("olmoe", "olmoe"),
    Case("olmoe-normed-biases", "olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    Case("granite-moe", "granitemoe"),
    Case("phimoe", "phimoe"),
    Case(
        "phimoe-longrope-biases",
        "phimoe",
        {
            **_rope("longrope", **_PHIMOE_FACTORS, original_max_position_embeddings=128),
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
            "sliding_window": 8,
        },
    ),
    Case("glm4-moe", "glm4_moe"),
    Case("glm4-moe-normed-biases", "glm4_moe", {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    Case("dots1", "dots1"),
    Case("dots1-windows", "dots1", {"sliding_window": 8, "max_window_layers": 2, "norm_topk_prob": True}),
    Case("ernie4.5-moe", "ernie4_5_moe"),
    Case(
        "ernie4.5-moe-biases",
        "ernie4_5_moe",
        {"use_bias": True, "moe_layer_interval": 2, "moe_layer_end_index": 3, "num_hidden_layers": 6},
    ),
    Case("minimax-m2", "minimax_m2"),
    Case("minimax-m2-partial", "minimax_m2", _rope("default", partial_rotary_factor=0.5)),
    Case("afmoe", "afmoe"),
    Case("afmoe-mup-biases", "afmoe", {"mup_enabled": True, "attention_bias": True, "num_dense_layers": 2}),
    Case("laguna", "laguna"),
    Case(
        "laguna-elements",
        "laguna",
        {"gating": "per-element", "moe_router_logit_softcapping": 1.5, "moe_routed_scaling_factor": 1.7},
    ),
    Case("qwen3-next", "qwen3_next"),
    Case(
        "qwen3-next-mixed",
        "qwen3_next",
        {"layer_types": [_FULL, *["linear_attention"] * 3], "mlp_only_layers": [1], "norm_topk_prob": False}
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "num_hidden_layers": 4},
    ),
    Case("qwen3.5", "qwen3_5_text"),
    Case("qwen3.5-tied", "qwen3_5_text", {"tie_word_embeddings": True, "full_attention_interval": 2}),
    Case("qwen3.5-moe", "qwen3_5_moe_text"),
    Case("nemotron-h", "nemotron_h"),
    Case(
        "nemotron-h-limited",
        "nemotron_h",
        {"layers_block_type": ["attention", "mlp", *["mamba", "mlp"] * 3, "mamba"]}
        | {"n_groups": 3, "use_conv_bias": False, "mlp_bias": True}
        | {"time_step_min": 0.7, "time_step_limit": [0.7, float("inf")]},
    ),
    Case("nemotron-h-feeds", "nemotron_h", {"layers_block_type": ["mlp", "mamba", *["mlp"] * 3, "attention", "mlp"]}),
    Case(
        "nemotron-h-moe",
        "nemotron_h",
        {"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.7}
        | {"n_group": 4, "topk_group": 2},
    ),
    Case("granite-hybrid", "granitemoehybrid"),
    Case(
        "granite-hybrid-dense",
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 2, "mamba_conv_bias": False}
        | {"time_step_limit": [0.2, 0.9], "tie_word_embeddings": True, "attention_bias": True},
    ),
    Case("bamba", "bamba"),
    Case("bamba-biases", "bamba", {"attention_bias": True, "mlp_bias": True, "mamba_d_head": 16, "mamba_n_heads": 12}),
    Case("qwen3-moe-mixed", "qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "attention_bias": True}),
    Case("minimax", "minimax"),
    Case("minimax-plain", "minimax", {"layer_types": None, "mlp_beta_factor": 0.6, "num_hidden_layers": 3}),
    Case("kimi-linear", "kimi_linear"),
    Case(
        "kimi-linear-mixed",
        "kimi_linear",
        {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3}
        | {"q_lora_rank": 20, "mlp_layer_types": ["sparse", "dense", "dense"], "linear_conv_kernel_dim": 2},
    ),
    Case("olmo-hybrid", "olmo_hybrid"),
    Case(
        "olmo-hybrid-plain",
        "olmo_hybrid",
        {"rope_parameters": {"rope_theta": None}, "linear_allow_neg_eigval": False, "num_hidden_layers": 2}
        | {"layer_types": ["full_attention", "linear_attention"]},
    ),
    Case("lfm2", "lfm2"),
    Case(
        "lfm2-sizes",
        "lfm2",
        {"layer_types": None, "full_attn_idxs": [2], "block_ffn_dim_multiplier": 1.5, "conv_L_cache": 4}
        | {"tie_word_embeddings": True, "num_hidden_layers": 3},
    ),
    Case("lfm2-moe", "lfm2_moe"),
    Case("lfm2-moe-plain", "lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "num_hidden_layers": 4}),
    Case("qwen3.5-seeing", "qwen3_5", _TWO_LINEAR),
    Case("qwen3.5-moe-seeing", "qwen3_5_moe", _TWO_LINEAR),
    Case("gemma3-seeing", "gemma3", {"num_hidden_layers": 2}),
    Case("llama4-seeing", "llama4", {"num_hidden_layers": 2}),
    Case("mistral3", "mistral3", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    Case("mistral3-ministral3", "mistral3", {"text_type": "ministral3", "num_hidden_layers": 2}),
    Case("mistral3-mistral4", "mistral3", {"text_type": "mistral4", "num_hidden_layers": 2}),
]


# SmolLM2's heads in small: 9, of which 3 for keys and values, which no even mesh divides.
SMOLLM2_HEADS: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}
SMOLLM2_HEADS |= {"tie_word_embeddings": True}
