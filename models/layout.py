"""How a model's sizes are laid out so that they divide over the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from inferlib.models.config import AttentionSpec, ModelConfig


@dataclass(frozen=True)
class HeadLayout:
    """Groups of query heads that share a key/value head, as the arrays hold them.

    groups, queries: the arrays' K and G. source [groups, queries + 2]: which head of the checkpoint each slot holds
    (the last two columns: the key and the value head), -1 for a zero head. copies: groups per key/value head.
    """

    groups: int
    queries: int
    copies: int
    source: tuple[tuple[int, ...], ...]

    @property
    def plain(self) -> bool:
        """Whether this is the checkpoint's own order, without padding or copies."""
        return self.copies == 1 and all(slot >= 0 for row in self.source for slot in row)


def head_layout(spec: AttentionSpec, shards: int) -> HeadLayout:
    """Lay out the heads for `shards` devices.

    Key/value heads fewer than the devices are copied, their queries dealt among the copies; what does not divide is
    padded with zero heads, whose output is zero.
    """
    copies = max(1, shards // spec.kv_heads)
    queries = ceil(spec.group / copies)
    groups = ceil(spec.kv_heads * copies / shards) * shards
    rows = []
    for group in range(groups):
        kv, part = divmod(group, copies)
        if kv >= spec.kv_heads:
            rows.append((-1,) * (queries + 2))
            continue
        local = range(part * queries, (part + 1) * queries)
        heads = [kv * spec.group + g if g < spec.group else -1 for g in local]
        rows.append((*heads, kv, kv))
    return HeadLayout(groups, queries, copies, tuple(rows))


@dataclass(frozen=True)
class Layout:
    """The padded sizes of a model on `shards` devices of the tensor axis."""

    config: ModelConfig
    shards: int = 1

    def heads(self, spec: AttentionSpec) -> HeadLayout:
        return head_layout(spec, self.shards)

    def hidden(self, size: int) -> int:
        """Feed-forward width, padded with zeros."""
        return ceil(size / self.shards) * self.shards

    @property
    def vocab(self) -> int:
        """Vocabulary, padded with tokens that have no probability."""
        return ceil(self.config.vocab / self.shards) * self.shards

    def waste(self) -> dict[str, float]:
        """Share of the laid-out query heads, cache heads, feed-forward and vocabulary that is padding or copies."""
        used, held = np.zeros(3), np.zeros(3)
        for layer in self.config.layers:
            heads, attn = self.heads(layer.attention), layer.attention
            used += (attn.heads, attn.kv_heads, layer.mlp.hidden)
            held += (heads.groups * heads.queries, heads.groups, self.hidden(layer.mlp.hidden))
        share = 1 - used / held
        names = ("query heads", "cache", "feed-forward")
        return dict(zip(names, share.tolist(), strict=True)) | {"vocabulary": 1 - self.config.vocab / self.vocab}
