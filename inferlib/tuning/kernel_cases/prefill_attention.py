"""Cases of prefill attention of a chunk over a cache that contains its prefix and itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from inferlib.tuning.kernel_cases.cells import Cells

POSITIONS = 8192  # tokens of a chunk and of what precedes it
TILE = 256  # queries that share a list of blocks


class OneChunk:
    """A chunk of `width` tokens behind `start` cached ones. page: positions of a page; None: the row is a page."""

    width: int
    start: int
    page: int | None

    @property
    def pages(self) -> np.ndarray | None:
        """A page table in random order."""
        if self.page is None:
            return None
        count = -(-(self.start + self.width) // self.page)
        return np.random.default_rng(1).permutation(count)[None].astype(np.int32)

    def prefetched(self, chosen, layers: int) -> dict[int, np.ndarray]:
        """The operands in scalar memory of a kernel with these blocks, by index. layers: number of layer numbers."""
        first = np.arange(-(-self.width // chosen.queries) * chosen.queries, step=chosen.part)
        last = np.minimum(first + chosen.part, self.width) - 1
        prefetched = [np.zeros(1, int), np.zeros(layers, int), self.start + first[None], self.start + last[None]]
        if (pages := self.pages) is not None:
            prefetched.append(pages)
        return dict(enumerate(prefetched))


@dataclass(frozen=True)
class PrefillAttention(OneChunk, Cells):
    """One chunk of `width` tokens behind `start` others in the cache. stored: type of a cache with scales, None for
    bfloat16. page: positions of a page; None: rows are pages. slots: of a ring. listed: how many blocks of 128
    positions each tile of 256 queries attends to, the first, its own and any others before it; None: all."""

    width: int
    start: int = 0
    heads: int = 8
    group: int = 4
    size: int = 128
    page: int | None = None
    window: int | None = None
    slots: int | None = None
    stored: str | None = None
    listed: int | None = None

    kernel = "prefill_attention"

    @staticmethod
    def of(width, group, size, itemsize) -> dict[str, PrefillAttention]:
        """The case with these arguments of `blocks`."""
        if itemsize != 2:
            raise ValueError("there are cases of bfloat16")
        starts = {"first chunk": 0, "in the middle": (POSITIONS - width) // 2, "last chunk": POSITIONS - width}
        return {name: PrefillAttention(width, max(n, 0), 1, group, size) for name, n in starts.items()}

    @property
    def floor_bytes(self) -> int:
        """Queries and output, and each visible key and value once."""
        keys = min(self.start + self.width, (self.window or self.start) + self.width)
        cell = 4 * self.size if self.stored is None else 2 * self.size + 8
        return self.heads * (4 * self.size * self.width * self.group + cell * keys)

    @property
    def floor_flops(self) -> int:
        """The two products over the keys that each query sees, with its own."""
        seen = self.start + 1 + np.arange(self.width)
        seen = seen if self.listed is None else np.minimum(seen, self.listed * 128)
        return 4 * self.size * self.heads * self.group * int(np.minimum(seen, self.window or seen).sum())

    def function(self):
        from inferlib.attention_values import AttentionOptions, KvCache
        from inferlib.pallas_kernels.prefill_attention_tpu import prefill_attention

        options = AttentionOptions(self.size**-0.5, self.window, key_size=self.key_size)

        def run(q, rows, positions, visits=None, **cache):
            stored, blocks = (
                KvCache(**cache, layer=0, ring=self.slots is not None),
                None if visits is None else listed_blocks(),
            )
            return prefill_attention(q, stored, rows, positions, options, visits=visits, blocks=blocks)

        return run

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        slots = self.page or self.slots or -(-(self.start + self.width) // 1024) * 1024
        (heads, group, size), count = self.layout, 1 if (pages := self.pages) is None else pages.size
        cache = (4, count, heads, slots, size), self.stored or "bfloat16"
        q = (1, self.width, heads, group, size), "bfloat16"
        arrays = {"q": q, "k": cache} | ({} if self.one else {"v": cache})
        arrays |= {"rows": ((1,), "int32"), "positions": ((1, self.width), "int32")}
        if self.listed:
            arrays["visits"] = self.visits.shape, "int32"
        if self.stored:
            arrays |= dict.fromkeys(("k_scales", "v_scales"), (cache[0][:-1], "float32"))
        return arrays if pages is None else {**arrays, "pages": (pages.shape, "int32")}

    def scalars(self) -> dict[int, np.ndarray]:
        from inferlib.pallas_kernels.prefill_attention_tpu import blocks, narrowed

        if self.listed is None:
            q = narrowed(jax.ShapeDtypeStruct(*self.arguments()["q"]), self.key_size)
            return self.prefetched(blocks(self.width, *q.shape[-2:], 2), layers=1)
        scalars, numbers = list(self.prefetched(listed_blocks(), layers=1).values()), self.visits
        counts = np.sum(numbers >= 0, axis=-1).reshape(1, -1)
        ordered = np.sort(np.where(numbers < 0, np.iinfo(np.int32).max, numbers), axis=-1).reshape(1, -1)
        return dict(enumerate([*scalars, counts, ordered]))

    @property
    def visits(self) -> np.ndarray:
        """The lists [1, K, T, listed]; -1 is none."""
        assert self.listed is not None
        rng, first = np.random.default_rng(2), self.start // 128
        each = TILE // 128
        tiles = range(first, first + self.width // 128, each)
        numbers = np.full((1, self.heads, len(tiles), self.listed), -1, np.int32)
        for head in range(self.heads):
            for i, diagonal in enumerate(tiles):
                others = rng.permutation(np.arange(1, diagonal))[: max(self.listed - 1 - each, 0)]
                some = np.unique([0, *range(diagonal, diagonal + each), *others])
                numbers[0, head, i, : some.size] = some
        return numbers


def listed_blocks() -> Any:
    """The blocks of lists."""
    from inferlib.pallas_kernels.prefill_attention_tpu import Blocks

    return Blocks(TILE, 1024, edge=512, listed=128)


CASES = {
    "8192": PrefillAttention(8192),
    "8192, 1 head": PrefillAttention(8192, heads=1),
    "8192, size 256": PrefillAttention(8192, size=256),
    "8192, no groups": PrefillAttention(8192, heads=4, group=1),
    "8192, groups of 8": PrefillAttention(8192, heads=2, group=8),
    "2048 behind 6144, 1 head": PrefillAttention(2048, start=6144, heads=1),
    "512 behind 7680, 1 head": PrefillAttention(512, start=7680, heads=1),
    "128 behind 8064, 1 head": PrefillAttention(128, start=8064, heads=1),
    "8192, page 128": PrefillAttention(8192, page=128),
    "8192, page 16": PrefillAttention(8192, page=16),
    "2048 behind 30720, 1 head": PrefillAttention(2048, start=30720, heads=1, page=128),
    "2048 behind 30720, 1 head, 64 of 256 blocks": PrefillAttention(2048, start=30720, heads=1, page=256, listed=64),
    "2048 in a ring, window 1024": PrefillAttention(2048, start=6144, window=1024, slots=3072),
    "8192, size 64": PrefillAttention(8192, size=64),
    "8192, size 80": PrefillAttention(8192, size=80),
    "8192, size 96": PrefillAttention(8192, size=96),
    "512 behind 7680, 1 head, size 64": PrefillAttention(512, start=7680, heads=1, size=64),
    "8192, int8": PrefillAttention(8192, stored="int8"),
    "8192, fp8": PrefillAttention(8192, stored="float8_e4m3fn"),
    "512 behind 7680, 1 head, int8": PrefillAttention(512, start=7680, heads=1, stored="int8"),
    "512 behind 7680, 1 head, fp8": PrefillAttention(512, start=7680, heads=1, stored="float8_e4m3fn"),
    "128 behind 8064, 1 head, int8": PrefillAttention(128, start=8064, heads=1, stored="int8"),
    "128 behind 8064, 1 head, fp8": PrefillAttention(128, start=8064, heads=1, stored="float8_e4m3fn"),
    "8192, page 128, int8": PrefillAttention(8192, page=128, stored="int8"),
    "2048 in a ring, window 1024, int8": PrefillAttention(2048, start=6144, window=1024, slots=3072, stored="int8"),
}
