"""GPT-2: learned positions, layer norms with biases, a feed-forward without a gate, matrices stored [in, out]."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, MlpSpec, ModelConfig, NormSpec
from inferlib.models.families.common import Family, Hf, activation, attention, expect, first_of, model, need

LAYER_MAP = {
    "attn.qkv": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "pre_attn_norm": "ln_1",
    "pre_mlp_norm": "ln_2",
}
TOP = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
DEFAULTS = {
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


def gpt2(hf: Hf) -> ModelConfig:
    expect(hf, "add_cross_attention", False)
    width, count = first_of(hf, "n_embd", "hidden_size"), first_of(hf, "n_layer", "num_hidden_layers")
    heads = first_of(hf, "n_head", "num_attention_heads")
    hf = {**hf, "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": None}
    hf |= {"attention_bias": True, "max_position_embeddings": first_of(hf, "max_position_embeddings", "n_positions")}
    feed = MlpSpec(hf.get("n_inner") or 4 * width, activation(hf, "activation_function"), bias=True, gated=False)
    scale = (width // heads) ** -0.5 if hf["scale_attn_weights"] else 1.0
    layers = [
        LayerSpec(attention(hf, None, scale=scale / (i + 1 if hf["scale_attn_by_inverse_layer_idx"] else 1)), feed)
        for i in range(count)
    ]
    norm = NormSpec("layer", need(hf, "layer_norm_epsilon"), bias=True)
    return model(hf, "gpt2", layers, norm, learned_positions=True)


GPT2 = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    gpt2,
    DEFAULTS,
    LAYER_MAP,
    TOP,
    prefix="transformer.h.{i}.",
    base="transformer.",
    transposed=True,
)
