"""The text models of Gemma 3n: parallel residuals (AltUp) and learned ones (LAuReL), per-layer embeddings, sparse
gates, and last layers that attend to the keys and values of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from inferlib.models.config import ConfigError, LayerSpec, MlpSpec, ModelConfig, PerLayerSpec
from inferlib.models.families.common import (
    TOP,
    Family,
    Hf,
    activation,
    attention,
    expect,
    for_each_layer,
    model,
    need,
    rope_specs,
    text_of,
    windows,
)
from inferlib.models.families.gemma import SANDWICH

DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
PER_LAYER_MAP = {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.out": "per_layer_projection",
    "per_layer.norm": "post_per_layer_input_norm",
}
PER_LAYER_TOP = TOP | {
    "per_layer.table": "model.embed_tokens_per_layer",
    "per_layer.projection": "model.per_layer_model_projection",
    "per_layer.norm": "model.per_layer_projection_norm",
}
LAYER_MAP = (
    SANDWICH
    | PER_LAYER_MAP
    | {
        "altup.norm": "altup.router_norm",
        "altup.router": "altup.modality_router",
        "altup.prediction": "altup.prediction_coefs",
        "altup.correction": "altup.correction_coefs",
        "altup.scale": "altup.correct_output_scale",
        "laurel.left": "laurel.linear_left",
        "laurel.right": "laurel.linear_right",
        "laurel.norm": "laurel.post_laurel_norm",
    }
)
TOP_MAP = PER_LAYER_TOP | {
    "streams.split": "model.altup_projections.{n}",
    "streams.merge": "model.altup_unembed_projections.{n}",
}


def caches(hf: Hf, slides: Sequence[int | None]) -> tuple[int | None, ...]:
    """The layer whose cache each layer attends to: for the last `num_kv_shared_layers` layers, the last layer before
    them with the same window; None for the others."""
    owners = len(slides) - (hf.get("num_kv_shared_layers") or 0)
    if not 0 <= owners <= len(slides):
        raise ConfigError(f"num_kv_shared_layers={hf['num_kv_shared_layers']} of {len(slides)} layers")
    last = {window: i for i, window in enumerate(slides[:owners])}
    if missing := set(slides[owners:]) - set(last):
        raise ConfigError(
            f"layers with windows {missing} share a cache, and none of the first {owners} layers is like them"
        )
    return tuple(None if i < owners else last[window] for i, window in enumerate(slides))


def per_layer(hf: Hf) -> PerLayerSpec:
    dim, vocab = need(hf, "hidden_size_per_layer_input"), need(hf, "vocab_size_per_layer_input")
    return PerLayerSpec(dim, vocab, activation(hf, "hidden_activation"))


def gemma3n(hf: Hf) -> ModelConfig:
    """Four layers with a window and a small RoPE base, then one without and a large base."""
    expect(hf, "altup_active_idx", 0)
    expect(hf, "altup_correct_scale", True)
    full, sliding = rope_specs(hf, hf["rope_local_base_freq"])
    slides, act = windows(hf, lambda i: (i + 1) % 5 != 0), activation(hf, "hidden_activation")
    hidden = for_each_layer(hf, "intermediate_size", need(hf, "intermediate_size"))
    sparsity = hf.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95 if len(slides) > 10 and i < 10 else 0.0 for i in range(len(slides))]
    sparsity, options = for_each_layer(hf, "activation_sparsity_pattern", sparsity), dict(scale=1.0, qk_norm="head")
    layers = [
        LayerSpec(
            attention(hf, sliding if window else full, window, value_norm=True, cache_of=cache, **options),
            MlpSpec(width, act, sparsity=cut),
            post_norm=True,
            laurel=need(hf, "laurel_rank"),
        )
        for window, cache, width, cut in zip(slides, caches(hf, slides), hidden, sparsity, strict=True)
    ]
    return model(
        hf,
        "gemma3n",
        layers,
        embed_scale=hf["hidden_size"] ** 0.5,
        final_softcap=hf["final_logit_softcapping"],
        per_layer=per_layer(hf),
        streams=need(hf, "altup_num_inputs"),
    )


GEMMA3N = Family(
    "gemma3n", ("Gemma3nForCausalLM",), gemma3n, DEFAULTS, LAYER_MAP, TOP_MAP, lists=("intermediate_size",)
)
GEMMA3N_TEXT = text_of(GEMMA3N, "Gemma3nForConditionalGeneration")
