"""Sizes that several recurrent mixers have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from inferlib.models.config import ConfigError
from inferlib.models.heads import HeadLayout
from inferlib.models.recurrent import Recurrent, StateArray
from inferlib.sharding import axes


def check_taps(taps: int) -> None:
    """Raise ConfigError for a convolution of fewer than two taps, which would not look back."""
    if taps < 2:
        raise ConfigError(f"the convolution needs two taps at least, got {taps}")


@dataclass(frozen=True)
class LinearAttentionSpec(Recurrent):
    """Linear attention behind a causal convolution: each value head has a state, which a key head's queries read and
    its keys write.

    heads: number of value heads; kv_heads: number of query and key heads, each shared by equally many value heads;
    head_dim: size of queries and keys; value_dim: size of values; taps: length of the convolution that queries, keys
    and values go through; eps: belongs to the RMS norm of the output.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    taps: int
    eps: float = 1e-6

    vectors: ClassVar[int]  # how many vectors are multiplied with a state for each token

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"linear attention needs a positive {name}, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} value heads do not divide into {self.kv_heads} key heads")
        check_taps(self.taps)

    @property
    def state_shape(self) -> tuple[int, int]:
        """The shape of one value head's state, [d_k, d_v]."""
        return self.head_dim, self.value_dim

    def states(self, layout: HeadLayout) -> tuple[StateArray, ...]:
        """The convolution's last inputs and the value heads' states."""
        width = 2 * self.head_dim + layout.queries * self.value_dim
        tail, names = (self.taps - 1, layout.groups, width), (None, axes.KV_HEADS, axes.HEAD_DIM)
        state = layout.groups * layout.queries, *self.state_shape
        return (
            StateArray("tail", tail, names, wide=False),
            StateArray("state", state, (axes.KV_HEADS, None, axes.HEAD_DIM), wide=True),
        )

    @property
    def token_products(self) -> int:
        return self.vectors * self.head_dim * self.value_dim

    def summary(self) -> str:
        keys = f", {self.kv_heads} for queries and keys" if self.group > 1 else ""
        rows, columns = self.state_shape
        return f"{self.title} with {self.heads} heads{keys}, states of {rows} x {columns}"


@dataclass(frozen=True)
class EqualHeads(Recurrent):
    """Heads of equal size that share nothing. head_dim: numbers of each head."""

    heads: int
    head_dim: int

    def __post_init__(self):
        if self.heads <= 0 or self.head_dim <= 0:
            raise ConfigError(f"a recurrent layer needs heads, got {self.heads} of {self.head_dim}")

    @property
    def kv_heads(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.heads

    @property
    def value_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.head_dim
