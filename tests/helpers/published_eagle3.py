"""EAGLE-3 heads by the arithmetic that they were published with. It imports torch, which takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """x [T, heads, h]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * base ** (-torch.arange(half).float() / half)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class PublishedHead:
    """`cnets.py` of EAGLE-3: one pass over a text, then drafts one at a time, with its growing keys and values."""

    def __init__(self, head: Path, target: Path):
        self.hf = json.loads((head / "config.json").read_text())
        self.w = {k: torch.as_tensor(v) for k, v in load_file(head / "model.safetensors").items()}
        table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self.embed = self.w.get("embed_tokens.weight", torch.as_tensor(table))
        self.keys = self.values = torch.zeros(0, self.hf["num_key_value_heads"], self.hf["head_dim"])

    def step(self, tokens, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        w, hf, eps, size = self.w, self.hf, self.hf["rms_norm_eps"], self.hf["head_dim"]
        if hidden.shape[-1] != hf["hidden_size"]:
            hidden = functional.linear(hidden, w["fc.weight"])
        x = torch.cat(
            [
                norm(self.embed[tokens], w["midlayer.input_layernorm.weight"], eps),
                norm(hidden, w["midlayer.hidden_norm.weight"], eps),
            ],
            -1,
        )
        q, k, v = (self.project(n, x).unflatten(-1, (-1, size)) for n in "qkv")
        q, k = rotate(q, positions, hf["rope_theta"]), rotate(k, positions, hf["rope_theta"])
        self.keys, self.values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        group = hf["num_attention_heads"] // hf["num_key_value_heads"]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * size**-0.5
        seen = torch.arange(len(keys))[None] <= positions[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        x = hidden + self.project("o", out)
        y = norm(x, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (functional.linear(y, w[f"midlayer.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return x + functional.linear(functional.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = f"midlayer.self_attn.{name}_proj"
        return functional.linear(x, self.w[module + ".weight"], self.w.get(module + ".bias"))

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the target's ids of the tokens that are chosen."""
        y = norm(hidden, self.w["norm.weight"], self.hf["rms_norm_eps"])
        logits = functional.linear(y, self.w["lm_head.weight"])
        best = logits.argmax(-1)
        return logits, best + (self.w["d2t"][best] if "d2t" in self.w else 0)
