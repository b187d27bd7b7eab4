"""Lanes in torch, written down from their description (delayed tensor parallelism, Kog AI 2026): the oracle of
Laneformer. One lane after the other, with a list of all sums that were ever made; tensors have the published names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.helpers.looped import attend, rotated
from tests.helpers.tokenizer import VOCAB

BASE = 10_000.0
LANES: dict[str, Any] = {
    "architectures": ["LaneformerTPForCausalLM"],
    "model_type": "laneformer_tp",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rope_theta": BASE,
    "eos_token_id": 2,
    "num_lanes": 4,
    "broadcast_delay": 1,
}
EIGHT = {"num_lanes": 8, "num_key_value_heads": 8}
# 132 tokens divide over four lanes.
_PARTS = {"vocab_size": 132, "lm_head_type": "vocab_parallel"}
CASES: dict[str, dict[str, Any]] = {
    # The first layer adds all sums at once, the last sends none.
    "delay 1": LANES | {"num_hidden_layers": 3},
    "delay 2": LANES | EIGHT | {"broadcast_delay": 2, "num_hidden_layers": 6, "pre_norm_lane_agg": True},
    "nothing early": LANES | _PARTS | {"use_early_comm": False, "broadcast_delay": 2},
    "nothing": LANES | {"use_comm": False, "use_early_comm": False, "lm_head_type": "lane"},
    "early alone": LANES | {"use_comm": False, "replicated_rmsn_scale": False, "broadcast_delay": 2},
    "windows": LANES | {"sliding_window": 8, "sliding_window_n_layers": 3, "unclamped_layers": [1]},
}


def shapes_of(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the checkpoint's tensors."""
    lanes, dim, hidden, vocab = (hf[key] for key in ("num_lanes", "hidden_size", "intermediate_size", "vocab_size"))
    kv = dim * hf["num_key_value_heads"] // hf["num_attention_heads"]
    by_lane = not hf.get("replicated_rmsn_scale", True)
    norm = {"scale": (lanes, dim)} if by_lane else {"weight": (dim,)}
    outputs = {"attention.wq": dim, "attention.wk": kv, "attention.wv": kv}
    outputs |= {"feed_forward.w1": hidden, "feed_forward.w3": hidden}
    inputs = {"attention.wo": dim, "feed_forward.w2": hidden}
    shapes = {"model.tok_embeddings.weight": (vocab, dim)}
    for i in range(hf["num_hidden_layers"]):
        layer = {f"{name}.weight": (lanes, size // lanes, dim) for name, size in outputs.items()}
        layer |= {f"{name}.weight": (lanes, dim, size // lanes) for name, size in inputs.items()}
        layer |= {f"{name}.{k}": s for name in ("attention_norm", "ffn_norm") for k, s in norm.items()}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    last = {"weight": (dim,)} if hf.get("pre_norm_lane_agg") else norm
    shapes |= {f"model.norm.{name}": shape for name, shape in last.items()}
    heads = {
        "replicate": {"lm_head.weight": (vocab, dim)},
        "lane": {"lm_head.linear.weight": (vocab, lanes * dim)},
        "vocab_parallel": {"lm_head.weight": (lanes, vocab // lanes, dim)},
    }
    return shapes | heads[hf.get("lm_head_type", "replicate")]


def weights_of(hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights; the same for the same configuration."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in sorted(shapes_of(hf).items()):
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if "norm" in name else 0.16 * noise
    return weights


def normed(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str, lane: int | None = None) -> torch.Tensor:
    """The RMS norm of x [T, D], with the weights that lane `lane` has, or all lanes."""
    scale = weights[f"{name}.weight"] if f"{name}.weight" in weights else weights[f"{name}.scale"][lane]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * scale


def attention(
    x: torch.Tensor, of_lane: dict[str, torch.Tensor], hf: dict[str, Any], window: int | None
) -> torch.Tensor:
    """A lane's sum over its heads [T, D]."""
    size = hf["hidden_size"] // hf["num_attention_heads"]
    q, k, v = ((x @ of_lane[f"attention.w{part}"].T).unflatten(-1, (-1, size)) for part in "qkv")
    group = q.shape[1] // k.shape[1]
    q, k, v = rotated(q, BASE), rotated(k, BASE).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if window is None:
        return attend(q, k, v) @ of_lane["attention.wo"].T
    back = torch.arange(len(x))[:, None] - torch.arange(len(x))
    seen = (back >= 0) & (back < window)
    out = F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v)), attn_mask=seen)
    return out.transpose(0, 1).flatten(1) @ of_lane["attention.wo"].T


def feed_forward(x: torch.Tensor, of_lane: dict[str, torch.Tensor]) -> torch.Tensor:
    """A lane's sum over its part of the feed-forward [T, D]."""
    gate, up = x @ of_lane["feed_forward.w1"].T, x @ of_lane["feed_forward.w3"].T
    return (F.silu(gate) * up) @ of_lane["feed_forward.w2"].T


def lane_logits(hf: dict[str, Any], tokens: np.ndarray | list[int]) -> np.ndarray:
    """Logits [T, V] of one prompt [T], in one full pass."""
    weights, lanes, delay = weights_of(hf), range(hf["num_lanes"]), hf["broadcast_delay"]
    count, slide = hf["num_hidden_layers"], hf.get("sliding_window_n_layers", 0)
    x = weights["model.tok_embeddings.weight"][torch.as_tensor(np.asarray(tokens))]
    h, sums = [x for _ in lanes], []
    for i in range(count):
        base = f"model.layers.{i}."
        names = [n.removeprefix(base).removesuffix(".weight") for n in weights if n.startswith(base + "att")]
        names += [n.removeprefix(base).removesuffix(".weight") for n in weights if n.startswith(base + "feed")]
        of = [{n: weights[f"{base}{n}.weight"][m] for n in names if "norm" not in n} for m in lanes]
        window = hf["sliding_window"] if i < slide and i not in hf.get("unclamped_layers", []) else None
        branches = {
            "attention_norm": lambda y, m, of=of, window=window: attention(y, of[m], hf, window),
            "ffn_norm": lambda y, m, of=of: feed_forward(y, of[m]),
        }
        made = {}
        for norm, branch in branches.items():
            parts = made[norm] = [branch(normed(h[m], weights, base + norm, m), m) for m in lanes]
            for m in lanes:
                if i < delay and hf.get("use_early_comm", True):
                    h[m] = h[m] + sum(parts)
                elif i < delay or not hf.get("use_comm", True):
                    h[m] = h[m] + parts[m] * math.sqrt(len(lanes))
                else:
                    late = sums[i - delay][norm]
                    h[m] = h[m] + parts[m] + sum(late[o] for o in lanes if o != m)
        sums.append(made)
    return head(h, weights, hf).numpy()


def head(h: list[torch.Tensor], weights: dict[str, torch.Tensor], hf: dict[str, Any]) -> torch.Tensor:
    """Logits [T, V] of the lanes' residuals."""
    if hf.get("pre_norm_lane_agg"):
        return normed(torch.stack(h).sum(0), weights, "model.norm") @ weights["lm_head.weight"].T
    states = [normed(x, weights, "model.norm", m) for m, x in enumerate(h)]
    match hf.get("lm_head_type", "replicate"):
        case "lane":
            return torch.cat(states, -1) @ weights["lm_head.linear.weight"].T
        case "vocab_parallel":
            return torch.cat([x @ w.T for x, w in zip(states, weights["lm_head.weight"], strict=True)], -1)
        case _:
            return torch.stack(states).mean(0) @ weights["lm_head.weight"].T


def make_lanes(folder: Path, hf: dict[str, Any]) -> Path:
    """Write the checkpoint of a random model as published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file({name: x.contiguous() for name, x in weights_of(hf).items()}, folder / "model.safetensors")
    return folder
