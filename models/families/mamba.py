"""Hybrids of state-space layers (Mamba-2) and attention: Nemotron-H, Granite 4, Bamba."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from inferlib.models.config import ConfigError, LayerSpec, Mixer, MlpSpec, ModelConfig, MoeSpec, NormSpec, RouterSpec
from inferlib.models.families.common import (
    LAYER,
    MOE_LAYER,
    TOP,
    Family,
    Hf,
    activation,
    attention,
    expect,
    grouped_sigmoid_router,
    layer_types,
    mlp,
    model,
    need,
    rope_spec,
)
from inferlib.models.families.granite import DEFAULTS as GRANITE_DEFAULTS
from inferlib.models.families.granite import FUSED_LAYER, with_multipliers
from inferlib.models.mixers.mamba2 import Mamba2Spec
from inferlib.models.mixers.no_mixer import NoMixer

_ANY_STEP = (0.0, float("inf"))
# Older names of kinds of layers, and their letters in Nemotron-H's patterns.
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_KINDS |= {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _mamba(part: str) -> dict[str, str]:
    """The name map of a layer's state space, whose modules are below `part`."""
    names = {"in": "in_proj", "conv": "conv1d", "norm": "norm", "out": "out_proj"}
    names |= {"decay": "A_log", "dt_shift": "dt_bias", "skip": "D"}
    return {f"mamba.{ours}": f"{part}.{theirs}" for ours, theirs in names.items()}


def _named(kinds: Iterable[str]) -> list[str]:
    return [_KINDS.get(kind, kind) for kind in kinds]


def _limits(hf: Hf) -> tuple[float, float]:
    """transformers writes infinity as an object."""
    limits = [float(x["__float__"]) if isinstance(x, Mapping) else x for x in need(hf, "time_step_limit")]
    if len(limits) != 2:
        raise ConfigError(f"time_step_limit={limits} in config.json must be the least and the largest step")
    return limits[0], limits[1]


def _states(hf: Hf) -> Mamba2Spec:
    """The state space as configs of Bamba and later models describe it."""
    expect(hf, "mamba_proj_bias", False)
    expect(hf, "hidden_act", "silu")
    heads, size, inner = need(hf, "mamba_n_heads"), hf["mamba_d_head"], hf["mamba_expand"] * need(hf, "hidden_size")
    size = inner // heads if size == "auto" else size
    if heads * size != inner:
        raise ConfigError(f"{heads} state-space heads of {size} are not the {inner} numbers that mamba_expand says")
    return Mamba2Spec(
        heads=heads,
        kv_heads=need(hf, "mamba_n_groups"),
        head_dim=need(hf, "mamba_d_state"),
        value_dim=size,
        taps=need(hf, "mamba_d_conv"),
        eps=need(hf, "rms_norm_eps"),
        conv_bias=hf["mamba_conv_bias"],
        limits=_limits(hf),
    )


# ---- Nemotron-H

NEMOTRON_H_DEFAULTS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "time_step_limit": _ANY_STEP,
}

# Names in older configs -> today's names.
_NAMES = {
    "attention_head_dim": "head_dim",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
}


def nemotron_h(hf: Hf) -> ModelConfig:
    """Steps stay within `time_step_limit`, as in the published implementation; transformers 5 limits those of prompts
    to `time_step_min` at least, and those of decoding not at all."""
    hf = {_NAMES.get(key, key): value for key, value in hf.items()}
    for key in ("use_bias", "mamba_proj_bias", "attention_bias", "residual_in_fp32"):
        expect(hf, key, False)
    expect(hf, "mamba_hidden_act", "silu")
    expect(hf, "sliding_window")
    eps = need(hf, "layer_norm_epsilon")
    states = Mamba2Spec(
        heads=need(hf, "mamba_num_heads"),
        kv_heads=need(hf, "n_groups"),
        head_dim=need(hf, "ssm_state_size"),
        value_dim=need(hf, "mamba_head_dim"),
        taps=need(hf, "conv_kernel"),
        eps=eps,
        conv_bias=hf["use_conv_bias"],
        limits=_limits(hf),
    )
    mixers = {"linear_attention": states, "full_attention": attention(hf, None)}
    kinds, known = _named(hf.get("layers_block_type") or need(hf, "hybrid_override_pattern")), {*mixers, "mlp", "moe"}
    if unknown := sorted(set(kinds) - known):
        raise ConfigError(f"layers of kinds {unknown} are not supported; known: {', '.join(sorted(known))}")
    feeds = {"mlp": replace(mlp(hf, "mlp_hidden_act"), gated=False)}
    feeds |= {"moe": _nemotron_experts(hf)} if "moe" in kinds else {}
    return model(hf, "nemotron_h", _paired(kinds, mixers, feeds), NormSpec(eps=eps))


