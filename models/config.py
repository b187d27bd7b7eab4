"""The complete, frozen description of a model.

A family's recipe (`inferlib.models.families`) turns a Hugging Face `config.json` into a `ModelConfig`. Weights, cache,
programs and budgets derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, comb
from typing import ClassVar, Literal

from inferlib.models.heads import HeadLayout, grouped_heads, separate_heads
from inferlib.models.recurrent import Recurrent, is_absent


class ConfigError(ValueError):
    """A model configuration that is contradictory or not supported."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Fields not used by `kind` stay at their defaults. Names and meanings are those of Hugging Face's `rope_parameters`.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
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
    partial_rotary_factor: float = 1.0  # proportional: the fraction of frequencies, the highest, that rotate at all
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
    # The checkpoint pairs dimensions (2i, 2i+1) instead of (i, i + dim/2). Loading permutes the rows of queries and
    # keys, so that programs know only one form.
    interleaved: bool = False

    def __post_init__(self):
        _require(self.dim > 0 and self.dim % 2 == 0, f"rotary dimension must be even and positive, got {self.dim}")
        if self.scaling is not None and self.scaling.kind == "longrope":
            size = len(self.scaling.short_factor)
            _require(size == self.dim // 2, f"longrope has {size} factors for {self.dim // 2} frequencies")


@dataclass(frozen=True)
class QueryTemperature:
    """Queries are scaled by 1 + beta * log(1 + floor((position + first) / context)) (Llama 4, Ministral 3)."""

    beta: float
    context: int
    first: int = 0  # the number of the first position


@dataclass(frozen=True)
class OutputGate:
    """A gate on attention's output: an activation of a projection of the layer's input, with one number for each query
    head or for each of its channels."""

    activation: Literal["sigmoid", "softplus"]
    per_head: bool


@dataclass(frozen=True)
class ValueEmbedding:
    """A learned vector of the token's id is added to its value, from a table of `vocab` rows. The first `channels`
    numbers of the layer's input gate it for each KV head, between 0 and 2 (Parcae)."""

    vocab: int
    channels: int


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
    # RMS norm over each head, over all heads together, or over each head without a learned weight.
    qk_norm: Literal["head", "full", "unit"] | None = None
    qk_norm_after_rope: bool = False
    qk_norm_eps: float | None = None  # None: that of the model's norms
    qkv_bias: bool = False
    o_bias: bool = False
    temperature: QueryTemperature | None = None
    value_dim: int = 0  # size of value heads; 0: as large as keys
    value_scale: float = 1.0  # multiplies values
    key_is_value: bool = False  # values are the projected keys, before norm and rotation (Gemma 4)
    value_norm: bool = False  # RMS norm over each value head, without a learned weight
    sinks: bool = False  # a learned logit per query head joins the softmax's denominator (gpt-oss)
    chunk: int | None = None  # positions are cut into runs of `chunk`; a query sees its run only (Llama 4)
    cache_of: int | None = None  # this layer has no keys and values, and attends to those of that layer (Gemma 3n)
    gate: OutputGate | None = None
    value_embedding: ValueEmbedding | None = None
    key_basis: int = 0  # leading directions of keys by which pages are selected, see `inferlib.models.key_bases`
    key_turns: bool = False  # keys and queries are turned for a cache of few bits, see `inferlib.models.key_turns`
    cache_level: int = 0  # which budget of a bounded cache is this layer's, see `inferlib.models.cache_levels`

    def __post_init__(self):
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        _require(
            self.kv_heads > 0 and self.heads % self.kv_heads == 0,
            f"{self.heads} query heads do not divide into {self.kv_heads} KV heads",
        )
        _require(not self.key_is_value or self.value_dim == self.head_dim, "keys that are values have their size")
        for name in ("window", "chunk"):
            _require((size := getattr(self, name)) is None or size > 0, f"{name} must be positive, got {size}")
        _require(self.window is None or self.chunk is None, "a layer has a window or chunks, not both")
        _require(self.rope is None or self.rope.dim <= self.head_dim, "rotary dimension exceeds the head size")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def fused_heads(self) -> int:
        """How many heads the matrix of a KV head makes beside its queries: the key, and the value if it has the key's
        size."""
        if self.cache_of is not None:
            return 0
        return 2 if self.value_dim == self.head_dim and not self.key_is_value else 1

    @property
    def separate_values(self) -> bool:
        """True if values have a separate matrix."""
        return self.fused_heads == 1 and not self.key_is_value

    @property
    def reach(self) -> int | None:
        """The most positions that a query sees; None if it sees all positions up to its own."""
        return self.window or self.chunk

    @property
    def cache_heads(self) -> int:
        return self.kv_heads

    @property
    def cache_sizes(self) -> tuple[int, ...]:
        """The numbers that each array of the cache has for a position and cache head: a key, a value."""
        return self.head_dim, self.value_dim

    def pair_width(self, decode: bool) -> int:
        """Multiplications for each query head and each key that it sees."""
        return self.head_dim + self.value_dim

    def head_layout(self, shards: int) -> HeadLayout:
        """The heads as `shards` devices store them."""
        return grouped_heads(self.heads, self.kv_heads, shards)

    def cache_heads_in(self, layout: HeadLayout) -> int:
        """Heads of the cache, as laid out."""
        return layout.groups


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (MLA, DeepSeek-AI 2024: "DeepSeek-V2"): the keys and values of all heads are
    projections of one latent per token, and all heads share one rotary key.

    q_rank: size of the latent that queries are projected from; None if they are projected from the layer's input.
    kv_rank: size of the latent of keys and values. nope_dim, rope.dim: sizes of the parts of a query or key head
    without and with positions. eps: belongs to the RMS norms of the latents. latent_bias: the projections to latents
    and rotary key have biases.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float  # multiplies q . k
    eps: float = 1e-6
    latent_scale: float = 1.0  # multiplies the keys' and values' latent (LongCat)
    latent_bias: bool = False
    o_bias: bool = False
    temperature: QueryTemperature | None = None
    rotates: bool = True  # False: queries and keys have no positions (Kimi Linear)

    reach: ClassVar[None] = None
    cache_of: ClassVar[None] = None
    cache_heads: ClassVar[int] = 1
    group: ClassVar[int] = 1  # expanded, every head has its own key and value

    def __post_init__(self):
        for name in ("heads", "kv_rank", "nope_dim", "value_dim"):
            _require(getattr(self, name) > 0, f"latent attention needs a positive {name}, got {getattr(self, name)}")
        _require(self.q_rank is None or self.q_rank > 0, f"q_rank must be positive or None, got {self.q_rank}")

    @property
    def head_dim(self) -> int:
        """Size of a query head or an expanded key head."""
        return self.nope_dim + self.rope.dim

    @property
    def latent_dim(self) -> int:
        """Size of a token's projection: the queries' latent, the keys' and values' latent, the rotary key."""
        return (self.q_rank or 0) + self.kv_rank + self.rope.dim

    @property
    def cache_sizes(self) -> tuple[int, ...]:
        """The numbers that each array of the cache has for a position: a latent, a rotary key."""
        return self.kv_rank, self.rope.dim

    def pair_width(self, decode: bool) -> int:
        """Multiplications for each query head and each key that it sees: decoding works on latents, prefill on expanded
        keys and values."""
        return 2 * self.kv_rank + self.rope.dim if decode else self.head_dim + self.value_dim

    def head_layout(self, shards: int) -> HeadLayout:
        """The heads as `shards` devices store them, each with its expanded key and value."""
        return separate_heads(self.heads, shards)

    def cache_heads_in(self, layout: HeadLayout) -> int:
        """The cache has one head; every device stores it if heads are split."""
        return 1


Mixer = AttentionSpec | MlaSpec | Recurrent  # what mixes a layer's tokens


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within +-limit (gpt-oss)."""

    alpha: float
    limit: float


Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]


@dataclass(frozen=True)
class MlpSpec:
    """Dense feed-forward: down(act(gate(x)) * up(x)), or without a gate down(act(up(x)))."""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    # The gate is lowered by the quantile `sparsity` of a normal distribution with the token's mean and variance, then
    # cut off at 0 (Gemma 3n).
    sparsity: float = 0.0

    def __post_init__(self):
        _require(0 <= self.sparsity < 1, f"sparsity must be at least 0 and below 1, got {self.sparsity}")
        _require(self.gated or not self.sparsity, "only a gate can be sparse")

    @property
    def output_bias(self) -> bool:
        """Whether a bias is added to the sum over devices."""
        return self.bias


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses `chosen` of `experts` experts, and their weights.

    Every expert has a score. The experts with the highest scores are chosen, and their scores are the weights. A
    softmax over the chosen logits alone is the score "softmax" with `renormalize`. "sparsemixer" (Liu et al. 2023,
    Phi-3.5-MoE) chooses two experts, one after the other; the weight of each comes from a softmax over the logits
    within 2 * jitter of its logit, relative to the larger.
    """

    experts: int
    chosen: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False  # weights sum to 1 before `scale`
    scale: float = 1.0
    bias: bool = False  # of the logits
    correction: bool = False  # a learned bias is added to scores for choosing, but not to weights (DeepSeek-V3)
    # Only experts of the best `chosen_groups` of `groups` can be chosen; groups are compared by their best expert or by
    # the sum of their best two.
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    jitter: float = 0.0
    softcap: float | None = None  # logits -> softcap * tanh(logits / softcap)
    # The router norms its input with this eps and divides it by the root of the width (Gemma 4); None: no norm.
    norm_eps: float | None = None
    expert_scale: bool = False  # a learned number for each expert multiplies its weights

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
    """Mixture of experts: the weighted sum of the chosen experts' feed-forwards, and shared experts for all tokens.

    hidden: width of one expert. Dropless: every token reaches all experts that its router chose.
    """

    router: RouterSpec
    hidden: int
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False  # of each expert
    gated: bool = True  # see `MlpSpec`
    shared: MlpSpec | None = None
    shared_gate: bool = False  # the shared experts are weighted by the sigmoid of a learned projection (Qwen2-MoE)
    scale_input: bool = False  # weights multiply the experts' input, not their output (Llama 4)
    identity: int = 0  # this many experts, the router's last, return their input (LongCat's zero experts)
    # The sum of the chosen experts is added with the next layer's feed-forward, so that its exchange of tokens can
    # overlap attention; the shared experts are added here (LongCat's shortcut).
    deferred: bool = False
    # Chosen and shared experts have separate norms before and after them; the chosen experts and the router read the
    # residual (Gemma 4).
    separate_norms: bool = False

    def __post_init__(self):
        _require(0 <= self.identity < self.router.experts, f"{self.identity} of all experts cannot be the identity")

        _require(self.gated or isinstance(self.activation, str), "a clamped SwiGLU needs a gate")
        _require(not self.deferred or self.shared is not None, "experts that are deferred need shared ones beside them")
        if self.shared_gate:
            _require(self.shared is not None, "a gate needs shared experts")
            _require(not (self.shared and self.shared.bias), "gated shared experts with biases are not supported")
        _require(
            not self.separate_norms or (self.shared is not None and not self.deferred),
            "experts with norms of their own need shared ones, and cannot be deferred",
        )

    @property
    def experts(self) -> int:
        """Experts that have weights."""
        return self.router.experts - self.identity

    @property
    def output_bias(self) -> bool:
        """Whether a bias is added to the sum over devices."""
        return self.shared is not None and self.shared.bias

    def read_share(self, tokens: float) -> float:
        """The expected fraction of experts that at least one of `tokens` tokens chooses, if all are equally likely: a
        token passes over an expert with probability 1 - chosen / experts."""
        return 1.0 - (1.0 - self.router.chosen / self.router.experts) ** tokens

    def device_share(self, devices: int) -> float:
        """The expected fraction of devices that have an expert of one token's choice, if the experts are equally likely
        and split equally over `devices` devices."""
        every, chosen = self.router.experts, self.router.chosen
        return 1.0 - comb(every - ceil(self.experts / devices), chosen) / comb(every, chosen)

    def most_choices(self, tokens: float, devices: int) -> float:
        """How many experts a token chooses on one device: the expected maximum over `tokens` tokens, if the experts are
        equally likely and split over `devices` devices."""
        chosen, p = self.router.chosen, 1.0 / devices
        shares = [comb(chosen, n) * p**n * (1.0 - p) ** (chosen - n) for n in range(chosen)]
        return sum(1.0 - min(share, 1.0) ** tokens for share in accumulate(shares))


@dataclass(frozen=True)
class NormSpec:
    kind: Literal["rms", "layer"] = "rms"  # layer: the mean is removed first
    eps: float = 1e-6
    bias: bool = False
    unit_offset: bool = False  # multiply by (1 + weight), as Gemma stores it


@dataclass(frozen=True)
class NormedResidual:
    """The norm that a branch reads is also the residual (MiniMax-Text-01): keep * norm(x) + scale * branch(norm(x)).
    Each field is a branch's (keep, scale)."""

    attention: tuple[float, float]
    mlp: tuple[float, float]


@dataclass(frozen=True)
class LaneExchange:
    """What the lanes of a layer tell each other (see `LaneSpec`).

    adds: what a branch adds to the residual of a lane beside its own sum: those of the other lanes in this layer
    ("now"), those of the layer `delay` before it ("late"), or nothing ("none"), and then its own is scaled by the root
    of the number of lanes. sends: a later layer adds the sums of this one.
    """

    adds: Literal["now", "late", "none"]
    sends: bool


@dataclass(frozen=True)
class LaneSpec:
    """Lanes (delayed tensor parallelism, Kog AI 2026: "Laneformer"): `lanes` residuals as wide as the model, each with
    its run of every layer's heads and feed-forward. The sums of the other lanes arrive `delay` layers late.

    comm: they do arrive. early_comm: the first `delay` layers, for which nothing has arrived, add the sums of all lanes
    at once, as tensor parallelism does. head: how logits are made of the lanes: of the mean of their norms
    ("replicate"), of all of them in turn ("lane"), or each lane makes those of its part of the vocabulary
    ("vocab_parallel"). sum_before_norm: instead, of the norm of their sum. lane_norms: each lane has weights of norms.
    """

    lanes: int
    delay: int
    comm: bool = True
    early_comm: bool = True
    head: Literal["replicate", "lane", "vocab_parallel"] = "replicate"
    sum_before_norm: bool = False
    lane_norms: bool = False

    def __post_init__(self):
        _require(self.lanes > 0, f"a model needs at least one lane, got num_lanes={self.lanes}")
        _require(self.delay > 0, f"sums arrive at least one layer late, got broadcast_delay={self.delay}")
        _require(
            not self.sum_before_norm or self.head == "replicate",
            f"pre_norm_lane_agg leaves one state for all lanes, which lm_head_type={self.head!r} does not take: it "
            "goes with 'replicate'",
        )

    def exchange(self, layer: int, layers: int) -> LaneExchange:
        """What layer `layer` of a model of `layers` layers exchanges."""
        early = layer < self.delay
        adds = ("now" if self.early_comm else "none") if early else "late" if self.comm else "none"
        return LaneExchange(adds, sends=self.comm and layer + self.delay < layers)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: x + post(attention(pre(x))), then x + post(mlp(pre(x))) if there is a feed-forward."""

    attention: Mixer
    mlp: MlpSpec | MoeSpec | None
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False  # attention and MLP read the same pre-normed input (Cohere)
    scaled: bool = False  # a learned number multiplies the layer's output (Gemma 4)
    normed: NormedResidual | None = None
    laurel: int = 0  # rank of a learned residual beside attention's (LAuReL, Menghani et al. 2024); 0: none
    norms_sums: bool = False  # post norms take the sum of branch and residual, and make the next residual (Huginn)
    exchange: LaneExchange | None = None  # of a model with lanes

    def __post_init__(self):
        apart = self.laurel or (isinstance(self.mlp, MoeSpec) and self.mlp.separate_norms)
        _require(not (apart and self.parallel), "parallel branches have neither LAuReL nor experts with norms")
        beside = apart or self.parallel or self.post_norm or not self.pre_norm
        _require(not (self.normed and beside), "a normed residual needs norms before the branches and nothing else")
        _require(not (apart and not self.pre_norm), "LAuReL and experts with norms need norms before the branches")
        both = self.pre_norm and self.post_norm and not (apart or self.parallel or self.scaled)
        _require(not self.norms_sums or both, "norms of sums need norms before and after each branch and nothing else")
        two = self.parallel or self.post_norm or self.laurel
        simple = self.mlp is not None and self.pre_norm and not (two or apart or self.normed or self.scaled)
        _require(
            simple or not is_absent(self.attention),
            "a layer without a mixer has a feed-forward, a norm before it and nothing else",
        )
        _require(
            self.mlp is not None or (self.pre_norm and not two),
            "a layer without a feed-forward has a norm before its attention, and neither others nor parallel branches",
        )


@dataclass(frozen=True)
class PerLayerSpec:
    """Per-layer embeddings (Gemma 3n): a token has `dim` numbers for every layer, from a table and from a projection of
    its embedding. They gate an addition to the residual at the layer's end.

    vocab: rows of the table; tokens beyond them take the first row.
    """

    dim: int
    vocab: int
    activation: Activation

    def __post_init__(self):
        _require(self.dim > 0 and self.vocab > 0, "per-layer embeddings need a positive size and vocabulary")


MOST_LOOP_STEPS = 256


@dataclass(frozen=True)
class LoopSpec:
    """Layers `start` to `stop`, the core, run `steps` times; those before them are the prelude, those after them the
    coda (Geiping et al. 2025, "Scaling up Test-Time Compute with Latent Reasoning").

    The prelude's output e [T, D], normed if `entry_norm`, is injected into the state h [T, D] before each step:
    "diagonal": exp(-d exp(A)) h + d (B e) with d = softplus(b), for vectors A, b (Prairie et al. 2026, "Parcae");
    "linear": W [h, e]; "add": h + e. state_norm: what the core makes of that is normed, and is the next state. After
    the last step, a matrix ("linear") or the model's final norm ("final_norm") makes the coda's input of h. state_std:
    standard deviation of the first state's numbers; 0: it is zero. early_exit: by which rule tokens may leave the core
    before its last step, see `inferlib.models.exit_rules`; None: they do not.

    The weights of the core are stored once. Its layers have keys and values of each step.
    """

    start: int
    stop: int
    steps: int
    injection: Literal["diagonal", "linear", "add"]
    exit: Literal["linear", "final_norm"]
    entry_norm: bool = False
    state_norm: bool = False
    state_std: float = 0.0
    early_exit: Literal["change", "kl"] | None = None

    def __post_init__(self):
        _require(
            1 <= self.steps <= MOST_LOOP_STEPS,
            f"a model's core can run 1 to {MOST_LOOP_STEPS} times, not {self.steps}: give loop_steps, or "
            "mean_recurrence in config.json, within that",
        )
        _require(self.state_std >= 0, f"state_std must not be negative, got {self.state_std}")

    def stage(self, layer: int) -> tuple[Literal["prelude", "core_block", "coda"], int]:
        """The part that a layer belongs to, and the layer's number in it."""
        if layer < self.start:
            return "prelude", layer
        return ("core_block", layer - self.start) if layer < self.stop else ("coda", layer - self.stop)


@dataclass(frozen=True)
class ModelConfig:
    """Global sizes plus one `LayerSpec` per layer.

    dim: model width; vocab: rows of the embedding; context: longest sequence the model was made for, in tokens.
    """

    family: str
    vocab: int
    dim: int
    layers: tuple[LayerSpec, ...]
    context: int
    norm: NormSpec = field(default_factory=NormSpec)
    tied: bool = False  # the output projection is the embedding
    head_bias: bool = False
    learned_positions: bool = False  # a table of `context` rows, added to the embedding (GPT-2)
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies each branch before it is added (Granite)
    logit_scale: float = 1.0
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    per_layer: PerLayerSpec | None = None
    streams: int = 1  # parallel residuals, of which layers compute on the first (AltUp, Baykal et al. 2023)
    loop: LoopSpec | None = None
    lanes: LaneSpec | None = None
    layer_preferences: tuple[float, ...] = ()  # of bounded caches, see `inferlib.models.layer_preferences`

    def __post_init__(self):
        _require(len(self.layers) > 0, "a model needs at least one layer")
        _require(self.streams > 0, f"a model needs at least one residual, got {self.streams}")
        _require(self.streams == 1 or self.per_layer is not None, "AltUp is supported with per-layer embeddings only")
        _require(
            self.per_layer is None or self.per_layer.vocab <= self.vocab, "a per-layer table exceeds the vocabulary"
        )
        self._require_caches()
        self._require_core()
        self._require_lanes()
        for layer, after in zip(self.layers, (*self.layers[1:], None), strict=True):
            deferred = isinstance(layer.mlp, MoeSpec) and layer.mlp.deferred
            _require(
                not deferred or (after is not None and after.mlp is not None),
                "experts can be deferred to the next layer's feed-forward only",
            )
        _require(self.vocab > 0 and self.dim > 0 and self.context > 0, "vocab, dim and context must be positive")

    def runs(self, layer: int) -> int:
        """How often a step runs a layer."""
        return self.loop.steps if self.loop is not None and self.loop.start <= layer < self.loop.stop else 1

    @property
    def depth(self) -> int:
        """How many layers a token passes through."""
        return sum(map(self.runs, range(len(self.layers))))

    @property
    def exits_early(self) -> bool:
        """Whether tokens may leave a loop's core before its last step."""
        return self.loop is not None and bool(self.loop.early_exit) and self.loop.steps > 1

    @property
    def mixtures(self) -> tuple[MoeSpec, ...]:
        """The mixtures of all layers that have one, in order."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeSpec))

    def _require_caches(self) -> None:
        """Layers that share a cache must follow all layers that own one, and must attend as its owner does."""
        owners = [layer.attention.cache_of is None for layer in self.layers]
        _require(owners == sorted(owners, reverse=True), "layers that share others' caches must be the last ones")
        for i, layer in enumerate(self.layers):
            spec = layer.attention
            if spec.cache_of is None:
                continue
            owner = self.layers[spec.cache_of].attention if 0 <= spec.cache_of < owners.count(True) else None
            ok = isinstance(owner, AttentionSpec)
            _require(ok, f"layer {i} shares the cache of layer {spec.cache_of}, which has none of keys and values")
            for name in ("kv_heads", "head_dim", "value_dim", "window", "chunk"):
                ours, theirs = getattr(spec, name), getattr(owner, name)
                _require(
                    ours == theirs,
                    f"layer {i} shares the cache of layer {spec.cache_of} and has {name}={ours} instead of {theirs}",
                )

    def _require_core(self) -> None:
        """The layers that a loop repeats must have keys and values and a dense feed-forward, with a single residual."""
        loop, several = self.loop, self.streams > 1 or self.per_layer is not None
        if loop is None:
            return
        _require(
            0 < loop.start < loop.stop < len(self.layers),
            f"a loop over layers {loop.start} to {loop.stop} of {len(self.layers)} leaves no prelude, core or coda",
        )
        _require(not several, "a loop needs a single residual without per-layer embeddings")
        for layer in self.layers[loop.start : loop.stop]:
            cached = isinstance(layer.attention, AttentionSpec) and layer.attention.cache_of is None
            _require(
                cached and isinstance(layer.mlp, MlpSpec),
                "a loop repeats layers of attention with keys and values of their own and a dense feed-forward",
            )

    def _require_lanes(self) -> None:
        """Lanes have equal parts of attention and of a gated dense feed-forward, behind norms and without biases."""
        lanes, exchanges = self.lanes, [layer.exchange for layer in self.layers]
        expected = [lanes and lanes.exchange(i, len(self.layers)) for i in range(len(self.layers))]
        _require(exchanges == expected, "the layers of a model with lanes exchange sums as its lanes say")
        if lanes is None:
            return
        simple = self.streams == 1 and self.per_layer is None and self.loop is None and not self.tied
        simple = simple and not (self.learned_positions or self.head_bias) and self.residual_scale == 1.0
        _require(simple, "a model with lanes has embeddings, layers and a head of its own, and nothing else")
        sizes = {"tokens of the vocabulary": self.vocab} if lanes.head == "vocab_parallel" else {}
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            simple = layer == LayerSpec(attention, mlp, exchange=layer.exchange)
            if not (simple and isinstance(attention, AttentionSpec) and isinstance(mlp, MlpSpec)):
                raise ConfigError("layers of lanes have attention and a dense feed-forward, with a norm before each")
            more = attention.qkv_bias or attention.o_bias or attention.qk_norm or attention.gate or attention.sinks
            more = more or attention.fused_heads != 2 or attention.value_embedding
            _require(not more, "attention of lanes has keys and values of its own, without biases, norms or gates")
            _require(mlp.gated and not (mlp.bias or mlp.sparsity), "feed-forwards of lanes have gates and no biases")
            sizes |= {"key/value heads": attention.kv_heads, "numbers of the feed-forward": mlp.hidden}
            for what, size in sizes.items():
                _require(size % lanes.lanes == 0, f"{size} {what} do not divide over {lanes.lanes} lanes")
