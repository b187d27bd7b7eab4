"""Cases of prefill attention over latents, of DeepSeek's sizes: 512 numbers and a rotary key of 64, heads of 128."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferlib.tuning.kernel_cases.prefill_attention import OneChunk

RANK, ROTARY, SIZE = 512, 64, 128
UNIT = 256  # positions of 128 rows of rotary keys

POSITIONS = 8192  # tokens of a chunk and of what precedes it


@dataclass(frozen=True)
class MlaPrefillAttention(OneChunk):
    """One chunk of `width` tokens behind `start` others in the cache, in bfloat16. page: positions of a page; None:
    rows are pages."""

    width: int
    start: int = 0
    heads: int = 32
    page: int | None = None

    kernel = "mla_prefill_attention"

    @staticmethod
    def of(width, heads, unit) -> dict[str, MlaPrefillAttention]:
        """The case with these arguments of `blocks`."""
        if unit != UNIT:
            raise ValueError(f"there are cases of rotary keys of {ROTARY} numbers")
        starts = {"first chunk": 0, "in the middle": (POSITIONS - width) // 2, "last chunk": POSITIONS - width}
        return {name: MlaPrefillAttention(width, max(n, 0), heads) for name, n in starts.items()}

    @property
    def floor_bytes(self) -> int:
        """Queries and output, each latent and rotary key once, and the weights that expand them."""
        queries = self.width * self.heads * (2 * SIZE + ROTARY)
        return 2 * (queries + (self.start + self.width) * (RANK + ROTARY) + 2 * self.heads * RANK * SIZE)

    @property
    def floor_flops(self) -> int:
        """The expansion of each latent once, and both products over the keys that each query sees, with its own."""
        seen = int((self.start + 1 + np.arange(self.width)).sum())
        return 2 * self.heads * ((2 * SIZE + ROTARY) * seen + 2 * SIZE * RANK * (self.start + self.width))

    def function(self):
        from inferlib.attention_values import Expansion, LatentCache
        from inferlib.pallas_kernels.mla_prefill_attention_tpu import mla_prefill_attention

        def run(q, k, v, latents, keys, rows, positions, *, pages=None):
            cache = LatentCache(latents, keys, layer=0, pages=pages)
            return mla_prefill_attention(q, Expansion(k, v, 0), cache, rows, positions, (SIZE + ROTARY) ** -0.5)

        return run

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        slots = self.page or -(-(self.start + self.width) // 1024) * 1024
        count = 1 if (pages := self.pages) is None else pages.size
        arrays = {
            "q": ((1, self.width, self.heads, SIZE + ROTARY), "bfloat16"),
            "k": ((4, self.heads, SIZE, RANK), "bfloat16"),
            "v": ((4, self.heads, RANK, SIZE), "bfloat16"),
            "latents": ((4, count, slots, RANK), "bfloat16"),
            "keys": ((4, count, slots // 2, 2 * ROTARY), "bfloat16"),
            "rows": ((1,), "int32"),
            "positions": ((1, self.width), "int32"),
        }
        return arrays if pages is None else {**arrays, "pages": (pages.shape, "int32")}

    def scalars(self) -> dict[int, np.ndarray]:
        from inferlib.pallas_kernels.mla_prefill_attention_tpu import blocks

        return self.prefetched(blocks(self.width, self.heads, UNIT), layers=2)


CASES = {
    "512": MlaPrefillAttention(512),
    "512 behind 3584": MlaPrefillAttention(512, start=3584),
    "512 behind 7680": MlaPrefillAttention(512, start=7680),
    "512 behind 7680, 16 heads": MlaPrefillAttention(512, start=7680, heads=16),
    "512 behind 7680, page 256": MlaPrefillAttention(512, start=7680, page=256),
    "128 behind 3968": MlaPrefillAttention(128, start=3968),
    "2048 behind 6144": MlaPrefillAttention(2048, start=6144),
}
