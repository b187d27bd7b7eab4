"""The complete, frozen description of a model.

A family recipe (`inferlib.models.families`) turns a Hugging Face `config.json` into a
`ModelConfig`; everything else (weights, cache, programs, budgets) derives from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


class ConfigError(ValueError):
    """A model configuration that is contradictory or not supported."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Fields not used by `kind` stay at their defaults. Names and meanings are those of
    Hugging Face's `rope_parameters`.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original_context: int = 0  # trained context, in tokens
    attention_factor: float | None = None  # multiplies cos and sin; None: the kind's default
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    alpha: float | None = None  # dynamic, HunYuan's form: base * alpha^(d / (d - 2)), at any length
    short_factor: tuple[float, ...] = ()  # longrope, [dim / 2]
    long_factor: tuple[float, ...] = ()  # longrope, [dim / 2]

    def __post_init__(self):
        if self.kind == "longrope":
            _require(
                len(self.short_factor) == len(self.long_factor) > 0,
                "longrope needs short_factor and long_factor of equal length",
            )
        if self.kind in ("llama3", "yarn", "longrope"):
            _require(
                self.original_context > 0,
                f"rope scaling {self.kind!r} needs original_max_position_embeddings",
            )


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` of a head's dimensions."""

    dim: int
    base: float
    scaling: RopeScaling | None = None
    # The checkpoint pairs dimensions (2i, 2i+1) instead of (i, i + dim/2). Undone at load by a
    # permutation of the query and key rows, so that programs know one form only.
    interleaved: bool = False

    def __post_init__(self):
        _require(self.dim > 0 and self.dim % 2 == 0, f"rotary dimension must be even and positive, got {self.dim}")
        if self.scaling is not None and self.scaling.kind == "longrope":
            size = len(self.scaling.short_factor)
            _require(size == self.dim // 2, f"longrope has {size} factors for {self.dim // 2} frequencies")


@dataclass(frozen=True)
class QueryTemperature:
    """Queries are scaled by 1 + beta * log(1 + floor(position / context)) (Llama 4, Ministral 3)."""

    beta: float
    context: int


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention (GQA): `heads` query heads share `kv_heads` key/value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q . k
    rope: RopeSpec | None  # None: no positional embedding (NoPE)
    window: int | None = None  # a query sees itself and the window - 1 positions before it
    softcap: float | None = None  # logits -> softcap * tanh(logits / softcap)
    qk_norm: Literal["head", "full"] | None = None  # RMS norm over a head, or over all heads together
    qk_norm_after_rope: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    temperature: QueryTemperature | None = None

    def __post_init__(self):
        _require(
            self.kv_heads > 0 and self.heads % self.kv_heads == 0,
            f"{self.heads} query heads do not divide into {self.kv_heads} KV heads",
        )
        _require(self.window is None or self.window > 0, f"window must be positive, got {self.window}")
        _require(self.rope is None or self.rope.dim <= self.head_dim, "rotary dimension exceeds the head size")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within +-limit (gpt-oss)."""

    alpha: float
    limit: float


Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class MlpSpec:
    """Dense feed-forward: down(act(gate(x)) * up(x))."""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False

    @property
    def output_bias(self) -> bool:
        """Whether a bias is added to the sum over devices."""
        return self.bias


@dataclass(frozen=True)
class RouterSpec:
    """Which `chosen` of `experts` a token goes to, and with which weights.

    Every expert has a score; the best are chosen, and their scores are the weights. A softmax over the chosen logits
    alone is the score "softmax" with `renormalize`. "sparsemixer" (Liu et al. 2023, Phi-3.5-MoE) chooses two, one after
    the other, each with a softmax over the logits that are within 2 * jitter of its own, relative to the larger.
    """

    experts: int
    chosen: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False  # weights sum to 1 before `scale`
    scale: float = 1.0
    bias: bool = False  # of the logits
    correction: bool = False  # a learned bias joins the scores for choosing, and not the weights (DeepSeek-V3)
    # Only the experts of the best `chosen_groups` of `groups` can be chosen, groups compared by their best expert or by
    # the sum of their best two.
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    jitter: float = 0.0

    def __post_init__(self):
        _require(
            0 < self.chosen <= self.experts, f"a token cannot go to {self.chosen} experts when there are {self.experts}"
        )
        _require(
            self.experts % self.groups == 0, f"{self.experts} experts do not divide into {self.groups} groups of equals"
        )
        reach = self.experts // self.groups * self.chosen_groups
        _require(
            self.chosen_groups <= self.groups and self.chosen <= reach,
            f"{self.chosen_groups} of {self.groups} groups have no {self.chosen} experts to choose",
        )
        alone = not (self.renormalize or self.correction) and self.groups == 1
        _require(
            self.score != "sparsemixer" or (self.chosen == 2 and alone),
            "sparsemixer chooses two experts, without groups, correction or renormalisation",
        )


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: the chosen experts' feed-forwards, weighted and summed, and shared ones that all tokens take.

    hidden: of one expert. Dropless: every token reaches all experts that its router chose.
    """

    router: RouterSpec
    hidden: int
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False  # of each expert
    shared: MlpSpec | None = None
    shared_gate: bool = False  # the shared experts are weighted by the sigmoid of a learned projection (Qwen2-MoE)
    scale_input: bool = False  # weights multiply what goes into the experts, not what comes out (Llama 4)
    identity: int = 0  # the last experts of the router return their input (LongCat's zero experts)

    def __post_init__(self):
        _require(0 <= self.identity < self.router.experts, f"{self.identity} of all experts cannot be the identity")
        _require(not self.shared_gate or self.shared is not None, "a gate needs shared experts")
        _require(
            not (self.shared_gate and self.shared.bias),
            "gated shared experts with biases are not supported",
        )

    @property
    def experts(self) -> int:
        """Those that have weights."""
        return self.router.experts - self.identity

    @property
    def output_bias(self) -> bool:
        """Whether a bias is added to the sum over devices."""
        return self.shared is not None and self.shared.bias

    def read_share(self, tokens: int) -> float:
        """Of the experts, those that any of `tokens` tokens chose, expected where all are equally likely: each is
        passed over with probability (1 - chosen / experts)^tokens."""
        return 1.0 - (1.0 - self.router.chosen / self.router.experts) ** tokens


@dataclass(frozen=True)
class NormSpec:
    kind: Literal["rms", "layer"] = "rms"  # layer: the mean is removed first
    eps: float = 1e-6
    bias: bool = False
    unit_offset: bool = False  # multiply by (1 + weight), as Gemma stores it


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: x + post(attention(pre(x))), then x + post(mlp(pre(x)))."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False  # attention and MLP read the same pre-normed input (Cohere)


@dataclass(frozen=True)
class ModelConfig:
    """Global sizes plus one `LayerSpec` per layer.

    dim: model width; vocab: rows of the embedding; context: longest sequence the model was made
    for, in tokens.
    """

    family: str
    vocab: int
    dim: int
    layers: tuple[LayerSpec, ...]
    context: int
    norm: NormSpec = field(default_factory=NormSpec)
    tied: bool = False  # the output projection is the embedding
    head_bias: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies each branch before it is added (Granite)
    logit_scale: float = 1.0
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        _require(len(self.layers) > 0, "a model needs at least one layer")
        _require(self.vocab > 0 and self.dim > 0 and self.context > 0, "vocab, dim and context must be positive")
