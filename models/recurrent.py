"""Layers whose cache is of one size, however long a row is: what they are, and what each row keeps of them.

`ModelConfig` takes them where attention stands. Tokens run through them in order, from a state that starts at zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from inferlib.models.config import AttentionSpec, ConfigError, MlaSpec
from inferlib.sharding import axes


class Kept(NamedTuple):
    """What a row keeps: an array with these dimensions, in float32 (`wide`) or the model's dtype."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    wide: bool


class Recurrent:
    """What the rest asks of a layer of any kind: those here have no positions, no bias and a cache of their own."""

    heads: int
    title: ClassVar[str]
    rope: ClassVar[None] = None
    reach: ClassVar[None] = None
    cache_of: ClassVar[None] = None
    o_bias: ClassVar[bool] = False

    @property
    def cache_heads(self) -> int:
        return self.heads

    def kept(self, groups: int, queries: int) -> tuple[Kept, ...]:
        """Of a row. groups, queries: key heads and value heads of each, as laid out."""
        raise NotImplementedError

    @property
    def token_width(self) -> int:
        """Multiplications of a token and head with what is kept."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearAttentionSpec(Recurrent):
    """What kinds of linear attention behind a causal convolution have in common: each value head has a state, which a
    key head's queries read and its keys write.

    heads: of values; kv_heads: of queries and keys, each for as many value heads; head_dim: of queries and keys;
    value_dim: of values; taps: of the convolution, which queries, keys and values go through; eps: of the RMS norm of
    what is returned.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    taps: int
    eps: float = 1e-6

    vectors: ClassVar[int]  # that are multiplied with a state for each token

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"linear attention needs a positive {name}, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} value heads do not divide into {self.kv_heads} key heads")
        if self.taps < 2:
            raise ConfigError(f"the convolution needs two taps at least, got {self.taps}")

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.heads // self.kv_heads

    @property
    def state_shape(self) -> tuple[int, int]:
        """Of a value head."""
        raise NotImplementedError

    def kept(self, groups: int, queries: int) -> tuple[Kept, ...]:
        """The convolution's last inputs and the state."""
        width = 2 * self.head_dim + queries * self.value_dim
        tail, names = (self.taps - 1, groups, width), (None, axes.KV_HEADS, axes.HEAD_DIM)
        state = groups * queries, *self.state_shape
        return Kept("tail", tail, names, False), Kept("state", state, (axes.KV_HEADS, None, axes.HEAD_DIM), True)

    @property
    def token_width(self) -> int:
        return self.vectors * self.head_dim * self.value_dim


@dataclass(frozen=True)
class GatedDeltaSpec(LinearAttentionSpec):
    """Gated delta rule (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464):
    the state [d_k, d_v] of each value head fades, and forgets what it held at a key before it learns another value
    there. Every value head has an RMS norm of its own.

    strength: of writing, at most; beyond 1 what was held at a key can change its sign (OLMo Hybrid).
    """

    strength: float = 1.0

    title: ClassVar[str] = "gated delta rule"
    vectors: ClassVar[int] = 3  # two read and one changes it

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim


@dataclass(frozen=True)
class Mamba2Spec(LinearAttentionSpec):
    """State-space duality (Dao & Gu 2024, "Transformers are SSMs", arXiv 2405.21060), in these terms: C are queries and
    B keys, of one head for each of its groups; values are inputs times their step dt, and a head's state [d_v, d_k]
    fades by exp(A dt). A group's heads share an RMS norm, behind their gates.

    conv_bias: of the convolution; limits: of dt, the least and the largest.
    """

    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, math.inf)

    title: ClassVar[str] = "state-space duality (Mamba-2)"
    vectors: ClassVar[int] = 2  # one reads and one changes it

    def __post_init__(self):
        super().__post_init__()
        least, most = self.limits
        if not 0 <= least < most:
            raise ConfigError(
                f"the limits of the step dt must be two numbers from 0 on, the first less, got {self.limits}"
            )

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.value_dim, self.head_dim


@dataclass(frozen=True)
class KimiDeltaSpec(LinearAttentionSpec):
    """Kimi Delta Attention (Moonshot AI 2025, "Kimi Linear", arXiv 2510.26692): the gated delta rule, but each channel
    of a head's keys fades by itself. Fading and output gates are of low rank, the head size. Every head has queries and
    keys of its own, of the same size as values, and an RMS norm."""

    title: ClassVar[str] = "Kimi delta attention"
    vectors: ClassVar[int] = 3  # two read and one changes it

    def __post_init__(self):
        super().__post_init__()
        if self.group != 1 or self.value_dim != self.head_dim:
            raise ConfigError("Kimi delta attention has as many heads of values as of keys, and of the same size")

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim


@dataclass(frozen=True)
class _Heads(Recurrent):
    """Heads of one size, without a convolution before them. head_dim: numbers of each."""

    heads: int
    head_dim: int

    group: ClassVar[int] = 1

    def __post_init__(self):
        if self.heads <= 0 or self.head_dim <= 0:
            raise ConfigError(f"a recurrent layer needs heads, got {self.heads} of {self.head_dim}")

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def value_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class ShortConvSpec(_Heads):
    """Short convolution (LFM2, Liquid AI 2025): of a token's three projections b, c and x, a causal convolution of b x,
    each channel by itself, times c. A row keeps the convolution's last inputs and nothing else.

    heads: parts of the channels, by which a mesh splits them; taps: of the convolution.
    """

    taps: int

    title: ClassVar[str] = "short convolution"

    def __post_init__(self):
        super().__post_init__()
        if self.taps < 2:
            raise ConfigError(f"the convolution needs two taps at least, got {self.taps}")

    def kept(self, groups: int, queries: int) -> tuple[Kept, ...]:
        """The convolution's last inputs."""
        return (Kept("tail", (self.taps - 1, groups, self.head_dim), (None, axes.KV_HEADS, axes.HEAD_DIM), False),)

    @property
    def token_width(self) -> int:
        """The taps and two gates."""
        return (self.taps + 2) * self.head_dim


@dataclass(frozen=True)
class LightningSpec(_Heads):
    """Lightning attention (MiniMax 2025, "MiniMax-01", arXiv 2501.08313): linear attention whose state [h, h] of each
    head fades at a rate of its own, the same for all tokens. Queries, keys and values are activated, heads' outputs
    normed together and gated. eps: of the norm.
    """

    eps: float = 1e-6

    title: ClassVar[str] = "lightning attention"

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    def kept(self, groups: int, queries: int) -> tuple[Kept, ...]:
        """The state."""
        return (Kept("state", (groups, *self.state_shape), (axes.KV_HEADS, None, axes.HEAD_DIM), True),)

    @property
    def token_width(self) -> int:
        """One vector reads the state and one changes it."""
        return 2 * self.head_dim * self.head_dim


Mixer = AttentionSpec | MlaSpec | Recurrent  # of a layer's tokens
