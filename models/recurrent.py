"""Layers whose cache is of one size, however long a row is: what they are, and what each row keeps of them.

`ModelConfig` takes them where attention stands. Tokens run through them in order, from a state that starts at zero.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated delta rule (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464)
    behind a causal convolution: linear attention whose state [d_k, d_v] of each value head fades, and forgets what it
    held at a key before it learns another value there.

    heads: of values; kv_heads: of queries and keys, each for as many value heads; head_dim: d_k; value_dim: d_v; taps:
    of the convolution, which queries, keys and values go through; eps: of the RMS norm of what a head returns.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    taps: int
    eps: float = 1e-6

    rope: ClassVar[None] = None
    reach: ClassVar[None] = None
    cache_of: ClassVar[None] = None
    o_bias: ClassVar[bool] = False

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
    def cache_heads(self) -> int:
        return self.heads

    def kept(self, groups: int, queries: int) -> tuple[Kept, ...]:
        """Of a row: the convolution's last inputs and the state. groups, queries: key heads and value heads of each, as
        laid out."""
        width = 2 * self.head_dim + queries * self.value_dim
        tail, names = (self.taps - 1, groups, width), (None, axes.KV_HEADS, axes.HEAD_DIM)
        state = groups * queries, self.head_dim, self.value_dim
        return Kept("tail", tail, names, False), Kept("state", state, (axes.KV_HEADS, None, axes.HEAD_DIM), True)

    @property
    def token_width(self) -> int:
        """Multiplications of a token and value head with its state: two vectors read it and one changes it."""
        return 3 * self.head_dim * self.value_dim


RECURRENT = (GatedDeltaSpec,)
Mixer = AttentionSpec | MlaSpec | GatedDeltaSpec  # of a layer's tokens
