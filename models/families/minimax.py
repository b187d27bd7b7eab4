"""MiniMax-Text-01 and M1: lightning attention, some layers of attention, experts, and residuals that are normed and
scaled."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig, MoeSpec, NormedResidual, RouterSpec
from inferlib.models.families.common import (
    Family,
    Hf,
    activation,
    attention,
    expect,
    head_dim,
    layer_types,
    model,
    need,
    rope_spec,
)
from inferlib.models.families.mistral import MIXTRAL_LAYER
from inferlib.models.mixers.lightning import LightningSpec

LAYER = MIXTRAL_LAYER | {
    "lightning.qkv": "self_attn.qkv_proj",
    "lightning.gate": "self_attn.output_gate",
    "lightning.norm": "self_attn.norm",
    "lightning.o": "self_attn.out_proj",
}
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def minimax(hf: Hf) -> ModelConfig:
    """In published configs `rotary_dim` is the rotated part of a head; transformers 5 rotates all of it."""
    expect(hf, "hidden_act", "silu")
    if hf.get("rotary_dim") is not None:
        hf = {"partial_rotary_factor": hf["rotary_dim"] / head_dim(hf), **hf}
    full = attention(hf, rope_spec(hf, partial=True), hf.get("sliding_window"))
    mixers = {"full_attention": full, "linear_attention": LightningSpec(full.heads, full.head_dim)}
    router = RouterSpec(need(hf, "num_local_experts"), need(hf, "num_experts_per_tok"), renormalize=True)
    experts = MoeSpec(router, need(hf, "intermediate_size"), activation(hf, "hidden_act"))
    residuals = {
        kind: NormedResidual(*(_scales(hf, name) for name in (f"{kind.removesuffix('_attention')}_attn", "mlp")))
        for kind in mixers
    }
    kinds = layer_types(hf, "linear_attention", lambda i: i % 2 == 1)
    layers = [LayerSpec(mixers[kind], experts, normed=residuals[kind]) for kind in kinds]
    return model(hf, "minimax", layers)


def _scales(hf: Hf, name: str) -> tuple[float, float]:
    return float(hf.get(f"{name}_alpha_factor", 1)), float(hf.get(f"{name}_beta_factor", 1))


def _decay(layer: LayerSpec, number: int, count: int) -> tuple[float, ...]:
    """How quickly each head's state fades: in the first layer half of the heads fade more slowly than 2^-4 a token, and
    every later layer fades more slowly than the one before."""
    heads, share = layer.attention.heads, 1 - number / (count - 1 + 1e-5) + 1e-5
    return tuple(2 ** (-8 * (head + 1) / heads) * share for head in range(heads))


MINIMAX = Family("minimax", ("MiniMaxForCausalLM",), minimax, DEFAULTS, LAYER, computed={"attn.decay": _decay})
