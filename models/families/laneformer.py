"""Laneformer: a Llama in lanes (delayed tensor parallelism, Kog AI 2026)."""

from __future__ import annotations

from inferlib.models.config import ConfigError, LaneSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec
from inferlib.models.families.common import Family, Hf, attention, expect, model, need, rope_spec

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 4 * 4096,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "num_lanes": 1,
    "broadcast_delay": 1,
    "use_comm": True,
    "use_early_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "sliding_window_n_layers": 0,
}
# Of lanes: [lanes, outputs of a lane, inputs], of the last matrix of a branch [lanes, outputs, inputs of a lane].
LAYER = {
    "attn.q": "attention.wq",
    "attn.k": "attention.wk",
    "attn.v": "attention.wv",
    "attn.o": "attention.wo",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "pre_attn_norm": "attention_norm",
    "pre_mlp_norm": "ffn_norm",
}
TOP = {"embed": "model.tok_embeddings", "final_norm": "model.norm", "head": "lm_head"}
_FLAGS = ("use_comm", "use_early_comm", "pre_norm_lane_agg", "replicated_rmsn_scale")


def lane_spec(hf: Hf) -> LaneSpec:
    """The lanes, by the published names of options."""
    for name in _FLAGS:
        expect(hf, name, True, False)
    expect(hf, "lm_head_type", "replicate", "lane", "vocab_parallel")
    return LaneSpec(
        need(hf, "num_lanes"),
        need(hf, "broadcast_delay"),
        comm=need(hf, "use_comm"),
        early_comm=need(hf, "use_early_comm"),
        head=need(hf, "lm_head_type"),
        sum_before_norm=need(hf, "pre_norm_lane_agg"),
        lane_norms=not need(hf, "replicated_rmsn_scale"),
    )


def slides(hf: Hf, layer: int) -> bool:
    """Whether a layer has a window: the first `sliding_window_n_layers`, or if it is negative the last ones, but for
    `unclamped_layers`."""
    count, layers = need(hf, "sliding_window_n_layers"), need(hf, "num_hidden_layers")
    return (layer < count or layer >= layers + count) and layer not in (hf.get("unclamped_layers") or ())


def laneformer(hf: Hf) -> ModelConfig:
    expect(hf, "attn_mask_type", "causal")
    lanes, count = lane_spec(hf), need(hf, "num_hidden_layers")
    rope, mlp = rope_spec(hf, interleaved=True), MlpSpec(need(hf, "intermediate_size"))

    def layer(i: int) -> LayerSpec:
        window = need(hf, "sliding_window") if slides(hf, i) else None
        return LayerSpec(attention(hf, rope, window), mlp, exchange=lanes.exchange(i, count))

    norm = NormSpec(eps=need(hf, "norm_eps"))
    return model(hf, "laneformer", map(layer, range(count)), norm, lanes=lanes)


def must_sum_at_once(hf: Hf, family: str) -> None:
    """Raise ConfigError if the layers of a checkpoint were trained to exchange sums as lanes do, and its family is one
    whose layers sum at once."""
    if (hf.get("num_lanes") or 1) != 1:
        raise ConfigError(
            f"config.json of a {family} model has num_lanes={hf['num_lanes']}: its weights were trained with another "
            f"exchange between devices, so set architectures to {list(LANEFORMER.architectures)}"
        )


LANEFORMER = Family("laneformer", ("LaneformerTPForCausalLM",), laneformer, DEFAULTS, LAYER, top=TOP)
