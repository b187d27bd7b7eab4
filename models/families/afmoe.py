"""AFMoE (Arcee Trinity): gated attention that rotates only where it has a window, and norms around both branches."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig, OutputGate, RouterSpec
from inferlib.models.families.common import (
    MOE_LAYER,
    Family,
    Hf,
    attention,
    model,
    need,
    rope_spec,
    shared_and_routed,
    windows,
)
from inferlib.models.families.deepseek import feeds

DEFAULTS = {
    "vocab_size": 200192,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "route_scale": 1.0,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
    "mup_enabled": False,
}
LAYER_MAP = MOE_LAYER | {
    "attn.gate": "self_attn.gate_proj",
    "mlp.router": "mlp.router.gate",
    "mlp.router.correction": "mlp.expert_bias",
    "post_attn_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_mlp_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}


def afmoe(hf: Hf) -> ModelConfig:
    """Every fourth layer has no window."""
    router = RouterSpec(
        need(hf, "num_experts"),
        need(hf, "num_experts_per_tok"),
        score="sigmoid",
        renormalize=True,
        scale=hf["route_scale"],
        correction=True,
    )
    hf = {**hf, "n_shared_experts": hf["num_shared_experts"], "first_k_dense_replace": hf["num_dense_layers"]}
    rope, gate = rope_spec(hf), OutputGate("sigmoid", per_head=False)
    feed = feeds(hf, shared_and_routed(hf, router))
    layers = [
        LayerSpec(
            attention(hf, rope if window else None, window, qk_norm="head", gate=gate),
            feed[i],
            post_norm=True,
        )
        for i, window in enumerate(windows(hf, lambda i: (i + 1) % hf["global_attn_every_n_layers"] != 0))
    ]
    return model(hf, "afmoe", layers, embed_scale=hf["hidden_size"] ** 0.5 if hf["mup_enabled"] else 1.0)


AFMOE = Family("afmoe", ("AfmoeForCausalLM",), afmoe, DEFAULTS, LAYER_MAP)
