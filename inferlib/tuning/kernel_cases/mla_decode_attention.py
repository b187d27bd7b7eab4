"""Cases of decode attention over latents, of DeepSeek's sizes: 512 numbers and a rotary key of 64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferlib.tuning.kernel_cases.decode_attention import UNEVEN
from inferlib.tuning.kernel_cases.draws import shuffled_pages, unequal

RANK, ROTARY = 512, 64

POSITIONS = 131072  # in all rows of a batch


@dataclass(frozen=True)
class MlaDecodeAttention:
    """Decode rows in bfloat16. lengths: positions of each row. queries: new tokens of each. page: positions of a page;
    None: rows are pages."""

    lengths: tuple[int, ...]
    heads: int = 128
    page: int | None = None
    queries: int = 1

    kernel = "mla_decode_attention"

    @staticmethod
    def of(width, unit, longest, rank, itemsize) -> dict[str, MlaDecodeAttention]:
        """The case with these arguments of `blocks`."""
        if (rank, itemsize) != (RANK, 2):
            raise ValueError(f"there are cases of {RANK} numbers in bfloat16")
        rows = max(POSITIONS // longest, 1)
        lengths = {"full rows": (longest,) * rows, "unequal rows": unequal(longest, rows)}
        return {name: MlaDecodeAttention(some, heads=width) for name, some in lengths.items()}

    @property
    def floor_bytes(self) -> int:
        out = len(self.lengths) * self.queries * self.heads * (2 * RANK + ROTARY)
        return 2 * (sum(self.lengths) * (RANK + ROTARY) + out)

    @property
    def floor_flops(self) -> int:
        return 2 * sum(self.lengths) * self.queries * self.heads * (2 * RANK + ROTARY)

    def function(self):
        from inferlib.attention_values import LatentCache
        from inferlib.pallas_kernels.mla_decode_attention_tpu import mla_decode_attention

        def run(q, latents, keys, lengths, *, pages=None):
            return mla_decode_attention(
                q, LatentCache(latents, keys, layer=0, pages=pages), lengths, (128 + ROTARY) ** -0.5
            )

        return run

    @property
    def pages(self) -> np.ndarray | None:
        return None if self.page is None else shuffled_pages(self.lengths, self.page)

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        rows, slots = len(self.lengths), self.page or -(-max(self.lengths) // 256) * 256
        count = rows if (pages := self.pages) is None else pages.size
        arrays = {
            "q": ((rows, self.queries, self.heads, RANK + ROTARY), "bfloat16"),
            "latents": ((4, count, slots, RANK), "bfloat16"),
            "keys": ((4, count, slots // 2, 2 * ROTARY), "bfloat16"),
            "lengths": ((rows,), "int32"),
        }
        return arrays if pages is None else {**arrays, "pages": (pages.shape, "int32")}

    def scalars(self) -> dict[int, np.ndarray]:
        scalars = [np.array(self.lengths), np.zeros(1, int)]
        return dict(enumerate(scalars if (pages := self.pages) is None else [*scalars, pages]))


BATCH, LONG = (4096,) * 32, (131072,)
CASES = {
    "V3": MlaDecodeAttention(BATCH),
    "V3, long": MlaDecodeAttention(LONG),
    "V3, 4 queries": MlaDecodeAttention(BATCH, queries=4),
    "V3, page 256": MlaDecodeAttention(BATCH, page=256),
    "V3, uneven": MlaDecodeAttention(UNEVEN),
    "16 heads": MlaDecodeAttention(BATCH, heads=16),
    "16 heads, long": MlaDecodeAttention(LONG, heads=16),
    "16 heads, page 256": MlaDecodeAttention(BATCH, heads=16, page=256),
    "16 heads, uneven": MlaDecodeAttention(UNEVEN, heads=16),
}
