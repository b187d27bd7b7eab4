"""How a mixer's heads are laid out so that they divide over devices."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class HeadLayout:
    """Groups of query heads that share a key/value head, as the arrays store them.

    groups, queries: the arrays' K and G. source [groups, queries + 2]: the checkpoint's head in each place, -1 for a
    zero head; the last two columns are the key and the value head. copies: number of groups that share one of the
    checkpoint's key/value heads.
    """

    groups: int
    queries: int
    copies: int
    source: tuple[tuple[int, ...], ...]

    @property
    def unchanged(self) -> bool:
        """True if this is the checkpoint's own order, without padding or copies."""
        return self.copies == 1 and all(place >= 0 for row in self.source for place in row)


def grouped_heads(heads: int, kv_heads: int, shards: int) -> HeadLayout:
    """Lay out `heads` query heads, which share `kv_heads` key/value heads in equal groups, for `shards` devices.

    If there are fewer key/value heads than devices, they are copied and their queries are dealt among the copies. Zero
    heads, whose output is zero, pad numbers that do not divide.
    """
    group = heads // kv_heads
    copies = max(1, shards // kv_heads)
    queries = ceil(group / copies)
    groups = ceil(kv_heads * copies / shards) * shards
    rows = []
    for number in range(groups):
        kv, part = divmod(number, copies)
        if kv >= kv_heads:
            rows.append((-1,) * (queries + 2))
            continue
        local = range(part * queries, (part + 1) * queries)
        rows.append((*(kv * group + g if g < group else -1 for g in local), kv, kv))
    return HeadLayout(groups, queries, copies, tuple(rows))


def separate_heads(heads: int, shards: int) -> HeadLayout:
    """Lay out heads that share no keys and values, padded with zero heads, for `shards` devices."""
    count = ceil(heads / shards) * shards
    return HeadLayout(count, 1, 1, tuple((h if h < heads else -1,) * 3 for h in range(count)))
