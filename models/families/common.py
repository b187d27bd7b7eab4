"""What the family recipes share: the `Family` record and builders over Hugging Face configs.

Both styles of rotary options are understood: `rope_parameters` (transformers 5) and the older
`rope_theta` with `rope_scaling`. An option that would change the result and is not supported raises
`ConfigError`; one that only adds or removes tensors is left to the loader, which names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inferlib.models.config import (
    AttentionSpec,
    ConfigError,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    MoeSpec,
    NormSpec,
    RopeScaling,
    RopeSpec,
    RouterSpec,
)

Hf = Mapping[str, Any]

# Our parts of a layer -> the checkpoint's modules under `model.layers.N.`; ".weight" and ".bias" are
# added by the loader. A part of a fused matrix (`attn.q`, `attn.k`, `attn.v`; `mlp.gate`, `mlp.up`)
# may instead come fused: `attn.qkv` holds q, k, v rows in this order, `mlp.gate_up` gate and up rows.
# Experts are tensors named in full, one by one ("{e}") or fused, and so is `mlp.router.correction`.
LAYER = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "pre_attn_norm": "input_layernorm",
    "pre_mlp_norm": "post_attention_layernorm",
}
# Names that most mixtures of experts share.
MOE_LAYER = LAYER | {
    "mlp.router": "mlp.gate",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    "mlp.experts.gate": "mlp.experts.{e}.gate_proj.weight",
    "mlp.experts.up": "mlp.experts.{e}.up_proj.weight",
    "mlp.experts.down": "mlp.experts.{e}.down_proj.weight",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
TOP = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
# What a configuration of several parts may say outside that of its text.
_TOKENS = ("bos_token_id", "eos_token_id")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# What each kind of rotary scaling reads, first what it cannot do without.
_ROPE_OPTIONS = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        (),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "proportional": ((), ("factor", "partial_rotary_factor")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}


@dataclass(frozen=True)
class FusedExperts:
    """One tensor of all experts: [E, out, in], or `transposed` [E, in, out]; gate and up are halves of `out`, or
    `interleaved` in turn."""

    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Family:
    """A recipe and a name map.

    recipe: Hugging Face config dictionary -> ModelConfig.
    defaults: what transformers' configuration class assumes for keys that config.json lacks.
    layer: part of a layer -> checkpoint module below `prefix`; entries a config does not use are ignored.
    top: `embed`, `final_norm`, `head` -> checkpoint module.
    fused_experts: how a checkpoint holds them, if all in one tensor.
    base: what the names of tensors begin with, except in checkpoints of a model without its head.
    transposed: matrices of layers are stored [in, out].
    sublayers: how many layers the checkpoint holds as one; {sub} in a module is which of them.
    drafts: beginnings of the names of tensors that are left out: for predicting several tokens at once, or of images
    and sound; {layers} is the number of layers.
    """

    name: str
    architectures: tuple[str, ...]
    recipe: Callable[[Hf], ModelConfig]
    defaults: Hf
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    prefix: str = "model.layers.{i}."
    fused_experts: FusedExperts = FusedExperts()
    drafts: tuple[str, ...] = ()
    base: str = ""
    transposed: bool = False
    sublayers: int = 1

    def config(self, hf: Hf) -> ModelConfig:
        """The model a `config.json` describes; raises ConfigError if it is not supported."""
        return self.recipe({**self.defaults, **hf})


def text_of(family: Family, architecture: str) -> Family:
    """The family of the text part of a model that also sees and hears, whose other parts are left out."""

    def below(module: str) -> str:
        return module.replace("model.", "model.language_model.", 1)

    return replace(
        family,
        architectures=(architecture,),
        recipe=lambda hf: family.config({**need(hf, "text_config"), **{k: hf[k] for k in _TOKENS if k in hf}}),
        defaults={},
        top={part: below(module) for part, module in family.top.items()},
        prefix=below(family.prefix),
        drafts=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    )


def need(hf: Hf, key: str) -> Any:
    if hf.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}")
    return hf[key]


def expect(hf: Hf, key: str, *supported: Any) -> None:
    """Raise ConfigError unless option `key` is absent, null or one of `supported`."""
    if hf.get(key) is not None and hf[key] not in supported:
        raise ConfigError(f"{key}={hf[key]!r} in config.json is not supported; supported: {list(supported)}")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as it appears in configs: nothing, one id or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def activation(hf: Hf, key: str) -> str:
    """The activation's name in `MlpSpec`."""
    expect(hf, key, *_ACTIVATIONS)
    return _ACTIVATIONS[need(hf, key)]


def head_dim(hf: Hf) -> int:
    return hf.get("head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads")


def attention(hf: Hf, rope: RopeSpec | None, window: int | None = None, **options: Any) -> AttentionSpec:
    """Llama's attention; `options` are the fields of `AttentionSpec` where a family differs."""
    heads, size, bias = need(hf, "num_attention_heads"), head_dim(hf), bool(hf.get("attention_bias"))
    fields = {
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": size,
        "scale": size**-0.5,
        "qkv_bias": bias,
        "o_bias": bias,
    }
    return AttentionSpec(rope=rope, window=window, **{**fields, **options})


def mlp(hf: Hf, activation_key: str = "hidden_act", bias_key: str = "mlp_bias") -> MlpSpec:
    return MlpSpec(need(hf, "intermediate_size"), activation(hf, activation_key), bias=bool(hf.get(bias_key)))


def first_of(hf: Hf, *keys: str) -> Any:
    """The value of an option that has had several names."""
    return next((hf[key] for key in keys if hf.get(key) is not None), None) or need(hf, keys[0])


