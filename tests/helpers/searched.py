"""Random Llama models of which a search took parts, and the whole ones in whose weights these parts are zeros."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.oracle import make_checkpoint
from tests.helpers.tokenizer import write_tokenizer

DIM, HEADS, SIZE, HIDDEN = 64, 4, 16, 512
# Of each layer: the query heads of a KV head, or None without attention; and the factor of the feed-forward's size.
LAYERS = ((1, 12.0), (4, 6.0), (None, 6.0), (None, 12.0), (2, None), (4, 5.25), (None, 5.25))


def hidden_of(factor: float) -> int:
    return {12.0: 512, 6.0: 256, 5.25: 256}[factor]  # int(2 * 5.25 * 64 / 3) is 224


def block_configs() -> list[dict]:
    return [
        {"attention": {"no_op": group is None, "n_heads_in_group": group, "window_length": None}}
        | {"ffn": {"no_op": factor is None, "ffn_mult": factor, "sparsify": None}}
        for group, factor in LAYERS
    ]


def make_searched(folder: Path) -> tuple[Path, Path]:
    """Write both checkpoints: the whole model, and the one without its zeros."""
    sizes = dict(hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE)
    options = dict(num_hidden_layers=len(LAYERS), intermediate_size=HIDDEN, tie_word_embeddings=False)
    whole = make_checkpoint(folder / "whole", "llama", **sizes, **options)
    tensors = load_file(whole / "model.safetensors")
    searched = {name: x for name, x in tensors.items() if ".layers." not in name}
    for number, (group, factor) in enumerate(LAYERS):
        prefix = f"model.layers.{number}."
        if group is None:
            tensors[f"{prefix}self_attn.o_proj.weight"].zero_()
        else:
            for name in ("k_proj", "v_proj"):
                weight = tensors[f"{prefix}self_attn.{name}.weight"].view(-1, group, SIZE, DIM)
                weight.copy_(weight[:, :1].clone().expand_as(weight))
                searched[f"{prefix}self_attn.{name}.weight"] = weight[:, 0].reshape(-1, DIM).contiguous()
            for name in ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm"):
                searched[f"{prefix}{name}.weight"] = tensors[f"{prefix}{name}.weight"]
        down = tensors[f"{prefix}mlp.down_proj.weight"]
        if factor is None:
            down.zero_()
            continue
        hidden = hidden_of(factor)
        down[:, hidden:] = 0
        searched[f"{prefix}mlp.down_proj.weight"] = down[:, :hidden].contiguous()
        for name in ("gate_proj", "up_proj"):
            searched[f"{prefix}mlp.{name}.weight"] = tensors[f"{prefix}mlp.{name}.weight"][:hidden].contiguous()
        searched[f"{prefix}post_attention_layernorm.weight"] = tensors[f"{prefix}post_attention_layernorm.weight"]
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    return whole, _write(folder / "searched", whole, searched)


def _write(folder: Path, whole: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    hf = json.loads((whole / "config.json").read_text())
    changes = {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "num_key_value_heads": None}
    hf |= changes | {"intermediate_size": None, "block_configs": block_configs()}
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder
