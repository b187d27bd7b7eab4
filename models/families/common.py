"""What the family recipes share: the `Family` record and builders over Hugging Face configs.

Both styles of rotary options are understood: `rope_parameters` (transformers 5) and the older
`rope_theta` with `rope_scaling`. An option that would change the result and is not supported raises
`ConfigError`; one that only adds or removes tensors is left to the loader, which names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from inferlib.models.config import (
    Activation,
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

# Our parts of a layer -> the checkpoint's modules under `model.layers.N.`; ".weight" and ".bias" are added by the
# loader. A part of a fused matrix (`attn.q`, `attn.k`, `attn.v`; `mlp.gate`, `mlp.up`) may instead come fused:
# `attn.qkv` holds q, k, v rows in this order, `mlp.gate_up` gate and up rows. Experts are tensors named in full, one
# for each expert ("{e}") or fused, and so is `mlp.router.correction`.
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
# Options beside those of config.json: how often a looped model's core runs, and whether tokens may leave it earlier.
LOOP_STEPS, EARLY_EXIT = "loop_steps", "early_exit"
TOP = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}
# Options that a configuration of several parts may have outside its `text_config`.
_OUTSIDE = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
# Prefixes of the names of tensors for images and sound.
_SENSES = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.")
_SENSES += ("audio_tower.", "embed_vision.", "embed_audio.")
# Options that must be numbers.
_WHOLE = re.compile(r"(num|n)_\w+|\w+_(size|dim|rank|heads|layers|experts|group|tok|embeddings|window)")
_FLAG = re.compile(r"tie_\w+|use_(bias|conv_bias|double_wide_mlp|expert_bias|qk_norm|sliding_window)")
_REAL = re.compile(r"(\w+_)?(eps|epsilon|theta|factor|multiplier)|beta_(fast|slow)|mscale(_all_dim)?")
_POSITIONS = re.compile(r"\w+_position_embeddings")
_MOST_SIZE, _MOST_VOCAB, _MOST_POSITIONS = 1 << 20, 1 << 24, (1 << 31) - 1
# The largest whole numbers of some options, many times those of any model; other sizes have _MOST_SIZE.
_BOUNDS = {
    re.compile(r"num(_hidden)?_layers|n_layers?"): 1024,
    re.compile(r"\w*experts"): 8192,
    re.compile(r"\w*(embeddings|vocab_size\w*|positions|ctx|window)|\w*(chunk|seq|context)\w*"): _MOST_POSITIONS,
}
_POSITION_SIZES = ("context", "original_context", "window", "chunk", "first", "bos_token_id")  # of a description
# Options that may be lists: of layer numbers, or of one number for each layer.
_LISTS = re.compile(r"(?!num_|n_)\w+_layers|\w+_per_layer|(short|long)_factor")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# The options that each kind of rotary scaling reads: required, optional.
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
    """How one tensor stores all experts: [E, out, in], or [E, in, out] if `transposed`. Gate and up are the halves of
    `out`, or alternate if `interleaved`."""

    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class MtpNames:
    """How checkpoints name a layer that predicts further tokens.

    prefix: the beginning of its tensors' names; {layers} is the number of the model's layers. layer: behind it, the
    beginning of those that every layer has. embedding_norm, hidden_norm, projection, norm: the modules of the others.
    normed: see `inferlib.models.mtp`.
    """

    prefix: str
    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    normed: bool = False


MTP_BEHIND_LAST = MtpNames("model.layers.{layers}.")


@dataclass(frozen=True)
class Family:
    """A recipe and a name map.

    recipe: Hugging Face config dictionary -> ModelConfig. defaults: values that transformers' configuration class
    assumes for keys that config.json lacks. layer: part of a layer -> checkpoint module below `prefix`; entries that a
    config does not use are ignored, and a module with "{layer}", our layer's number, is not below `prefix`. top:
    `embed`, `final_norm`, `head` -> checkpoint module. fused_experts: the layout of tensors that store all experts.
    fused: entries that replace those of `layer` where experts are fused, if checkpoints of both forms are published.
    computed: parts of layers that no checkpoint stores, as functions of a layer, its number and the number of layers.
    base: beginning of every tensor's name, absent in checkpoints of a model without its head. prefix: {i} is a layer's
    number; of a looped model, in its {stage}: "prelude", "core_block" or "coda". transposed: matrices of layers are
    stored [in, out]. sublayers: number of our layers that the checkpoint stores as one; {sub} in a module is a layer's
    number there. halves: the checkpoint stores a layer's mixer and its feed-forward as two layers. drafts: beginnings
    of the names of tensors for predicting several tokens at once, which are not read; {layers} is the number of layers.
    mtp: of a layer among these that can draft.
    senses: beginnings of the names of tensors of images and sound, which are not read; the loader says so. text_type:
    the `model_type` of the text part, if an architecture can have several. lists: options that are one number in other
    families, but here may be a list with one for each layer.
    """

    name: str
    architectures: tuple[str, ...]
    recipe: Callable[[Hf], ModelConfig]
    defaults: Hf
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    prefix: str = "model.layers.{i}."
    fused_experts: FusedExperts = FusedExperts()
    fused: Mapping[str, str] = field(default_factory=dict)
    drafts: tuple[str, ...] = ()
    mtp: MtpNames | None = None
    senses: tuple[str, ...] = ()
    text_type: str = ""
    computed: Mapping[str, Callable[[LayerSpec, int, int], tuple[float, ...]]] = field(default_factory=dict)
    base: str = ""
    transposed: bool = False
    sublayers: int = 1
    halves: bool = False
    lists: tuple[str, ...] = ()

    def config(self, hf: Hf) -> ModelConfig:
        """The model a `config.json` describes; raises ConfigError if it is not supported."""
        _check_numbers(hf, _FLAG, bool, "true or false")
        others = {k: v for k, v in hf.items() if not _FLAG.fullmatch(k)}
        _check_numbers(others, _WHOLE, int, "a whole number", self.lists)
        _check_numbers(hf, _REAL, (int, float), "a number")
        _check_sizes(others)
        try:
            config = self.recipe({**self.defaults, **hf})
        except ConfigError:
            raise
        # Recipes compute with what files say.
        except (TypeError, AttributeError, ArithmeticError, ValueError, LookupError) as error:
            raise ConfigError(f"config.json is not that of a {self.name} model: a wrong value ({error})") from error
        for layer in {config, *config.layers}:
            _must_be_bounded(layer)
        return config


def text_of(family: Family, architecture: str, *, whole: bool = False, text_type: str = "") -> Family:
    """The family of the text part of a model that also sees or hears; its other parts are not read.

    whole: the text part is a model with its head ("language_model.model.", "language_model.lm_head"), not a body alone
    ("model.language_model."). text_type: see `Family`.
    """

    def recipe(hf: Hf) -> ModelConfig:
        need(hf, "text_config")
        return family.config({**options_of(hf, "text_config"), **{k: hf[k] for k in _OUTSIDE if hf.get(k) is not None}})

    def within(name: str) -> str:
        return "language_model." + name if whole else name.replace("model.", "model.language_model.", 1)

    return replace(
        family,
        architectures=(architecture,),
        recipe=recipe,
        defaults={},
        top={part: within(module) for part, module in family.top.items()},
        prefix=within(family.prefix),
        senses=_SENSES if whole else tuple("model." + name for name in _SENSES),
        text_type=text_type,
    )


def _check_numbers(
    hf: Hf, names: re.Pattern[str], kinds: type | tuple[type, ...], what: str, lists: tuple[str, ...] = ()
) -> None:
    for key, value in hf.items():
        listed = isinstance(value, (list, tuple)) and (key in lists or _LISTS.fullmatch(key))
        values = value if listed else [value]
        if names.fullmatch(key) and not all(v is None or isinstance(v, kinds) for v in values):
            raise ConfigError(f"{key} in config.json must be {what}, it is {value!r}")


def _check_sizes(hf: Hf) -> None:
    """Raise ConfigError for counts and sizes that no model has, before a recipe counts them out."""
    for key, value in hf.items():
        most = next((most for names, most in _BOUNDS.items() if names.fullmatch(key)), _MOST_SIZE)
        if _WHOLE.fullmatch(key) and any(isinstance(v, int) and abs(v) > most for v in _flat(value)):
            raise ConfigError(f"{key} in config.json is beyond {most}, it is {str(value)[:40]}")


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _must_be_bounded(spec: Any) -> None:
    """Raise ConfigError if a size of a model, or of a layer's parts, cannot be the size of an array; products of three
    of them fit 64 bits."""
    for part in fields(spec):
        value = getattr(spec, part.name)
        most = _MOST_POSITIONS if part.name in _POSITION_SIZES else _MOST_VOCAB if part.name == "vocab" else _MOST_SIZE
        if is_dataclass(value):
            _must_be_bounded(value)
        elif isinstance(value, int) and not 0 <= value <= most:
            raise ConfigError(f"config.json gives a model {part.name} of {value}; it must be 0 to {most}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"config.json gives a model {part.name} of {value}")


def options_of(hf: Hf, key: str) -> Hf:
    """An object within the config; empty if it is absent."""
    value = hf.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} in config.json must be an object, it is {value!r}")
    return value


def need(hf: Hf, key: str) -> Any:
    if hf.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}")
    return hf[key]


def expect(hf: Hf, key: str, *supported: Any) -> None:
    """Raise ConfigError unless option `key` is absent, null or one of `supported`."""
    if hf.get(key) is not None and hf[key] not in supported:
        raise ConfigError(f"{key}={hf[key]!r} in config.json is not supported; supported: {list(supported)}")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` or `bos_token_id` as it appears in configs: nothing, one id or a list; negative ones stand for
    nothing."""
    ids = [token for token in _flat(value) if token is not None]
    if odd := [token for token in ids if type(token) is not int or token > _MOST_POSITIONS]:
        raise ConfigError(f"token ids in config.json must be whole numbers, one is {str(odd[0])[:40]!r}")
    return tuple(token for token in ids if token >= 0)


