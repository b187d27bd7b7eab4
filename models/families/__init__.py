"""Model families: a recipe (`config.json` -> `ModelConfig`) and a tensor name map each.

To add one, write a module with a `Family` and list it below; code outside the library calls `register`.
"""

from __future__ import annotations

from typing import Any

from inferlib.models.config import ConfigError, ModelConfig
from inferlib.models.families import (
    afmoe,
    cohere2,
    deepseek,
    dots1,
    ernie4_5,
    exaone4,
    gemma,
    gemma3n,
    gemma4,
    glm4,
    glm4_moe_lite,
    gpt2,
    gpt_oss,
    granite,
    hunyuan,
    kimi_linear,
    laguna,
    laneformer,
    lfm2,
    llama,
    llama4,
    longcat_flash,
    looped,
    mamba,
    mimo_v2_flash,
    minicpm3,
    minimax,
    minimax_m2,
    mistral,
    mistral4,
    nemotron_nas,
    olmo,
    phi3,
    phimoe,
    qwen,
    qwen_moe,
    qwen_next,
    seed_oss,
    smollm3,
)
from inferlib.models.families.common import Family, options_of
from inferlib.models.ffn_fusion import KEY as FUSED
from inferlib.models.ffn_fusion import fused_config
from inferlib.models.key_bases import KEY as KEY_BASES
from inferlib.models.key_bases import with_key_bases
from inferlib.models.key_turns import KEY as KEY_TURNS
from inferlib.models.key_turns import with_key_turns
from inferlib.models.layer_preferences import KEY as LAYER_PREFERENCES
from inferlib.models.layer_preferences import with_layer_preferences

FAMILIES: tuple[Family, ...] = (
    llama.LLAMA,
    nemotron_nas.NEMOTRON_NAS,
    mistral.MISTRAL,
    mistral.MINISTRAL,
    mistral.MINISTRAL3,
    mistral.MISTRAL_TEXT,
    mistral.MINISTRAL3_TEXT,
    mistral.MIXTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE,
    qwen_next.QWEN3_NEXT,
    qwen_next.QWEN3_5,
    qwen_next.QWEN3_5_TEXT,
    qwen_next.QWEN3_5_MOE,
    qwen_next.QWEN3_5_MOE_TEXT,
    mamba.NEMOTRON_H,
    mamba.GRANITE_HYBRID,
    mamba.BAMBA,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gemma.GEMMA3_TEXT,
    gemma3n.GEMMA3N,
    gemma3n.GEMMA3N_TEXT,
    gemma4.GEMMA4,
    gemma4.GEMMA4_TEXT,
    phi3.PHI3,
    phimoe.PHIMOE,
    olmo.OLMO2,
    olmo.OLMO3,
    olmo.OLMO_HYBRID,
    olmo.OLMOE,
    smollm3.SMOLLM3,
    granite.GRANITE,
    granite.GRANITE_MOE,
    glm4.GLM,
    glm4.GLM4,
    glm4.GLM4_MOE,
    cohere2.COHERE2,
    exaone4.EXAONE4,
    seed_oss.SEED_OSS,
    ernie4_5.ERNIE4_5,
    ernie4_5.ERNIE4_5_MOE,
    dots1.DOTS1,
    afmoe.AFMOE,
    laguna.LAGUNA,
    lfm2.LFM2,
    lfm2.LFM2_MOE,
    minimax_m2.MINIMAX_M2,
    minimax.MINIMAX,
    hunyuan.HUNYUAN,
    kimi_linear.KIMI_LINEAR,
    minicpm3.MINICPM3,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    glm4_moe_lite.GLM4_MOE_LITE,
    mistral4.MISTRAL4,
    mistral4.MISTRAL4_TEXT,
    gpt_oss.GPT_OSS,
    gpt2.GPT2,
    longcat_flash.LONGCAT_FLASH,
    mimo_v2_flash.MIMO_V2_FLASH,
    llama4.LLAMA4,
    llama4.LLAMA4_TEXT,
    looped.HUGINN,
    looped.PARCAE,
    laneformer.LANEFORMER,
)

# Architectures that are not supported, with the first feature that the decoder lacks.
_LACKING = {
    "a linear-attention layer (Kimi Delta Attention with bounded fading)": ("BailingHybridForCausalLM",),
    "attention and a state space side by side in a layer": ("FalconH1ForCausalLM",),
    "a state-space layer whose channels fade each by itself (Mamba-1)": ("JambaForCausalLM", "MambaForCausalLM"),
    "attention whose weights layers share (Zamba)": ("Zamba2ForCausalLM",),
    "a context without a length, as a model of state-space layers alone has": ("Mamba2ForCausalLM",),
    "attention to positions that an indexer chose": ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
    "attention to compressed positions": ("DeepseekV4ForCausalLM",),
    "images beside text": ("KimiK25ForConditionalGeneration",),
}
_MISSING = {name: idea for idea, names in _LACKING.items() for name in names}
_BY_ARCHITECTURE: dict[str, list[Family]] = {}


def register(family: Family) -> None:
    """Make a family known by its architectures."""
    for name in family.architectures:
        _BY_ARCHITECTURE.setdefault(name, []).append(family)


for _family in FAMILIES:
    register(_family)


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a Hugging Face config, by its `architectures` entry; where it has none (Parcae), by the name of the
    model's class."""
    names = hf.get("architectures") or [name for name in [hf.get("model_class_name")] if name is not None]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"architectures in config.json must be a list of names, it is {names!r}")
    for name in names:
        if name in _BY_ARCHITECTURE:
            return _of_text(hf, name, _BY_ARCHITECTURE[name])
        if name in _MISSING:
            raise ConfigError(f"architecture {name!r} in config.json is not supported: it needs {_MISSING[name]}")
    known = ", ".join(sorted(_BY_ARCHITECTURE))
    raise ConfigError(f"architecture {names or 'missing'} in config.json is not supported; known: {known}")


def _of_text(hf: dict[str, Any], name: str, families: list[Family]) -> Family:
    """The family of an architecture's text part."""
    if len(families) == 1:
        return families[0]
    kind = options_of(hf, "text_config").get("model_type")
    for family in families:
        if family.text_type == kind:
            return family
    known = ", ".join(family.text_type for family in families)
    raise ConfigError(f"the text model of {name} in config.json is {kind!r}, which is not supported; known: {known}")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face config dictionary; raises ConfigError if it is not supported."""
    family = family_of(hf)
    config = family.config(hf)
    if config.lanes is None:
        laneformer.must_sum_at_once(hf, family.name)
    config = with_key_bases(config) if hf.get(KEY_BASES) is True else config
    config = with_key_turns(config) if hf.get(KEY_TURNS) is True else config
    config = fused_config(config) if hf.get(FUSED) is True else config
    return with_layer_preferences(config, hf[LAYER_PREFERENCES]) if LAYER_PREFERENCES in hf else config
