"""Cases of writes of chunks to the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SLOTS = 8192  # positions of a row


@dataclass(frozen=True)
class ChunkWrite:
    """One chunk of `width` tokens from slot `start` on, keys and values; bfloat16, or `stored` with scales."""

    width: int
    start: int = 0
    heads: int = 8
    size: int = 128
    stored: str | None = None

    kernel = "chunk_write"
    floor_flops = 0

    @property
    def floor_bytes(self) -> int:
        """The new cells, read and written."""
        cell = 4 * self.size if self.stored is None else 2 * self.size + 8
        return self.width * self.heads * (4 * self.size + cell)

    def function(self):
        from inferlib.pallas_kernels.chunk_write_tpu import chunk_write

        def write(k, v, new_k, new_v, pages, slots, **scales):
            return chunk_write([k, v, *scales.values()], [new_k, new_v], pages, slots)

        return write

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        cache = (4, 1, self.heads, SLOTS, self.size), self.stored or "bfloat16"
        new = (1, self.width, self.heads, self.size), "bfloat16"
        arrays: dict[str, tuple[tuple[int, ...], str]] = {
            "k": cache,
            "v": cache,
            "new_k": new,
            "new_v": new,
            "pages": ((1,), "int32"),
            "slots": ((1,), "int32"),
        }
        scales = dict.fromkeys(("k_scales", "v_scales"), (cache[0][:-1], "float32"))
        return arrays | scales if self.stored else arrays

    def scalars(self) -> dict[int, np.ndarray]:
        return {0: np.zeros(1, int), 1: np.array([self.start]), 2: np.zeros(1, int)}


CASES = {
    "512 tokens, 1 head": ChunkWrite(512, heads=1),
    "512 tokens": ChunkWrite(512, start=1000),
    "2048 tokens": ChunkWrite(2048),
    "512 tokens, head size 256": ChunkWrite(512, start=1000, heads=2, size=256),
    "512 tokens, 1 head, int8": ChunkWrite(512, heads=1, stored="int8"),
    "512 tokens, int8": ChunkWrite(512, start=1000, stored="int8"),
    "512 tokens, fp8": ChunkWrite(512, start=1000, stored="float8_e4m3fn"),
}