def _nemotron_experts(hf: Hf) -> MoeSpec:
    expect(hf, "moe_latent_size")
    expect(hf, "mlp_bias", False)
    act = activation(hf, "mlp_hidden_act")
    shared = MlpSpec(need(hf, "moe_shared_expert_intermediate_size"), act, gated=False)
    router, hidden = grouped_sigmoid_router(hf), need(hf, "moe_intermediate_size")
    return MoeSpec(router, hidden, act, gated=False, shared=shared)


def _paired(
    kinds: Sequence[str], mixers: Mapping[str, Mixer], feeds: Mapping[str, MlpSpec | MoeSpec]
) -> list[LayerSpec]:
    """Pair each mixer with the feed-forward that follows it, if there is one. Further feed-forwards are layers without
    a mixer."""
    layers = []
    for number, kind in enumerate(kinds):
        if kind in mixers:
            layers.append(LayerSpec(mixers[kind], None))
        elif number and kinds[number - 1] in mixers:
            layers[-1] = LayerSpec(layers[-1].attention, feeds[kind])
        else:
            layers.append(LayerSpec(NoMixer(), feeds[kind]))
    return layers


_NEMOTRON_LAYER = {
    part: module.replace("self_attn.", "mixer.").replace("mlp.", "mixer.") for part, module in MOE_LAYER.items()
}
_NEMOTRON_LAYER |= {"pre_attn_norm": "norm", "pre_mlp_norm": "norm"} | _mamba("mixer")
NEMOTRON_H = Family(
    "nemotron_h",
    ("NemotronHForCausalLM",),
    nemotron_h,
    NEMOTRON_H_DEFAULTS,
    _NEMOTRON_LAYER,
    {"embed": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"},
    "backbone.layers.{i}.",
    drafts=("mtp.",),
    halves=True,
)


# ---- Granite 4

_STATES = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "time_step_limit": _ANY_STEP,
}
GRANITE_HYBRID_DEFAULTS = GRANITE_DEFAULTS | _STATES | {"num_local_experts": 8, "num_experts_per_tok": 2}
GRANITE_HYBRID_DEFAULTS |= {"shared_intermediate_size": 1024, "position_embedding_type": None}


def granite_hybrid(hf: Hf) -> ModelConfig:
    expect(hf, "position_embedding_type", "rope", "nope")
    act, experts = activation(hf, "hidden_act"), hf["num_local_experts"]
    feed = MlpSpec(need(hf, "shared_intermediate_size"), act)
    if experts:
        router = RouterSpec(experts, need(hf, "num_experts_per_tok"), renormalize=True)
        feed = MoeSpec(router, need(hf, "intermediate_size"), act, shared=feed)
    rope = rope_spec(hf) if hf["position_embedding_type"] == "rope" else None
    mixers = {"linear_attention": _states(hf), "full_attention": attention(hf, rope, scale=hf["attention_multiplier"])}
    types = _named(hf.get("layer_types") or hf.get("layers_block_type") or ())
    kinds = layer_types({**hf, "layer_types": types}, "linear_attention", lambda i: True)
    return with_multipliers(hf, "granite_hybrid", [LayerSpec(mixers[kind], feed) for kind in kinds])


_GRANITE_DENSE = {"mlp.gate_up": "shared_mlp.input_linear", "mlp.down": "shared_mlp.output_linear"}
_GRANITE_SHARED = {part.replace("mlp.", "mlp.shared."): module for part, module in _GRANITE_DENSE.items()}
GRANITE_HYBRID = Family(
    "granite_hybrid",
    ("GraniteMoeHybridForCausalLM",),
    granite_hybrid,
    GRANITE_HYBRID_DEFAULTS,
    FUSED_LAYER | _GRANITE_DENSE | _GRANITE_SHARED | _mamba("mamba"),
)

# ---- Bamba

BAMBA_DEFAULTS = _STATES | {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bamba(hf: Hf) -> ModelConfig:
    mixers, chosen = (_states(hf), attention(hf, rope_spec(hf, partial=True))), hf.get("attn_layer_indices") or ()
    layers = (LayerSpec(mixers[i in chosen], mlp(hf)) for i in range(need(hf, "num_hidden_layers")))
    return model(hf, "bamba", layers)


_BAMBA_LAYER = {part: module.replace("mlp.", "feed_forward.") for part, module in LAYER.items()} | _mamba("mamba")
BAMBA = Family(
    "bamba",
    ("BambaForCausalLM",),
    bamba,
    BAMBA_DEFAULTS,
    _BAMBA_LAYER | {"pre_mlp_norm": "pre_ff_layernorm"},
    TOP | {"final_norm": "model.final_layernorm"},
)
