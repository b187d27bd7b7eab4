"""Models that repeat layers: Huginn (Geiping et al. 2025) and Parcae (Prairie et al. 2026)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from inferlib.models.config import (
    Activation,
    AttentionSpec,
    ConfigError,
    LayerSpec,
    LoopSpec,
    MlpSpec,
    ModelConfig,
    NormSpec,
    RopeSpec,
    ValueEmbedding,
)
from inferlib.models.families.common import EARLY_EXIT, LOOP_STEPS, Family, Hf, expect, model, need, options_of

LAYER = {
    "attn.qk_bias": "attn.qk_bias",
    "attn.o": "attn.proj",
    "mlp.gate_up": "mlp.fc",
    "mlp.down": "mlp.proj",
    "pre_attn_norm": "norm_1",
    "pre_mlp_norm": "norm_2",
}
HUGINN_LAYER = LAYER | {
    "attn.qkv": "attn.Wqkv",
    "post_attn_norm": "norm_2",
    "pre_mlp_norm": "norm_3",
    "post_mlp_norm": "norm_4",
}
PARCAE_LAYER = LAYER | {
    "attn.q": "attn.c_q",
    "attn.k": "attn.c_k",
    "attn.v": "attn.c_v",
    "attn.o": "attn.c_proj",
    "attn.value_gate": "attn.ve_gate",
    "attn.value_embedding": "value_embeds.{layer}",
}
TOP = {"embed": "transformer.wte", "final_norm": "transformer.ln_f", "head": "lm_head"}
HUGINN_TOP = TOP | {"loop.linear": "transformer.adapter.weight"}
PARCAE_TOP = TOP | {
    "loop.linear": "transformer.adapter.adapter.weight",
    "loop.input": "transformer.adapter.B",
    "loop.injection.decay": "transformer.adapter.A_log",
    "loop.injection.step": "transformer.adapter.dt_bias",
    "loop.entry_norm": "transformer.ln_prelude.weight",
    "loop.state_norm": "transformer.ln_state.weight",
    "loop.exit": "transformer.C.weight",
}
_DEFAULTS = {"bias": False, "qk_bias": False, "state_init": "like-init", "rope_base": 50_000}
HUGINN_DEFAULTS = _DEFAULTS | {
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "norm_eps": 1e-6,
    "qk_bias": True,
    "tie_embeddings": True,
}
# Of the published models.
PARCAE_DEFAULTS = _DEFAULTS | {
    "block_class_name": "TransformerPreNormBlock",
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "BaseMLP",
    "nonlin_name": "ReLU2",
    "injection_type": "diagonal",
    "init_strategy": "scaled-zero",
    "norm_eps": 1e-5,
    "qk_norm": True,
    "prelude_norm": True,
    "state_norm": False,
    "tie_embeddings": True,
}
_ACTIVATIONS: dict[str, Activation] = {"SiLU": "silu", "GELU": "gelu", "ReLU2": "relu2"}
_MLPS = {"BaseMLP": False, "GatedMLP": True}
_UNIT_EPS = 2.0**-23  # what torch's rms_norm adds in float32 unless it is told otherwise
_GATE_CHANNELS = 32


def huginn(hf: Hf) -> ModelConfig:
    """Norms before the branches and after their sums; the final norm also makes the coda's input."""
    _check(hf, block="SandwichBlock", injections=("linear",))
    width = need(hf, "n_embd")
    layer = LayerSpec(_attention(hf, _heads(hf), width), _mlp(hf), post_norm=True, norms_sums=True)
    init = {"std": math.sqrt(2 / (5 * width)), "embed_scale": math.sqrt(width), **options_of(hf, "init_values")}
    std = 0.0 if hf["state_init"] == "zero" else init["std"] * init["embed_scale"]
    start, stop, count = _stages(hf)
    early = _early_exit(hf)
    loop = LoopSpec(start, stop, _steps(hf), "linear", "final_norm", state_std=std, early_exit=early)
    return _model(hf, "huginn_raven", [layer] * count, loop, embed_scale=float(init["embed_scale"]))


def parcae(hf: Hf) -> ModelConfig:
    """Norms before the branches; queries and keys are normed behind their rotation, without weights; every other layer
    has gated value embeddings. The core may have other heads and another feed-forward. `state_norm`, a norm behind the
    core, is not of the paper."""
    _check(hf, block="TransformerPreNormBlock", injections=("diagonal", "linear", "add"))
    expect(hf, "norm_class_name", "RMSNorm")
    expect(hf, "clip_qkv", None)
    expect(hf, "init_strategy", "scaled", "scaled-zero", "scaled-geiping", "scaled-stuck")  # others scale embeddings
    width = need(hf, "n_embd")
    expect(hf, "recurrent_embedding_dimension", width)
    rope = options_of(hf, "rope_settings")
    expect(rope, "rope_condense_ratio", 1)
    expect(rope, "use_rope", True)
    hf = {**hf, "rope_base": rope.get("rope_base", hf["rope_base"])}
    start, stop, count = _stages(hf)
    inner = hf.get("recurrent_num_attention_heads") or _heads(hf)
    core = LayerSpec(_attention(hf, inner, width), _mlp(hf, hf.get("recurrent_intermediation_embedding_dimension")))
    outer = LayerSpec(_attention(hf, _heads(hf), width), _mlp(hf))
    layers = [core if start <= i < stop else outer for i in range(count)]
    layers = [_with_values(hf, layer, i) for i, layer in enumerate(layers)]
    std = 0.0 if hf["state_init"] == "zero" else math.sqrt(2 / (5 * width))
    entry, injection = hf["prelude_norm"], hf["injection_type"]
    options = {"entry_norm": entry, "state_norm": hf["state_norm"], "state_std": std, "early_exit": _early_exit(hf)}
    loop = LoopSpec(start, stop, _steps(hf), injection, "linear", **options)
    return _model(hf, "parcae", layers, loop, final_softcap=hf.get("logit_softcap"))