def softmax_router(hf: Hf, experts: int, **options: Any) -> RouterSpec:
    return RouterSpec(experts, need(hf, "num_experts_per_tok"), renormalize=bool(hf.get("norm_topk_prob")), **options)


def grouped_sigmoid_router(hf: Hf) -> RouterSpec:
    """DeepSeek-V3's."""
    return RouterSpec(
        need(hf, "n_routed_experts"),
        need(hf, "num_experts_per_tok"),
        score="sigmoid",
        renormalize=need(hf, "norm_topk_prob"),
        scale=need(hf, "routed_scaling_factor"),
        correction=True,
        groups=need(hf, "n_group"),
        chosen_groups=need(hf, "topk_group"),
    )


def shared_and_routed(hf: Hf, router: RouterSpec) -> MoeSpec:
    """Experts and `n_shared_experts` of the same size that all tokens take."""
    hidden, act, shared = need(hf, "moe_intermediate_size"), activation(hf, "hidden_act"), hf.get("n_shared_experts")
    return MoeSpec(router, hidden, act, shared=MlpSpec(hidden * shared, act) if shared else None)


def model(
    hf: Hf, family: str, layers: Iterable[LayerSpec], norm: NormSpec | None = None, **options: Any
) -> ModelConfig:
    """The whole model; `options` are the fields of `ModelConfig` where a family differs."""
    layers = tuple(layers)
    return ModelConfig(
        family=family,
        vocab=need(hf, "vocab_size"),
        dim=need(hf, "hidden_size"),
        layers=layers,
        context=max([need(hf, "max_position_embeddings"), *map(_stretched_context, layers)]),
        norm=norm or NormSpec(eps=need(hf, "rms_norm_eps")),
        tied=need(hf, "tie_word_embeddings"),
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=hf.get("bos_token_id"),
        **options,
    )


def _stretched_context(layer: LayerSpec) -> int:
    """What the kinds of scaling that state the trained context stretch it to, else 0.

    The others are used with `max_position_embeddings` stretched already.
    """
    scaling = layer.attention.rope and layer.attention.rope.scaling
    if scaling is None or scaling.kind not in ("dynamic", "yarn"):
        return 0
    return int(scaling.factor * scaling.original_context)


def windows(hf: Hf, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Each layer's window, by `layer_types`, or where they are absent, by `slides` (layer index -> bool)."""
    count = need(hf, "num_hidden_layers")
    types = hf.get("layer_types") or [_LAYER_TYPES[bool(slides(i))] for i in range(count)]
    unknown = sorted(set(types) - set(_LAYER_TYPES))
    if unknown:
        raise ConfigError(f"layer_types {unknown} are not supported; known: {', '.join(_LAYER_TYPES)}")
    if len(types) != count:
        raise ConfigError(f"config.json has {len(types)} layer_types for {count} layers")
    return tuple(need(hf, "sliding_window") if kind == "sliding_attention" else None for kind in types)


def rope_parameters(hf: Hf) -> Hf:
    """The rotary options of all layers, whichever style they are written in."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def rope_spec(hf: Hf, parameters: Hf | None = None, *, partial: bool = False, interleaved: bool = False) -> RopeSpec:
    """Rotary embedding by `parameters`, if None those of the config.

    partial: the family can rotate a part of a head. interleaved: see `RopeSpec`.
    """
    options = rope_parameters(hf) if parameters is None else parameters
    if any(isinstance(value, Mapping) for value in options.values()):
        raise ConfigError("rope_parameters per layer type are not supported for this architecture")
    fraction = options.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if options.get("rope_type") == "proportional":
        fraction = 1.0  # a share of the frequencies; see `RopeScaling`
    if fraction != 1.0 and not partial:
        raise ConfigError(f"partial_rotary_factor={fraction} is not supported for this architecture")
    return RopeSpec(
        dim=int(head_dim(hf) * fraction),
        base=float(options.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        scaling=_rope_scaling(hf, options),
        interleaved=interleaved,
    )


def rope_specs(hf: Hf, sliding_theta: float, *, partial: bool = False) -> tuple[RopeSpec, RopeSpec]:
    """(full, sliding): for families whose layers with a window have their own rotary embedding. partial: see
    `rope_spec`.

    In older configs `rope_theta` and `rope_scaling` are those of the full layers; the others have the
    base `sliding_theta`, unscaled.
    """
    nested = hf.get("rope_parameters") or {}
    if not set(nested) <= set(_LAYER_TYPES):
        raise ConfigError(f"rope_parameters must have the keys {' and '.join(_LAYER_TYPES)}, not {sorted(nested)}")
    full = {**(nested.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
    sliding = {"rope_theta": sliding_theta, **(nested.get("sliding_attention") or {})}
    return rope_spec(hf, full, partial=partial), rope_spec(hf, sliding, partial=partial)


def _rope_scaling(hf: Hf, options: Hf) -> RopeScaling | None:
    kind = options.get("rope_type") or options.get("type") or "default"
    if kind == "default":
        return None
    if kind not in _ROPE_OPTIONS:
        raise ConfigError(f"rope type {kind!r} is not supported; known: default, {', '.join(_ROPE_OPTIONS)}")
    required, optional = _ROPE_OPTIONS[kind]
    missing = [key for key in required if options.get(key) is None]
    if missing:
        raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)} in config.json")
    fields = {key: options[key] for key in required + optional if options.get(key) is not None}
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    context = trained = need(hf, "max_position_embeddings")
    if kind != "dynamic":
        key = "original_max_position_embeddings"
        trained = hf.get(key) or options.get(key) or context
    return RopeScaling(kind, original_context=trained, **{"factor": context / trained, **fields})
