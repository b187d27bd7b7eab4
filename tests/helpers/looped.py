"""Looped models in torch, by the arithmetic and the names of tensors that were published: the oracles of Huginn
(Geiping et al. 2025) and Parcae (Prairie et al. 2026), this also with states that are normed, which is not published.
Their first states are zero."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from tests.helpers.tokenizer import VOCAB

torch.set_num_threads(1)

# Prelude, core and coda of two layers each in Parcae, which alternates; of different numbers in Huginn.
PARCAE: dict[str, Any] = {
    "model_class_name": "Parcae",
    "block_size": 128,
    "n_embd": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "padded_vocab_size": VOCAB,
    "vocab_size": VOCAB,
    "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50_000},
    "injection_type": "diagonal",
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "recurrent_embedding_dimension": 48,
    "recurrent_intermediation_embedding_dimension": 96,
    "mean_recurrence": 3,
    "mean_backprop_depth": 4,
    "state_init": "zero",
    "tie_embeddings": True,
}
HUGINN: dict[str, Any] = {
    "architectures": ["RavenForCausalLM"],
    "model_type": "huginn_raven",
    "block_size": 128,
    "n_embd": 48,
    "n_heads": 4,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 3,
    "n_layers_in_coda": 2,
    "mean_recurrence": 3,
    "state_init": "zero",
    "tie_embeddings": True,
    "eos_token_id": 2,
}
# Patterns of two layers that repeat, and a core of fewer, larger heads.
REPEATED = PARCAE | {"n_layers_in_prelude": 4, "n_layers_in_coda": 4, "recurrent_num_attention_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "parcae": REPEATED,
    "parcae-linear": PARCAE | {"injection_type": "linear"},
    "parcae-normed": PARCAE | {"state_norm": True},
    "parcae-once": PARCAE | {"injection_type": "add", "mean_recurrence": 1},
    "huginn": HUGINN,
}


def latest(layer: nn.Module, *cells: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values [T, H, h] of a layer: of tokens that left the core, those of their last step."""
    if (left := getattr(layer, "left", None)) is not None:
        former = layer.former or cells
        cells = tuple(torch.where(left[:, None, None], old, new) for old, new in zip(former, cells, strict=True))
        layer.former = cells
    return cells


def run_core(model: nn.Module, attentions: list[nn.Module], step: Callable, e: torch.Tensor) -> torch.Tensor:
    """The state [T, D] after at most `model.steps` steps of the core, zero before them. A token leaves after the step
    that changes its state by a share of less than `model.exit_threshold`; or if `model.reads` is a function, that
    changes the log-probabilities [T, V] which it makes of the states by a divergence of less. `model.taken`,
    `model.changes`: how many steps each token took, and how much each changed it."""
    h, left = torch.zeros_like(e), torch.zeros(len(e), dtype=torch.bool)
    model.taken, model.changes = torch.zeros(len(e), dtype=torch.int), []
    for layer in attentions:
        layer.former = None
    for _ in range(model.steps):
        for layer in attentions:
            layer.left = left
        new = step(h, e)
        change = (new - h).norm(dim=-1) / new.norm(dim=-1)
        if model.reads is not None:
            change = F.kl_div(model.reads(new), model.reads(h), reduction="none", log_target=True).sum(-1)
        model.taken += ~left
        model.changes.append(torch.where(left, torch.nan, change))
        h = torch.where(left[:, None], h, new)
        left = left | (change < model.exit_threshold)
    return h


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotated(x: torch.Tensor, base: float = 50_000.0) -> torch.Tensor:
    """x [T, H, h], in which pairs (2i, 2i + 1) are rotated by their positions."""
    count, _, size = x.shape
    angles = torch.outer(torch.arange(count).float(), base ** -(torch.arange(0, size, 2).float() / size))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones(()), angles)[:, None]
    return torch.view_as_real(turned).flatten(2)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def attend(q, k, v):
    """Causal attention of [T, H, h]."""
    y = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)
    return y[0].transpose(0, 1).flatten(1)


class HuginnAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.Wqkv, self.proj = linear(dim, 3 * dim), linear(dim, dim)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, heads, dim // heads))

    def forward(self, x):
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, (k, v) = rotated(q + self.qk_bias[0]), latest(self, rotated(k + self.qk_bias[1]), v)
        return self.proj(attend(q, k, v))


class GatedMlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc, self.proj = linear(dim, 2 * hidden), linear(hidden, dim)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class SandwichBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (RMSNorm(dim, 1e-6) for _ in range(4))
        self.attn, self.mlp = HuginnAttention(dim, heads), GatedMlp(dim, hidden)

    def forward(self, x):
        x = self.norm_2(self.attn(self.norm_1(x)) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


class Huginn(nn.Module):
    def __init__(self, hf: dict[str, Any]):
        super().__init__()
        self.steps, self.exit_threshold, self.reads, dim = hf["mean_recurrence"], 0.0, None, hf["n_embd"]
        layers = lambda part: nn.ModuleList(  # noqa: E731
            SandwichBlock(dim, hf["n_heads"], hf["intermediate_size"]) for _ in range(hf[f"n_layers_in_{part}"])
        )
        parts = {"prelude": layers("prelude"), "core_block": layers("recurrent_block"), "coda": layers("coda")}
        parts |= {
            "wte": nn.Embedding(hf["vocab_size"], dim),
            "adapter": linear(2 * dim, dim),
            "ln_f": RMSNorm(dim, 1e-6),
        }
        self.transformer = nn.ModuleDict(parts)

    def forward(self, tokens):
        parts = self.transformer
        e = parts["wte"](tokens) * parts["wte"].embedding_dim ** 0.5
        for block in parts["prelude"]:
            e = block(e)

        def step(h, e):
            h = parts["adapter"](torch.cat([h, e], dim=-1))
            for block in parts["core_block"]:
                h = block(h)
            return h

        h = parts["ln_f"](run_core(self, [block.attn for block in parts["core_block"]], step, e))
        for block in parts["coda"]:
            h = block(h)
        return parts["ln_f"](h) @ parts["wte"].weight.T

    def without_coda(self, h):
        """Log-probabilities [T, V] of states."""
        parts = self.transformer
        return F.log_softmax(parts["ln_f"](parts["ln_f"](h)) @ parts["wte"].weight.T, dim=-1)


class ParcaeAttention(nn.Module):
    def __init__(self, dim: int, heads: int, gated: bool):
        super().__init__()
        self.heads = heads
        self.c_q, self.c_k, self.c_v, self.c_proj = (linear(dim, dim) for _ in range(4))
        if gated:
            self.ve_gate = linear(32, heads)

    def forward(self, x, values):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.c_q, self.c_k, self.c_v))
        if values is not None:
            v = v + 2 * torch.sigmoid(self.ve_gate(x[:, :32]))[..., None] * values.view_as(v)
        q, k = (F.rms_norm(rotated(y), (y.shape[-1],)) for y in (q, k))
        return self.c_proj(attend(q, *latest(self, k, v)))


class SquaredReluMlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc, self.proj = linear(dim, hidden), linear(hidden, dim)

    def forward(self, x):
        return self.proj(F.relu(self.fc(x)).square())


class PreNormBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, gated: bool):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(dim, 1e-5), RMSNorm(dim, 1e-5)
        self.attn, self.mlp = ParcaeAttention(dim, heads, gated), SquaredReluMlp(dim, hidden)

    def forward(self, x, values=None):
        x = x + self.attn(self.norm_1(x), values)
        return x + self.mlp(self.norm_2(x))