def _heads(hf: Hf) -> int:
    """The number of heads of queries, keys and values."""
    return hf.get("num_attention_heads") or need(hf, "n_heads")


def _check(hf: Hf, *, block: str, injections: tuple[str, ...]) -> None:
    expect(hf, "block_class_name", block)
    expect(hf, "injection_type", *injections)
    expect(hf, "bias", False)
    expect(hf, "num_key_value_heads", _heads(hf))
    expect(hf, "state_init", "like-init", "zero")
    expect(hf, "nonlin_name", *_ACTIVATIONS)
    expect(hf, "mlp_class_name", *_MLPS)
    expect(hf, "mup_model_scaling_factor", 1)


def _steps(hf: Hf) -> int:
    """How often the core runs: as is asked for, or on average in training."""
    return need(hf, "mean_recurrence") if hf.get(LOOP_STEPS) is None else hf[LOOP_STEPS]


def _early_exit(hf: Hf) -> Literal["change", "kl"] | None:
    """The rule by which tokens may leave the core before its last step; None: they may not."""
    expect(hf, EARLY_EXIT, False, True, "kl")
    return "kl" if hf.get(EARLY_EXIT) == "kl" else "change" if hf.get(EARLY_EXIT) else None


def _stages(hf: Hf) -> tuple[int, int, int]:
    """The layer that the core starts with, the layer that follows it, and the number of layers."""
    start = need(hf, "n_layers_in_prelude")
    stop = start + need(hf, "n_layers_in_recurrent_block")
    return start, stop, stop + need(hf, "n_layers_in_coda")


def _attention(hf: Hf, heads: int, width: int) -> AttentionSpec:
    if width % heads:
        raise ConfigError(f"n_embd {width} in config.json does not divide into {heads} heads")
    size = width // heads
    rope = RopeSpec(size, float(hf["rope_base"]), interleaved=True)
    norm = {"qk_norm": "unit", "qk_norm_after_rope": True, "qk_norm_eps": _UNIT_EPS} if hf.get("qk_norm") else {}
    return AttentionSpec(heads, heads, size, size**-0.5, rope, qkv_bias=bool(hf["qk_bias"]), **norm)


def _mlp(hf: Hf, hidden: int | None = None) -> MlpSpec:
    return MlpSpec(
        hidden or need(hf, "intermediate_size"), _ACTIVATIONS[hf["nonlin_name"]], gated=_MLPS[hf["mlp_class_name"]]
    )


def _with_values(hf: Hf, layer: LayerSpec, number: int) -> LayerSpec:
    """The layer, with gated value embeddings if it has both a table and a gate. Every other layer has a table, the last
    one included. Every other one has a gate too, but by numbers that count the core once for each step in training."""
    start, stop, count = _stages(hf)
    core, steps = stop - start, need(hf, "mean_recurrence")
    place = number + core * (steps - 1) if number >= stop else number
    if number % 2 != (count - 1) % 2 or place % 2 != (core * need(hf, "mean_backprop_depth") - 1) % 2:
        return layer
    table = ValueEmbedding(hf.get("padded_vocab_size") or need(hf, "vocab_size"), _GATE_CHANNELS)
    assert isinstance(layer.attention, AttentionSpec)
    return replace(layer, attention=replace(layer.attention, value_embedding=table))


def _model(hf: Hf, family: str, layers: list[LayerSpec], loop: LoopSpec, **options) -> ModelConfig:
    sizes = {
        "vocab_size": hf.get("padded_vocab_size") or need(hf, "vocab_size"),
        "hidden_size": need(hf, "n_embd"),
        "max_position_embeddings": need(hf, "block_size"),
        "tie_word_embeddings": need(hf, "tie_embeddings"),
    }
    return model({**hf, **sizes}, family, layers, NormSpec(eps=hf["norm_eps"]), loop=loop, **options)


PREFIX = "transformer.{stage}.{i}."
HUGINN = Family(
    "huginn_raven", ("RavenForCausalLM",), huginn, HUGINN_DEFAULTS, HUGINN_LAYER, top=HUGINN_TOP, prefix=PREFIX
)
PARCAE = Family("parcae", ("Parcae",), parcae, PARCAE_DEFAULTS, PARCAE_LAYER, top=PARCAE_TOP, prefix=PREFIX)
