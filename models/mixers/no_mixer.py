"""What stands in a mixer's place in a layer that is a feed-forward alone (Nemotron-H, pruned models)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flax import nnx

from inferlib.models.heads import HeadLayout
from inferlib.models.pieces import Assembly
from inferlib.models.recurrent import Recurrent, StateArray


@dataclass(frozen=True)
class NoMixer(Recurrent):
    """A recurrent mixer of no heads: rows have no state for it, and it has no weights and no norm."""

    title: ClassVar[str] = "no mixer"
    absent: ClassVar[bool] = True

    heads: ClassVar[int] = 0
    kv_heads: ClassVar[int] = 1
    head_dim: ClassVar[int] = 0
    value_dim: ClassVar[int] = 0

    def head_layout(self, shards: int) -> HeadLayout:
        return HeadLayout(0, 1, 1, ())

    def states(self, layout: HeadLayout) -> tuple[StateArray, ...]:
        return ()

    def build(self, layout: HeadLayout, dim: int, dtype) -> nnx.Module:
        raise TypeError("a layer without a mixer builds none: see `FeedForwardBlock`")

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        return {}

    @property
    def token_products(self) -> int:
        return 0

    def summary(self) -> str:
        return self.title
