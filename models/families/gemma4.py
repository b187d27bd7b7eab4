"""The dense text models of Gemma 4: larger heads without a window, whose values may be their keys, normed values, and a
learned number that multiplies each layer."""

from __future__ import annotations

from inferlib.models.config import ConfigError, LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, expect, mlp, model, need, rope_spec, windows
from inferlib.models.families.gemma import SANDWICH

DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LAYER_MAP = SANDWICH | {"scalar": "layer_scalar"}
# Options that bring an idea with them which the decoder lacks.
_MISSING = {
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "keys and values of one layer that later ones attend to",
    "enable_moe_block": "experts beside a dense feed-forward, each with norms of its own",
}


def gemma4(hf: Hf) -> ModelConfig:
    """Five layers with a window, then one without; the last has none."""
    for key, idea in _MISSING.items():
        if hf.get(key):
            raise ConfigError(f"{key}={hf[key]} in config.json is not supported: this decoder has no {idea}")
    expect(hf, "use_bidirectional_attention", "vision")
    count, shared = need(hf, "num_hidden_layers"), bool(hf["attention_k_eq_v"])
    slides = [*windows(hf, lambda i: (i + 1) % 6 != 0)[: count - 1], None]
    layers = []
    for i, window in enumerate(slides):
        kind = "sliding_attention" if window else "full_attention"
        sizes = {**hf, **_sizes(hf, i, kind)}
        options = {"scale": 1.0, "qk_norm": "head", "value_norm": True, "key_is_value": shared and window is None}
        rope = rope_spec(sizes, need(hf["rope_parameters"], kind))
        attn = attention(sizes, rope, window, **options)
        layers.append(LayerSpec(attn, mlp(hf, "hidden_activation"), post_norm=True, scaled=True))
    cap = hf.get("final_logit_softcapping")
    return model(hf, "gemma4", layers, embed_scale=hf["hidden_size"] ** 0.5, final_softcap=cap)


def _sizes(hf: Hf, layer: int, kind: str) -> Hf:
    """Sizes of one layer's heads that differ from those of the others, in either style."""
    if hf.get("per_layer_config") is not None:
        return {int(i): sizes for i, sizes in hf["per_layer_config"].items()}.get(layer, {})
    if kind == "sliding_attention":
        return {}
    heads = hf.get("num_global_key_value_heads") if hf["attention_k_eq_v"] else None
    return {"head_dim": hf["global_head_dim"]} | ({} if heads is None else {"num_key_value_heads": heads})


GEMMA4 = Family("gemma4", ("Gemma4ForCausalLM",), gemma4, DEFAULTS, LAYER_MAP)
