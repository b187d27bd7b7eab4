"""The oracle: tiny random Hugging Face checkpoints, and the logits that transformers computes for them."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
)

from tests.helpers.oracle_cases import FAMILIES, SEEING, SIZES

# Between operations of tiny models further threads only wait, and take as much CPU time as the rest of a test.
torch.set_num_threads(1)

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # which transformers leaves out
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def make_checkpoint(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of a `transformers` model type into `folder`; an override of None drops the key.

    Matrices are N(0, 0.16): attention is sharp and logits have a standard deviation above 1, yet rounding
    is not blown up. Norm weights and biases are N(0, 0.2) around their neutral value.
    """
    torch.manual_seed(seed)  # of what transformers draws itself, a step's bias for one: no test's order changes it
    model = _auto(config := _config(family, overrides)).from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):  # states that remember; of those that fade quickly transformers' sums are rough
                weight.copy_(noise - 3)
                continue
            weight.copy_(weight + 0.2 * noise if weight.ndim == 1 else 0.16 * noise)
        for name, bias in model.named_buffers():
            if name.endswith("layer_scalar"):
                bias.copy_(1 + 0.2 * torch.randn(bias.shape, generator=generator))
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
    model.save_pretrained(folder)
    if family in ("kimi_linear", "olmo_hybrid"):
        tensors = load_file(folder / "model.safetensors")
        save_file({_published(name, tensors): x for name, x in tensors.items()}, folder / "model.safetensors")
    return Path(folder)


def _published(name: str, tensors: Collection[str]) -> str:
    """What a tensor is called that transformers reads by its published name too, but writes as another."""
    name = re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name)  # of a dense feed-forward
    after = name.replace("feedforward_layer_norm", "post_attention_layernorm")
    return after if name.replace("feedforward_layer_norm", "post_feedforward_layernorm") in tensors else name


def _config(family: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    text, vision = SEEING.get(family, (family, None))
    text = overrides.get("text_type", text)
    options = {**SIZES, **FAMILIES[text], **overrides}
    droppable = {"head_dim", "num_key_value_heads", "text_type"}
    options = {k: v for k, v in options.items() if k not in droppable or (v is not None and k != "text_type")}
    if vision is None:
        return AutoConfig.for_model(family, **options)
    tied = options["tie_word_embeddings"]
    parts = {"text_config": {**options, "model_type": text}, "vision_config": vision}
    return AutoConfig.for_model(family, **parts, tie_word_embeddings=tied)


def _auto(config: PreTrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    return AutoModelForImageTextToText if config.model_type in SEEING else AutoModelForCausalLM


def reference_logits(path: Path, token_ids: list[int] | np.ndarray) -> np.ndarray:
    """Logits [T, V] float32 of one prompt [T], by transformers in float32 with eager attention."""
    auto = _auto(AutoConfig.from_pretrained(path))
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.as_tensor(np.asarray(token_ids))[None], use_cache=False).logits
    return logits[0].numpy()