class Diagonal(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.B = nn.Parameter(torch.eye(dim))

    def forward(self, h, e):
        d = F.softplus(self.dt_bias)
        return torch.exp(-d * torch.exp(self.A_log)) * h + d * (e @ self.B.T)


class Linear(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.adapter = linear(2 * dim, dim)

    def forward(self, h, e):
        return self.adapter(torch.cat([h, e], dim=-1))


class Add(nn.Module):
    def __init__(self, dim: int):
        super().__init__()

    def forward(self, h, e):
        return h + e


class Parcae(nn.Module):
    def __init__(self, hf: dict[str, Any]):
        super().__init__()
        self.steps, self.exit_threshold, self.reads = hf["mean_recurrence"], 0.0, None
        dim, vocab = hf["n_embd"], hf["padded_vocab_size"]
        start = hf["n_layers_in_prelude"]
        stop = start + hf["n_layers_in_recurrent_block"]
        count, heads = stop + hf["n_layers_in_coda"], hf["num_attention_heads"]
        self.start, self.stop, valued = start, stop, [i % 2 == (count - 1) % 2 for i in range(count)]

        def block(i: int) -> PreNormBlock:
            core = start <= i < stop
            hidden = hf["recurrent_intermediation_embedding_dimension"] if core else hf["intermediate_size"]
            inner = hf.get("recurrent_num_attention_heads", heads)
            return PreNormBlock(dim, inner if core else heads, hidden, valued[i])

        stages = {"prelude": range(start), "core_block": range(start, stop), "coda": range(stop, count)}
        parts: dict[str, Any] = {name: nn.ModuleList(map(block, layers)) for name, layers in stages.items()}
        parts |= {"wte": nn.Embedding(vocab, dim), "ln_f": RMSNorm(dim, 1e-5), "ln_prelude": RMSNorm(dim, 1e-5)}
        kind = {"diagonal": Diagonal, "linear": Linear, "add": Add}[hf["injection_type"]]
        parts |= {"ln_state": RMSNorm(dim, 1e-5)} if hf.get("state_norm") else {}
        self.transformer = nn.ModuleDict(parts | {"adapter": kind(dim), "C": linear(dim, dim)})
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(vocab, dim) for i in range(count) if valued[i]})
        self.register_buffer("freqs_cis", torch.zeros(1, hf["block_size"], 1, dim // heads // 2, 2))

    def forward(self, tokens):
        parts = self.transformer

        def run(stage: str, first: int, x):
            for i, block in enumerate(parts[stage], first):
                x = block(x, self.value_embeds[str(i)](tokens) if str(i) in self.value_embeds else None)
            return x

        e = parts["ln_prelude"](run("prelude", 0, parts["wte"](tokens)))

        def step(h, e):
            h = run("core_block", self.start, parts["adapter"](h, e))
            return parts["ln_state"](h) if "ln_state" in parts else h

        h = run_core(self, [block.attn for block in parts["core_block"]], step, e)
        return parts["ln_f"](run("coda", self.stop, parts["C"](h))) @ parts["wte"].weight.T

    def without_coda(self, h):
        """Log-probabilities [T, V] of states."""
        parts = self.transformer
        return F.log_softmax(parts["ln_f"](parts["C"](h)) @ parts["wte"].weight.T, dim=-1)


def oracle_of(hf: dict[str, Any]) -> Huginn | Parcae:
    """A random model; the same for the same configuration."""
    model = Huginn(hf) if "architectures" in hf else Parcae(hf)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight + 0.2 * noise if weight.ndim == 1 or name.endswith(".B") else 0.16 * noise)
    return model.eval()


def make_looped(folder: Path, hf: dict[str, Any]) -> Path:
    """Write the checkpoint of a random model as published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    state = oracle_of(hf).state_dict()
    save_file({**state, "lm_head.weight": state["transformer.wte.weight"].clone()}, folder / "model.safetensors")
    return folder


def looped_logits(hf: dict[str, Any], tokens: np.ndarray | list[int]) -> np.ndarray:
    """Logits [T, V] of one prompt [T], in one full pass."""
    with torch.no_grad():
        return oracle_of(hf)(torch.as_tensor(np.asarray(tokens))).numpy()
