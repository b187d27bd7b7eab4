"""Gemma, Gemma 2 and the text models of Gemma 3."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig, NormSpec
from inferlib.models.families.common import (
    LAYER,
    Family,
    Hf,
    attention,
    expect,
    mlp,
    model,
    need,
    rope_spec,
    rope_specs,
    text_of,
    windows,
)

# Gemma 2 and 3 norm the input and the output of both branches.
SANDWICH = LAYER | {
    "post_attn_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA2_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
# Published Gemma 3 configs leave out even the sizes.
GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def _model(hf: Hf, family: str, layers: list[LayerSpec]) -> ModelConfig:
    """Embeddings are scaled by the root of the width, norm weights are stored less one, and attention is causal."""
    expect(hf, "use_bidirectional_attention", False)
    norm = NormSpec(eps=need(hf, "rms_norm_eps"), unit_offset=True)
    cap = hf.get("final_logit_softcapping")
    return model(hf, family, layers, norm, embed_scale=hf["hidden_size"] ** 0.5, final_softcap=cap)


def gemma(hf: Hf) -> ModelConfig:
    # "gelu" in the first published configs meant the tanh form.
    hf = {**hf, "hidden_act": "gelu_pytorch_tanh"} if hf["hidden_act"] == "gelu" else hf
    layer = LayerSpec(attention(hf, rope_spec(hf)), mlp(hf))
    return _model(hf, "gemma", [layer] * need(hf, "num_hidden_layers"))


def gemma2(hf: Hf) -> ModelConfig:
    """Every other layer has a window, the first included."""
    options = {"scale": hf["query_pre_attn_scalar"] ** -0.5, "softcap": hf["attn_logit_softcapping"]}
    rope = rope_spec(hf)
    layers = [
        LayerSpec(attention(hf, rope, window, **options), mlp(hf, "hidden_activation"), post_norm=True)
        for window in windows(hf, lambda i: i % 2 == 0)
    ]
    return _model(hf, "gemma2", layers)


def gemma3(hf: Hf) -> ModelConfig:
    """Five layers with a window and a small RoPE base, then one without and a large base."""
    expect(hf, "attn_logit_softcapping")
    options = {"scale": hf["query_pre_attn_scalar"] ** -0.5, "qk_norm": "head"}
    full, sliding = rope_specs(hf, hf["rope_local_base_freq"])
    layers = [
        LayerSpec(
            attention(hf, full if window is None else sliding, window, **options),
            mlp(hf, "hidden_activation"),
            post_norm=True,
        )
        for window in windows(hf, lambda i: (i + 1) % hf["sliding_window_pattern"] != 0)
    ]
    return _model(hf, "gemma3", layers)


GEMMA = Family("gemma", ("GemmaForCausalLM",), gemma, DEFAULTS)
GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), gemma2, GEMMA2_DEFAULTS, SANDWICH)
GEMMA3 = Family("gemma3", ("Gemma3ForCausalLM",), gemma3, GEMMA3_DEFAULTS, SANDWICH)
GEMMA3_TEXT = text_of(GEMMA3, "Gemma3ForConditionalGeneration", whole=True)
