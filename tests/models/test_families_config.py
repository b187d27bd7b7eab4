"""Recipes against transformers' configuration classes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig

from inferlib.models.config import ConfigError, ModelConfig
from inferlib.models.families import _MISSING, FAMILIES, config_from_hf, family_of

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 300,
    "num_hidden_layers": 13,
    "num_attention_heads": 32,
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "laguna": "LagunaForCausalLM",
}
# Of these, the text models are.
WITH_TEXT = {
    f"{name}ForConditionalGeneration"
    for name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Mistral3", "Qwen3_5", "Qwen3_5Moe")
}
FULL, SLIDING = "full_attention", "sliding_attention"
# What configs of a family cannot leave out.
REQUIRED = {
    "lfm2_moe": {"layer_types": [FULL, *["conv"] * 12]},
    "nemotron_h": {"layers_block_type": [*["linear_attention", "mlp", "full_attention", "moe"] * 3, "mamba"]},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "gemma3n_text": {"vocab_size_per_layer_input": 900, "num_kv_shared_layers": 6},
    "gemma4_text": {"vocab_size_per_layer_input": 1000},
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
FACTORS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
LATENT_FACTORS = {**FACTORS, "original_max_position_embeddings": 32768}

# Options as published before `rope_parameters` and `layer_types` existed, by model type.
OLDER_CONFIGS = [
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    ("llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}, "attention_bias": True}),
    (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 64, "tie_word_embeddings": True},
    ),
    ("mistral", {"rope_theta": 1e6, "sliding_window": None}),
    ("qwen2", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 9}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 100, "attention_bias": True}),
    ("gemma", {"hidden_act": "gelu", "rope_theta": 2e4}),
    (
        "gemma3_text",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 1024,
            "sliding_window_pattern": 3,
        },
    ),
    ("gemma3_text", {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "final_logit_softcapping": 20.0}),
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS}, "max_position_embeddings": 131072}),
    ("phi3", {"partial_rotary_factor": 0.5, "rope_theta": 1e5, "sliding_window": 2047}),
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.2}}),
    ("smollm3", {"no_rope_layers": [1, 0] * 6 + [1], "rope_theta": 5e6}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64, "no_rope_layer_interval": 3}),
    ("glm4", {"partial_rotary_factor": 0.25, "rope_theta": 5e5, "attention_bias": False}),
    ("cohere2", {"sliding_window_pattern": 2, "rope_theta": 5e4, "logit_scale": 0.25}),
    ("exaone4", {"sliding_window_pattern": 3, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    ("seed_oss", {"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7, "attention_out_bias": True}),
    (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    ("minicpm3", {"rope_scaling": {"type": "longrope", **LATENT_FACTORS}, "qk_rope_head_dim": 16, "scale_emb": 3}),
    ("mixtral", {"rope_theta": 1e5, "sliding_window": 4096}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9}),
    ("qwen3_moe", {"rope_theta": 1e6, "head_dim": 64, "num_experts": 32, "norm_topk_prob": True}),
    ("glm4_moe", {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "use_qk_norm": True}),
    ("minimax_m2", {"rope_theta": 1e6, "rotary_dim": 64}),
    (
        "deepseek_v3",
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}, "sliding_window": 64}),
    ("llama4_text", {"rope_theta": 1e6, "no_rope_layers": [1, 0] * 6 + [1], "interleave_moe_layer_step": 2}),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}, "linear_allow_neg_eigval": False}),
    ("olmo_hybrid", {"rope_theta": None, "layer_types": [*["linear_attention", FULL] * 6, FULL]}),
    (
        "kimi_linear",
        {
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 13],
                "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 12],
                "head_dim": 64,
                "num_heads": 16,
                "short_conv_kernel_size": 3,
            },
            "model_max_length": 2048,
            "moe_renormalize": False,
            "num_expert_group": 4,
            "num_experts": 64,
            "num_experts_per_token": 6,
            "num_shared_experts": 2,
            "topk_group": 2,
            "first_k_dense_replace": 3,
            "moe_router_activation_func": "sigmoid",
            "mla_use_nope": True,
        },
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "-M-M*---ME*E", "mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False}
        | {"mamba_dt_limit": [0.001, 0.5]},
    ),
    (
        "granitemoehybrid",
        {"layer_types": ["mamba", *["mamba", "attention"] * 6], "num_local_experts": 0}
        | {"position_embedding_type": "rope", "rope_theta": 1e6, "mamba_n_heads": 32},
    ),
    ("bamba", {"attn_layer_indices": [3, 9], "mamba_n_groups": 2, "mamba_d_head": 8}),
    ("minimax", {"layer_types": ["linear_attention", *["linear_attention", FULL] * 6], "rope_theta": 1e7}),
    ("mimo_v2_flash", {"sliding_window_size": 64, "routed_scaling_factor": None}),
    ("lfm2", {"full_attn_idxs": [2, 5, 12], "block_ff_dim": 640, "tie_embedding": False, "rope_theta": 1e5}),
]


def recipe(model_type: str, options: dict) -> ModelConfig:
    return config_from_hf({**copy.deepcopy(options), "architectures": [MODEL_TYPES[model_type]]})


def completed(model_type: str, options: dict) -> ModelConfig:
    """The recipe of what transformers makes of the options: every default filled in, 5.x style."""
    return recipe(model_type, AutoConfig.for_model(model_type, **copy.deepcopy(options)).to_dict())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type):
    options = SIZES | REQUIRED.get(model_type, {})
    assert recipe(model_type, options) == completed(model_type, options)


@pytest.mark.parametrize(("model_type", "options"), OLDER_CONFIGS)
def test_older_configs_equal_what_transformers_makes_of_them(model_type, options):
    assert recipe(model_type, SIZES | options) == completed(model_type, SIZES | options)
    assert recipe(model_type, SIZES | options) != recipe(model_type, SIZES | REQUIRED.get(model_type, {}))


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_longrope_has_older_names_in_phi3(name):
    def config(kind):
        scaling = {"rope_scaling": {"type": kind, **FACTORS}, "max_position_embeddings": 131072}
        return recipe("phi3", SIZES | scaling)

    assert config(name) == config("longrope")


def test_mimo_has_other_names_on_the_hub():
    """As published, layers alike in all else."""
    published = {
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0],
        "moe_layer_freq": [0, 0, *[1] * 11],
        "layernorm_epsilon": 1e-4,
        "rope_theta": 4e6,
        "swa_rope_theta": 2e4,
        "partial_rotary_factor": 0.334,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_attention_heads": 32,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "num_key_value_heads": 8,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_chunk_size": 128,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": None,
        "routed_scaling_factor": None,
    }
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    transformers_names = {
        "layer_types": [SLIDING if slides else FULL for slides in published["hybrid_layer_pattern"]],
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 11,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {FULL: {**rope, "rope_theta": 4e6}, SLIDING: {**rope, "rope_theta": 2e4}},
        "num_key_value_heads": 8,
        "sliding_window": 129,
    }
    result = recipe("mimo_v2_flash", SIZES | published)
    assert result == completed("mimo_v2_flash", SIZES | transformers_names)
    other = {"swa_num_attention_heads": 48, "swa_head_dim": 96, "swa_v_head_dim": 64}
    spec = recipe("mimo_v2_flash", SIZES | published | other).layers[1].attention
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim, spec.rope.dim) == (48, 16, 96, 64, 32)
    assert spec.scale == 96**-0.5


def test_gemma3_configs_may_leave_out_the_sizes():
    """As the published 4B model: everything else is a default."""
    options = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    assert recipe("gemma3_text", options) == completed("gemma3_text", options)


def test_minimax_rotates_a_part_of_a_head():
    """As published; transformers ignores it."""
    config = recipe("minimax", SIZES | {"head_dim": 128, "rotary_dim": 64})
    assert config.layers[0].attention.rope.dim == 64


def test_what_a_text_model_says_counts_where_the_whole_says_nothing():
    text = SIZES | {"eos_token_id": [1, 106], "tie_word_embeddings": True}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert config_from_hf(config | {"eos_token_id": None}).eos_token_ids == (1, 106)
    assert config_from_hf(config | {"eos_token_id": 7}).eos_token_ids == (7,)


def test_every_family_is_known_by_a_transformers_class():
    known = {name for family in FAMILIES for name in family.architectures}
    with_code = {
        "RavenForCausalLM",
        "Parcae",
        "DeciLMForCausalLM",
        "LaneformerTPForCausalLM",
    }  # published with their code
    assert known == set(MODEL_TYPES.values()) | WITH_TEXT | with_code
    for model_type, architecture in MODEL_TYPES.items():
        config = AutoConfig.for_model(model_type)
        assert getattr(transformers, architecture).config_class is type(config)


def test_patterns_of_layers():
    def letter(attention):
        kind = "G" if attention.window is None else "L"
        return kind if attention.rope else kind.lower()

    def pattern(model_type, **options):
        return "".join(letter(layer.attention) for layer in recipe(model_type, SIZES | options).layers)

    # L: local (a window), G: global; in lower case without positions.
    assert pattern("gemma2") == "LGLGLGLGLGLGL"
    assert pattern("gemma3_text") == "LLLLLGLLLLLGL"
    assert pattern("olmo3") == "LLLGLLLGLLLGL"
    assert pattern("cohere2") == "LLLgLLLgLLLgL"
    assert pattern("exaone4") == "LLLgLLLgLLLgL"
    assert pattern("exaone4", sliding_window=None) == "GGGGGGGGGGGGG"
    assert pattern("smollm3") == "GGGgGGGgGGGgG"
    assert pattern("smollm3", use_sliding_window=True, sliding_window=8) == "GGGlGGGlGGGlG"
    assert pattern("qwen2", use_sliding_window=True, max_window_layers=10) == "GGGGGGGGGGLLL"


def test_context_is_what_the_rotary_embedding_is_stretched_to():
    scaled = {**SIZES, "max_position_embeddings": 32768}
    assert recipe("qwen2", scaled | {"rope_scaling": {"type": "yarn", **YARN}}).context == 131072
    assert recipe("llama", scaled | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).context == 65536
    assert recipe("llama", scaled | {"rope_scaling": {"type": "linear", "factor": 2.0}}).context == 32768


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("llama", {"hidden_act": "tanh"}, "hidden_act='tanh'"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation='tanh'"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type 'ntk'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "needs factor"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs low_freq_factor, high_freq_factor",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3", {"rope_parameters": {FULL: {"rope_type": "default"}}}, "per layer type"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "must have the keys"),
        ("olmo3", {"rope_parameters": {FULL: {"rope_type": "cubic"}}}, "rope type 'cubic'"),
        ("mistral", {"layer_types": [SLIDING] * 13}, "MinistralForCausalLM"),
        ("ministral", {"layer_types": ["chunked_attention"] * 13}, "chunked_attention"),
        ("ministral", {"layer_types": [FULL] * 12}, "12 layer_types for 13 layers"),
        ("qwen2", {"layer_types": [SLIDING] * 13}, "lacks 'sliding_window'"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", **YARN}}, "llama_4_scaling_beta"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "2 no_rope_layers for 13 layers"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 factors for 8",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "needs long_factor"),
        ("llama", {"num_key_value_heads": 5}, "do not divide"),
        ("llama", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers in config.json must be a whole number, it is 2.5"),
        (
            "llama",
            {"tie_word_embeddings": "no"},
            "tie_word_embeddings in config.json must be true or false, it is 'no'",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": "8192"}},
            "original_max_position_embeddings in config.json must be a number",
        ),
        ("llama", {"hidden_size": [1, 2]}, r"hidden_size in config.json must be a whole number, it is \[1, 2\]"),
        ("llama", {"intermediate_size": [300] * 13}, "intermediate_size in config.json must be a whole number"),
        ("llama", {"tie_word_embeddings": [True]}, "tie_word_embeddings in config.json must be true or false"),
        ("llama", {"rms_norm_eps": [1e-5]}, "rms_norm_eps in config.json must be a number"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": [2.0]}}, "factor in config.json must be a number"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps in config.json must be a number, it is '1e-5'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "two"}}, "factor in config.json must be a number"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling in config.json must be an object, it is 'linear'"),
        ("gemma3n_text", {"intermediate_size": [300, "300"]}, r"intermediate_size .* it is \[300, '300'\]"),
        ("qwen3_moe", {"num_experts_per_tok": "two"}, "num_experts_per_tok in config.json must be a whole number"),
        (
            "qwen3_moe",
            {"decoder_sparse_step": "two"},
            "that of a qwen3_moe model: .*wrong value",
        ),
        ("llama", {"num_attention_heads": 0}, "that of a llama model: .* zero"),
        ("llama", {"num_hidden_layers": 0}, "at least one layer"),
        ("mixtral", {"num_experts_per_tok": 9}, "go to 9 experts when there are 8"),
        ("olmoe", {"clip_qkv": 8.0}, "clamped queries, keys and values"),
        ("glm4_moe", {"n_group": 3}, "128 experts do not divide into 3 groups"),
        ("glm4_moe", {"n_group": 32, "topk_group": 1}, "1 of 32 groups have no 8 experts to choose"),
        ("phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok=4"),
        ("phimoe", {"rope_scaling": {"short_mscale": 1.0, "long_mscale": 1.2}}, "only equal ones"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min=0.1"),
        ("dots1", {"n_routed_experts": None}, "lacks 'n_routed_experts'"),
        ("minicpm3", {"kv_lora_rank": 0}, "positive kv_rank"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"mlp_layer_types": ["dense"] * 12}, "dense or sparse of 13 layers"),
        ("mistral4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "lacks 'llama_4_scaling_beta'"),
        ("mistral4", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "contradicts qk_rope_head_dim=64"),
        ("llama4_text", {"layer_types": [SLIDING] * 13}, "sliding_attention"),
        ("llama4_text", {"attention_chunk_size": None}, "lacks 'attention_chunk_size'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("longcat_flash", {"zero_expert_type": "constant"}, "zero_expert_type='constant'"),
        ("gemma3n_text", {"num_kv_shared_layers": 14}, "num_kv_shared_layers=14 of 13 layers"),
        ("gemma3n_text", {"num_kv_shared_layers": 10}, "none of the first 3 layers"),
        ("mimo_v2_flash", {"attention_projection_layout": "fused_qkv"}, "attention_projection_layout='fused_qkv'"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input=True"),
        ("laguna", {"num_attention_heads_per_layer": [32] * 12}, "12 num_attention_heads_per_layer for 13 layers"),
        ("gemma3n_text", {"altup_active_idx": 1}, "altup_active_idx=1"),
        ("gemma3n_text", {"intermediate_size": [300] * 12}, "12 intermediate_size for 13 layers"),
        ("gemma4_text", {"vocab_size_per_layer_input": 1001}, "vocabulary"),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4}, "lacks 'top_k_experts'"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, r"layers of kinds \['X'\]"),
        ("nemotron_h", {"hybrid_override_pattern": "ME", "moe_latent_size": 64}, "moe_latent_size=64"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "2 layer_types for 13 layers"),
        ("granitemoehybrid", {"time_step_limit": None}, "lacks 'time_step_limit'"),
        ("granitemoehybrid", {"time_step_limit": [0.1]}, "the least and the largest step"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False"),
        ("kimi_linear", {"rope_scaling": {"rope_type": "yarn", **YARN}}, "rope_scaling="),
        ("lfm2", {"conv_bias": True}, "conv_bias=True"),
        ("lfm2", {"layer_types": ["conv"] * 12}, "12 layer_types for 13 layers"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "2 no_rope_layers for 13 layers"),
        ("bamba", {"mamba_d_head": 64}, "128 state-space heads of 64 are not the 1024 numbers"),
    ],
)
def test_unsupported_options_are_named(model_type, options, message):
    with pytest.raises(ConfigError, match=message):
        recipe(model_type, SIZES | options)


def test_unknown_architectures_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"BloomForCausalLM.*Gemma3ForCausalLM, .*Qwen3ForCausalLM"):
        family_of({"architectures": ["BloomForCausalLM"]})
    with pytest.raises(ConfigError, match="missing"):
        family_of({})
    with pytest.raises(ConfigError, match="must be a list of names, it is 'Llama'"):
        family_of({"architectures": "Llama"})


def test_an_architecture_that_is_not_supported_names_the_idea_it_needs():
    with pytest.raises(ConfigError, match=r"'BailingHybridForCausalLM' .* needs a linear-attention layer"):
        family_of({"architectures": ["BailingHybridForCausalLM"]})
    assert not set(MODEL_TYPES.values()) & set(_MISSING)


def test_the_table_of_models_lists_every_family():
    """`benchmarks/families.py` makes it from what was compared with transformers."""
    lines = (Path(__file__).parents[2] / "models" / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert {row[1] for row in rows} == {family.name for family in FAMILIES}
    known = {(architecture, family.name) for family in FAMILIES for architecture in family.architectures}
    assert {(row[0], row[1]) for row in rows} <= known
    assert all(float(row[3]) < 1e-4 for row in rows)
