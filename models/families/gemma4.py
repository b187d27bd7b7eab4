"""The text models of Gemma 4: larger heads without a window, whose values may be their keys, normed values, a learned
number that multiplies each layer; experts beside the dense feed-forward (26B-A4B), or per-layer embeddings and last
layers that attend to the keys and values of earlier ones (E2B, E4B)."""

from __future__ import annotations

from dataclasses import replace

from inferlib.models.config import LayerSpec, MlpSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.families.common import (
    Family,
    Hf,
    activation,
    attention,
    expect,
    mlp,
    model,
    need,
    rope_spec,
    text_of,
    windows,
)
from inferlib.models.families.gemma import SANDWICH
from inferlib.models.families.gemma3n import PER_LAYER_MAP, PER_LAYER_TOP, caches, per_layer

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
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LAYER_MAP = (
    SANDWICH
    | PER_LAYER_MAP
    | {
        "scalar": "layer_scalar",
        # Beside experts, the dense feed-forward is the shared one.
        "mlp.shared.gate": "mlp.gate_proj",
        "mlp.shared.up": "mlp.up_proj",
        "mlp.shared.down": "mlp.down_proj",
        "mlp.post_shared_norm": "post_feedforward_layernorm_1",
        "mlp.pre_norm": "pre_feedforward_layernorm_2",
        "mlp.post_norm": "post_feedforward_layernorm_2",
        "mlp.router": "router.proj",
        "mlp.router.norm": "router.scale",
        "mlp.router.expert_scale": "router.per_expert_scale",
        "mlp.experts.gate_up": "experts.gate_up_proj",
        "mlp.experts.down": "experts.down_proj",
    }
)


def gemma4(hf: Hf) -> ModelConfig:
    """Five layers with a window, then one without; the last has none."""
    expect(hf, "use_bidirectional_attention", "vision")
    count, shared = need(hf, "num_hidden_layers"), bool(hf["attention_k_eq_v"])
    slides = [*windows(hf, lambda i: (i + 1) % 6 != 0)[: count - 1], None]
    layers = []
    for i, (window, cache) in enumerate(zip(slides, caches(hf, slides), strict=True)):
        kind = "sliding_attention" if window else "full_attention"
        sizes = {**hf, **_sizes(hf, i, kind)}
        options = {"scale": 1.0, "qk_norm": "head", "value_norm": True, "key_is_value": shared and window is None}
        rope = rope_spec(sizes, need(hf["rope_parameters"], kind))
        attn, feed = attention(sizes, rope, window, cache_of=cache, **options), mlp(hf, "hidden_activation")
        if hf["use_double_wide_mlp"] and cache is not None:
            feed = replace(feed, hidden=2 * feed.hidden)
        feed = _experts(hf, feed) if hf["enable_moe_block"] else feed
        layers.append(LayerSpec(attn, feed, post_norm=True, scaled=True))
    return model(
        hf,
        "gemma4",
        layers,
        embed_scale=hf["hidden_size"] ** 0.5,
        final_softcap=hf.get("final_logit_softcapping"),
        per_layer=per_layer(hf) if hf["hidden_size_per_layer_input"] else None,
    )


def _experts(hf: Hf, dense: MlpSpec) -> MoeSpec:
    router = RouterSpec(
        need(hf, "num_experts"),
        need(hf, "top_k_experts"),
        renormalize=True,
        norm_eps=need(hf, "rms_norm_eps"),
        expert_scale=True,
    )
    hidden = need(hf, "moe_intermediate_size")
    return MoeSpec(router, hidden, activation(hf, "hidden_activation"), shared=dense, separate_norms=True)


def _sizes(hf: Hf, layer: int, kind: str) -> Hf:
    """The head sizes of one layer if they differ from other layers' sizes, in either style of config."""
    if hf.get("per_layer_config") is not None:
        return {int(i): sizes for i, sizes in hf["per_layer_config"].items()}.get(layer, {})
    if kind == "sliding_attention":
        return {}
    heads = hf.get("num_global_key_value_heads") if hf["attention_k_eq_v"] else None
    return {"head_dim": hf["global_head_dim"]} | ({} if heads is None else {"num_key_value_heads": heads})


GEMMA4 = Family("gemma4", ("Gemma4ForCausalLM",), gemma4, DEFAULTS, LAYER_MAP, PER_LAYER_TOP)
GEMMA4_TEXT = text_of(GEMMA4, "Gemma4ForConditionalGeneration")
