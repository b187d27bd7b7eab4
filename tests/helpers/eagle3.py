"""Random EAGLE-3 heads as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from inferlib.checkpoint.eagle3 import new_head
from inferlib.models.families import config_from_hf


def make_head(folder: Path, target: Path, draft_vocab: int, *, embeds: bool = False, **options) -> Path:
    """Write a random float32 head for the model in `target`. options: of config.json."""
    config, draw = config_from_hf(json.loads((target / "config.json").read_text())), np.random.default_rng(1)
    hf = {**new_head(config, draft_vocab), **options}
    dim, size, hidden = hf["hidden_size"], hf["head_dim"], hf["intermediate_size"]
    queries, keys = hf["num_attention_heads"] * size, hf["num_key_value_heads"] * size
    shapes = {
        "fc.weight": (dim, 3 * config.dim),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * dim),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * dim),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * dim),
        "midlayer.self_attn.o_proj.weight": (dim, queries),
        "midlayer.mlp.gate_proj.weight": (hidden, dim),
        "midlayer.mlp.up_proj.weight": (hidden, dim),
        "midlayer.mlp.down_proj.weight": (dim, hidden),
        "lm_head.weight": (draft_vocab, dim),
        **({"embed_tokens.weight": (config.vocab, dim)} if embeds else {}),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors = {name: 0.16 * draw.standard_normal(shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.2 * draw.standard_normal(dim) for name in norms}
    if hf.get("attention_bias"):
        sizes = {"q": queries, "k": keys, "v": keys, "o": dim}
        tensors |= {f"midlayer.self_attn.{n}_proj.bias": draw.standard_normal(size) for n, size in sizes.items()}
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    if draft_vocab < config.vocab:
        ids = np.sort(draw.choice(config.vocab, draft_vocab, replace=False))
        tensors["d2t"] = ids - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(config.vocab), ids)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    return folder
