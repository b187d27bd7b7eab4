"""Cases of XAttention's scores of blocks, for a chunk over a cache that contains its prefix and itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK = 128


@dataclass(frozen=True)
class Antidiagonals:
    """One chunk of `width` tokens behind `start` others in the cache, in pages of `page` positions; bfloat16."""

    width: int
    start: int
    heads: int = 1
    group: int = 4
    size: int = 128
    page: int = BLOCK

    kernel = "antidiagonals"

    @property
    def keys(self) -> int:
        return self.start + self.width

    @property
    def floor_bytes(self) -> int:
        """Queries and keys once."""
        return 2 * self.size * self.heads * (self.width * self.group + self.keys)

    @property
    def floor_flops(self) -> int:
        """A product of each line with each stride that it sees."""
        lines = self.start // 16 + 1 + np.arange(self.width // 16)
        return 2 * 16 * self.size * self.heads * self.group * int(lines.sum())

    def function(self):
        from inferlib.attention_values import AttentionOptions, KvCache
        from inferlib.pallas_kernels.antidiagonals_tpu import block_scores

        def run(q, k, rows, first, last, pages):
            cache = KvCache(k, None, layer=0, pages=pages)
            return block_scores(q, cache, rows, first, last, AttentionOptions(self.size**-0.5))

        return run

    @property
    def table(self) -> np.ndarray:
        """A page table in random order."""
        return np.random.default_rng(1).permutation(-(-self.keys // self.page))[None].astype(np.int32)

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        tiles = (1, -(-self.width // BLOCK)), "int32"
        return {
            "q": ((1, self.width, self.heads, self.group, self.size), "bfloat16"),
            "k": ((4, self.table.size, self.heads, self.page, self.size), "bfloat16"),
            "rows": ((1,), "int32"),
            "first": tiles,
            "last": tiles,
            "pages": (self.table.shape, "int32"),
        }

    def scalars(self) -> dict[int, np.ndarray]:
        return {0: np.array([self.start]), 1: np.array([self.keys]), 2: np.zeros(1, int), 3: self.table}


CASES = {
    "2048 behind 30720, 1 head": Antidiagonals(2048, 30720),
    "2048 behind 30720": Antidiagonals(2048, 30720, heads=8),
    "512 behind 7680": Antidiagonals(512, 7680, heads=8),
}
