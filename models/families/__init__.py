"""Model families: a recipe (`config.json` -> `ModelConfig`) and a tensor name map each.

To add one, write a module with a `Family` and list it below.
"""

from __future__ import annotations

from typing import Any

from inferlib.models.config import ConfigError, ModelConfig
from inferlib.models.families import (
    cohere2,
    dots1,
    ernie4_5,
    exaone4,
    gemma,
    glm4,
    granite,
    hunyuan,
    llama,
    minimax_m2,
    mistral,
    olmo,
    phi3,
    phimoe,
    qwen,
    qwen_moe,
    seed_oss,
    smollm3,
)
from inferlib.models.families.common import Family

FAMILIES: tuple[Family, ...] = (
    llama.LLAMA,
    mistral.MISTRAL,
    mistral.MINISTRAL,
    mistral.MINISTRAL3,
    mistral.MIXTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.PHI3,
    phimoe.PHIMOE,
    olmo.OLMO2,
    olmo.OLMO3,
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
    minimax_m2.MINIMAX_M2,
    hunyuan.HUNYUAN,
)

_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a Hugging Face config, by its `architectures` entry."""
    names = hf.get("architectures") or []
    for name in names:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    known = ", ".join(sorted(_BY_ARCHITECTURE))
    raise ConfigError(f"architecture {names or 'missing'} in config.json is not supported; known: {known}")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face config dictionary; raises ConfigError if it is not supported."""
    return family_of(hf).config(hf)
