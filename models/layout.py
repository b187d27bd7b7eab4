"""How a model's sizes are padded or copied so that they divide over the devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import numpy as np

from inferlib.models.config import LaneSpec, Mixer, MlaSpec, MlpSpec, ModelConfig, MoeSpec
from inferlib.models.heads import HeadLayout
from inferlib.models.recurrent import keeps_state
from inferlib.sharding import axes
from inferlib.sharding.mesh import ShardingError
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class Layout:
    """The padded sizes of a model on a mesh. slots: number of slots for each layer's experts, if a file places them
    (see `inferlib.placement`). Raises ShardingError for a size that does not divide and cannot be padded."""

    config: ModelConfig
    shards: Shards = field(default_factory=Shards)
    slots: int | None = None

    def __post_init__(self):
        self._must_divide("model width", self.config.dim, axes.EMBED)
        count = self.shards.size(axes.EXPERTS)
        if self.slots is not None and self.slots % count:
            raise ShardingError(
                f"the expert placement has {self.slots} slots, which do not divide over {count} devices of the expert "
                f"axis: give it a multiple, such as {_rounded_up(self.slots, count)}"
            )
        recurrent = any(keeps_state(layer.attention) for layer in self.config.layers)
        if recurrent and (count := self.shards.size(axes.POSITIONS)) > 1:
            raise ShardingError(
                f"rules {self.shards.preset!r} deal a row's positions out to {count} devices of the "
                f"{' and '.join(self.shards.mesh_axes(axes.POSITIONS))} axis, and recurrent layers, which take a "
                "row's tokens in order, keep none: use tp, tp_sp, dp_attention, dp or ep"
            )
        if self.config.loop is not None and (self.shards.size(axes.EMBED) > 1 or self.shards.splits_tokens):
            raise ShardingError(
                f"rules {self.shards.preset!r} split the model's width or tokens between products, which a loop over "
                "layers cannot: use tp, cp, helix, dp or dp_attention"
            )
        if self.config.lanes is not None:
            self._must_take(self.config.lanes)
        for size in sorted({layer.attention.value_dim for layer in self.config.layers}):
            self._must_divide("value head size", size, axes.HEAD_OUT)

    def _must_take(self, spec: LaneSpec) -> None:
        """Raise ShardingError for a mesh that cannot have the lanes of a model."""
        shards, devices = self.shards, self.shards.size(axes.LANES)
        apart = {shards.mesh_axes(name) for name in (axes.KV_HEADS, axes.MLP, axes.VOCAB)} != {
            shards.mesh_axes(axes.LANES)
        }
        if apart or shards.size(axes.EMBED) > 1 or shards.splits_tokens or shards.mlp_row_shards > 1:
            raise ShardingError(
                f"rules {shards.preset!r} split a layer otherwise than {self.config.family}'s lanes do, of which each "
                "device has some: use tp, cp or dp"
            )
        if spec.lanes % devices:
            able = [n for n in range(1, spec.lanes + 1) if spec.lanes % n == 0]
            raise ShardingError(
                f"{spec.lanes} lanes do not divide over {devices} devices of the "
                f"{' and '.join(shards.mesh_axes(axes.LANES))} axis; they do over {able}"
            )

    def _must_divide(self, what: str, size: int, name: str) -> None:
        count = self.shards.size(name)
        if size % count:
            able = [n for n in range(1, min(size, 256) + 1) if size % n == 0]
            raise ShardingError(
                f"rules {self.shards.preset!r} split the {what} of {size}, which does not divide over {count} "
                f"devices of the {' and '.join(self.shards.mesh_axes(name))} axis; it does over {able}"
            )

    def heads(self, spec: Mixer) -> HeadLayout:
        return spec.head_layout(self.shards.size(axes.KV_HEADS))

    def cache_heads(self, spec: Mixer) -> int:
        """Heads of a layer's cache."""
        return spec.cache_heads_in(self.heads(spec))

    def hidden(self, size: int) -> int:
        """Feed-forward width, padded with zeros."""
        return _rounded_up(size, self.shards.size(axes.MLP))

    def experts(self, count: int) -> int:
        """Number of experts, padded with experts that no token chooses; if a file places them, its slots."""
        return self.slots or _rounded_up(count, self.shards.size(axes.EXPERTS))

    @property
    def vocab(self) -> int:
        """Vocabulary, padded with tokens that have no probability."""
        return _rounded_up(self.config.vocab, self.shards.size(axes.VOCAB))

    def positions(self, count: int, multiple: int = 1) -> int:
        """Slots for `count` positions: every device has equally many, a multiple of `multiple`."""
        return _rounded_up(count, multiple * self.shards.size(axes.POSITIONS))

    def waste(self) -> dict[str, float]:
        """The share of padding and copies in the query heads, the cache, the feed-forward and the vocabulary."""
        used, laid_out = np.zeros(3), np.zeros(3)
        for layer in self.config.layers:
            heads, attn = self.heads(layer.attention), layer.attention
            feeds = self._feeds(layer.mlp)
            owns = attn.cache_of is None
            used += (attn.heads, owns * attn.cache_heads, sum(count * hidden for count, _, hidden in feeds))
            widths = sum(count * self.hidden(hidden) for _, count, hidden in feeds)
            copies = self.shards.size(axes.KV_HEADS) if isinstance(attn, MlaSpec) else 1
            laid_out += (heads.groups * heads.queries, owns * self.cache_heads(attn) * copies, widths)
        share = 1 - used / laid_out
        names = ("query heads", "cache", "feed-forward")
        return dict(zip(names, share.tolist(), strict=True)) | {"vocabulary": 1 - self.config.vocab / self.vocab}

    def _feeds(self, spec: MlpSpec | MoeSpec | None) -> list[tuple[int, int, int]]:
        """The feed-forwards of a layer: for each kind how many there are, how many as laid out, and the width."""
        if spec is None:
            return []
        if isinstance(spec, MlpSpec):
            return [(1, 1, spec.hidden)]
        shared = [] if spec.shared is None else self._feeds(spec.shared)
        return [(spec.experts, self.experts(spec.experts), spec.hidden), *shared]


def _rounded_up(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple
