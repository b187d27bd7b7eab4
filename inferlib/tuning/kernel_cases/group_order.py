"""Cases of the order of choices by group, for tokens that choose at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupOrder:
    """Tokens, each of which chooses `chosen` of `groups`."""

    tokens: int
    groups: int = 128
    chosen: int = 8

    kernel = "group_order"
    floor_flops = 0

    @property
    def floor_bytes(self) -> int:
        """Choices are read; order, places and sizes are written."""
        return 4 * (3 * self.tokens * self.chosen + self.groups)

    def function(self):
        from inferlib.ops.group_order import group_order

        return lambda ids: group_order(ids, self.groups, backend="pallas_tpu")

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"ids": ((self.tokens, self.chosen), "int32")}

    def scalars(self) -> dict[int, np.ndarray]:
        return {}


CASES = {f"Qwen3-30B-A3B, {tokens} tokens": GroupOrder(tokens) for tokens in (32, 512, 4096)}