def activation(hf: Hf, key: str) -> Activation:
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
    """DeepSeek-V3's router."""
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
        bos_token_id=next(iter(token_ids(hf.get("bos_token_id"))), None),
        **options,
    )


def _stretched_context(layer: LayerSpec) -> int:
    """The context that dynamic and yarn scaling reach, else 0.

    With other kinds, `max_position_embeddings` is already the stretched context.
    """
    scaling = layer.attention.rope and layer.attention.rope.scaling
    if scaling is None or scaling.kind not in ("dynamic", "yarn"):
        return 0
    return int(scaling.factor * scaling.original_context)


def for_each_layer(hf: Hf, key: str, value: Any) -> Sequence[Any]:
    """The value of an option for each layer, if it may be a list or a single value for all layers."""
    count = need(hf, "num_hidden_layers")
    values = value if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ConfigError(f"config.json has {len(values)} {key} for {count} layers")
    return values


def rotates(hf: Hf) -> Sequence[Any]:
    """Whether each layer rotates: by `no_rope_layers`, which marks the layers that do, or by their interval."""
    layers = range(1, need(hf, "num_hidden_layers") + 1)
    marks = hf.get("no_rope_layers") or [i % hf["no_rope_layer_interval"] != 0 for i in layers]
    return for_each_layer(hf, "no_rope_layers", marks[: len(layers)])


