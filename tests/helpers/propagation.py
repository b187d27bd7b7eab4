"""A reading of FastKV that shares no code with the library: transformers runs the layers, numpy chooses the tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from tests.helpers.llms import _reference_model

WINDOW, POOLED = 8, 7  # of the paper


def chosen(weights: np.ndarray, share: float) -> list[int]:
    """Which tokens of a segment go on, by the attention [H, n, n] of the heads of the selecting layer."""
    n = weights.shape[-1]
    most = 32 * math.ceil(share * n / 32)
    if n <= most:
        return list(range(n))
    scores = weights[:, n - WINDOW :, : n - WINDOW].astype(np.float64).sum(axis=(0, 1))
    means = [scores[max(i - POOLED // 2, 0) : i + POOLED // 2 + 1].sum() / POOLED for i in range(n - WINDOW)]
    best = sorted(range(n - WINDOW), key=lambda i: -means[i])[: most - WINDOW]
    return sorted(best) + list(range(n - WINDOW, n))


def attention_weights(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """[H, n, n]: of queries [H, n, h] on the keys [K, n, h] up to their own, each head on its group's."""
    k = np.repeat(k, len(q) // len(k), axis=0)
    logits = scale * np.einsum("hqd,hkd->hqk", q.astype(np.float64), k.astype(np.float64))
    logits = np.where(np.tri(q.shape[1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@torch.no_grad()
def next_token(path: Path, tokens: list[int], prompt: int, layer: int, share: float, segment: int) -> int:
    """The most likely token after these, of which the first `prompt` are a prompt and the others were generated, by a
    Llama whose layers from `layer` on see this share of each segment of a prompt."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = _reference_model(path)
    decoder = model.model
    hidden, places = decoder.embed_tokens(torch.tensor([tokens])), torch.arange(len(tokens))
    for number, block in enumerate(decoder.layers):
        if number == layer:
            hidden, places = hidden[:, going], places[going]  # noqa: F821
        rotary = decoder.rotary_emb(hidden, places[None])
        if number == layer - 1:
            y, heads = block.input_layernorm(hidden), (1, len(tokens), -1, block.self_attn.head_dim)
            q, k = (f(y).view(heads).transpose(1, 2) for f in (block.self_attn.q_proj, block.self_attn.k_proj))
            q, k = (x[0].numpy() for x in apply_rotary_pos_emb(q, k, *rotary))
            going = list(range(prompt, len(tokens)))
            for start in reversed(range(0, prompt, segment)):
                part = slice(start, min(start + segment, prompt))
                weights = attention_weights(q[:, part], k[:, part], block.self_attn.scaling)
                going = [start + i for i in chosen(weights, share)] + going
        mask = torch.where(torch.tril(torch.ones(len(places), len(places), dtype=torch.bool)), 0.0, -torch.inf)
        out = block(hidden, attention_mask=mask[None, None], position_ids=places[None], position_embeddings=rotary)
        hidden = out if isinstance(out, torch.Tensor) else out[0]
    return int(model.lm_head(decoder.norm(hidden[:, -1]))[0].argmax())


def generated(path: Path, prompt: list[int], count: int, layer: int, share: float, segment: int) -> list[int]:
    """So many tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(path, tokens, len(prompt), layer, share, segment))
    return tokens[len(prompt) :]
