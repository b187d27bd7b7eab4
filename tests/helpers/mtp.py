"""Models with a layer for predicting further tokens behind their last one, and its published arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.helpers.oracle import make_checkpoint

MTP_LAYERS = 2  # of a target
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm", "eh_proj": "fc"}


def is_qwen(family: str) -> bool:
    return family.startswith("qwen")


def make_target(folder: Path, family: str) -> Path:
    """A checkpoint with a layer for predicting further tokens beside its own 2; `reference` is a model of all 3."""
    kinds = ["linear_attention", "full_attention", "full_attention"]
    kinds = {"layer_types": kinds} if is_qwen(family) else {}
    path = make_checkpoint(folder, family, num_hidden_layers=MTP_LAYERS + 1, **kinds)
    tensors, hf = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    (path / "reference").mkdir()
    save_file(tensors, path / "reference" / "model.safetensors", metadata={"format": "pt"})
    (path / "reference" / "config.json").write_text(json.dumps(hf))
    dim, draw, at = hf["hidden_size"], np.random.default_rng(2), f"model.layers.{MTP_LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weight = (not is_qwen(family)) + 0.2 * draw.standard_normal(dim)
        tensors[_name(family, name)] = weight.astype(np.float32)
    tensors[_name(family, "eh_proj")] = (0.16 * draw.standard_normal((dim, 2 * dim))).astype(np.float32)
    if is_qwen(family):
        for name in [name for name in tensors if name.startswith(at)]:
            tensors["mtp.layers.0." + name.removeprefix(at)] = tensors.pop(name)
    else:
        tensors[at + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[at + "shared_head.head.weight"] = tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    hf |= {"num_hidden_layers": MTP_LAYERS, "num_nextn_predict_layers": 1}
    for name in {"mlp_layer_types", "layer_types"} & hf.keys():
        hf[name] = hf[name][:MTP_LAYERS]
    (path / "config.json").write_text(json.dumps(hf))
    return path


def _name(family: str, part: str) -> str:
    return f"mtp.{QWEN[part]}.weight" if is_qwen(family) else f"model.layers.{MTP_LAYERS}.{part}.weight"


class PublishedMtp:
    """The published projection and transformers' layer behind a target, over one text. T tokens so far; D wide."""

    def __init__(self, path: Path):
        options = dict(dtype=torch.float32, attn_implementation="eager")
        self.whole = AutoModelForCausalLM.from_pretrained(path / "reference", **options).eval()
        self.model, tensors = self.whole.model, load_file(path / "model.safetensors")
        self.family = self.model.config.model_type
        self.weights = {name: torch.as_tensor(tensors[_name(self.family, name)]) for name in QWEN}
        self.inputs = torch.zeros(0, self.model.config.hidden_size)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[name] + is_qwen(self.family)
        return functional.rms_norm(x, x.shape[-1:], weight, self.model.config.rms_norm_eps)

    def passed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the next draft takes of the layer's hidden states."""
        return self.norm(hidden, "shared_head.norm") if is_qwen(self.family) else hidden

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [T, D] of tokens [T], after its final norm."""
        states = self.model(input_ids=tokens[None], output_hidden_states=True).hidden_states[MTP_LAYERS][0]
        return self.model.norm(states)

    def step(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All hidden states [T, D] of the layer once it has taken further tokens [N], and hidden [N, D] of those before
        each."""
        taken = self.model.embed_tokens(tokens)
        if not len(self.inputs) and not is_qwen(self.family):
            taken[0] = 0
        both = torch.cat([self.norm(taken, "enorm"), self.norm(hidden, "hnorm")], -1)
        self.inputs = torch.cat([self.inputs, functional.linear(both, self.weights["eh_proj"])])
        count = len(self.inputs)
        positions, mask = torch.arange(count)[None], torch.full((count, count), -torch.inf).triu(1)[None, None]
        rope = self.model.rotary_emb(self.inputs[None], positions)
        options = dict(attention_mask=mask, position_ids=positions, position_embeddings=rope)
        out = self.model.layers[MTP_LAYERS](self.inputs[None], **options)
        return (out[0] if isinstance(out, tuple) else out).reshape(count, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, V] of the layer's hidden states [N, D]."""
        return self.whole.lm_head(self.norm(hidden, "shared_head.norm"))