def layer_types(hf: Hf, other: str, is_other: Callable[[int], bool]) -> Sequence[str]:
    """Each layer's kind, "full_attention" or `other`: by `layer_types`, or if they are absent by `is_other` (layer
    index -> bool)."""
    count, known = need(hf, "num_hidden_layers"), ("full_attention", other)
    types = hf.get("layer_types") or [known[bool(is_other(i))] for i in range(count)]
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ConfigError(f"layer_types {unknown} are not supported; known: {', '.join(known)}")
    return for_each_layer(hf, "layer_types", types)


def windows(hf: Hf, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types`, or if they are absent by `slides` (layer index -> bool)."""
    types = layer_types(hf, "sliding_attention", slides)
    return tuple(need(hf, "sliding_window") if kind == "sliding_attention" else None for kind in types)


def rope_parameters(hf: Hf) -> Hf:
    """The rotary options of all layers, in either style."""
    return options_of(hf, "rope_scaling") or options_of(hf, "rope_parameters")


def rope_spec(hf: Hf, parameters: Hf | None = None, *, partial: bool = False, interleaved: bool = False) -> RopeSpec:
    """The rotary embedding that `parameters` describe; None: the config's rotary options.

    partial: the family may rotate only a part of a head. interleaved: see `RopeSpec`.
    """
    options = rope_parameters(hf) if parameters is None else parameters
    _check_numbers(options, _POSITIONS, (int, float), "a number")
    _check_numbers(options, _REAL, (int, float), "a number")
    if any(isinstance(value, Mapping) for value in options.values()):
        raise ConfigError("rope_parameters per layer type are not supported for this architecture")
    fraction = options.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if options.get("rope_type") == "proportional":
        fraction = 1.0  # here it is a fraction of the frequencies; see `RopeScaling`
    if fraction != 1.0 and not partial:
        raise ConfigError(f"partial_rotary_factor={fraction} is not supported for this architecture")
    return RopeSpec(
        dim=int(head_dim(hf) * fraction),
        base=float(options.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        scaling=_rope_scaling(hf, options),
        interleaved=interleaved,
    )


def rope_specs(hf: Hf, sliding_theta: float, *, partial: bool = False) -> tuple[RopeSpec, RopeSpec]:
    """(full, sliding): for families whose layers with a window have another rotary embedding. partial: see `rope_spec`.

    In older configs `rope_theta` and `rope_scaling` apply to the full layers; layers with a window have the base
    `sliding_theta`, unscaled.
    """
    nested = options_of(hf, "rope_parameters")
    if not set(nested) <= set(_LAYER_TYPES):
        raise ConfigError(f"rope_parameters must have the keys {' and '.join(_LAYER_TYPES)}, not {sorted(nested)}")
    full = {**options_of(nested, "full_attention"), **options_of(hf, "rope_scaling")}
    sliding = {"rope_theta": sliding_theta, **options_of(nested, "sliding_attention")}
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
