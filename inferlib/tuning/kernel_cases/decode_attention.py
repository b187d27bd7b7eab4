"""Decode attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.tuning.kernel_cases.cells import Cells
from inferlib.tuning.kernel_cases.draws import shuffled_pages, unequal

_RNG = np.random.default_rng(0)
UNEVEN = tuple(_RNG.integers(17, 8193, 64).tolist())
SHORT = tuple(np.exp(_RNG.uniform(np.log(17), np.log(8192), 64)).astype(int).tolist())


@dataclass(frozen=True)
class DecodeAttention(Cells):
    """Decode rows.

    lengths: positions of each row. queries: new tokens of each. stored: type of a cache with scales, None for bfloat16.
    page: positions of a page; None: rows are pages. slots: of a ring. tree: new tokens see only their ancestors.
    writes: the kernel writes their cells.
    """

    lengths: tuple[int, ...]
    heads: int = 1
    group: int = 4
    size: int = 128
    page: int | None = None
    queries: int = 1
    window: int | None = None
    slots: int | None = None
    stored: str | None = None
    sinks: bool = False
    tree: bool = False
    writes: bool = False
    apart: bool = False

    kernel = "decode_attention"
    floor_flops = 0

    @staticmethod
    def of(q, cache, arrays, itemsize, pages, seen) -> dict[str, DecodeAttention]:
        """The case with these arguments of `default_blocks`."""
        (rows, queries, heads, group, size), slots = q, cache[1]
        if itemsize > 2:
            raise ValueError("there are cases of bfloat16 and of quantised caches")
        most = 4 * slots if seen else slots * (pages or 1)
        case = DecodeAttention(
            (most,) * rows,
            heads,
            group,
            size * arrays // 2,
            page=slots if pages else None,
            queries=queries,
            window=seen and seen - queries + 1,
            slots=slots if seen and not pages else None,
            stored="int8" if itemsize == 1 else None,
            apart=arrays == 1,
        )
        return {"full rows": case, "unequal rows": replace(case, lengths=unequal(most, rows))}

    @property
    def floor_bytes(self) -> int:
        seen = sum(min(length, (self.window or length) + self.queries - 1) for length in self.lengths)
        cell = 4 * self.size if self.stored is None else 2 * self.size + 8
        return seen * self.heads * cell

    def function(self):
        from inferlib.attention_values import AttentionOptions, KvCache, NewCells
        from inferlib.pallas_kernels.decode_attention_tpu import decode_attention

        def run(q, lengths, *, sinks=None, mask=None, new_k=None, new_v=None, **cache):
            options = AttentionOptions(self.size**-0.5, self.window, sinks=sinks, key_size=self.key_size)
            stored = KvCache(**cache, layer=0, ring=self.slots is not None)
            new = NewCells([x for x in (new_k, new_v) if x is not None]) if self.writes else None
            return decode_attention(q, stored, lengths, options, new=new, mask=mask)

        return run

    @property
    def pages(self) -> np.ndarray | None:
        return None if self.page is None else shuffled_pages(self.lengths, self.page)

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        rows, slots = len(self.lengths), self.page or self.slots or -(-max(self.lengths) // 128) * 128
        count = rows if (pages := self.pages) is None else pages.size
        heads, group, size = self.layout
        cache = (4, count, heads, slots, size), self.stored or "bfloat16"
        q = (rows, self.queries, heads, group, size), "bfloat16"
        arrays = {"q": q, "k": cache} | ({} if self.one else {"v": cache}) | {"lengths": ((rows,), "int32")}
        if self.stored:
            arrays |= dict.fromkeys(("k_scales", "v_scales"), (cache[0][:-1], "float32"))
        if self.sinks:
            arrays["sinks"] = (heads, group), "bfloat16"
        if self.writes:
            names = ("new_k",) if self.one else ("new_k", "new_v")
            arrays |= dict.fromkeys(names, ((rows, self.queries, heads, size), "bfloat16"))
        if self.tree:
            arrays["mask"] = (rows, self.queries, self.queries), "bool"
        return arrays if pages is None else {**arrays, "pages": (pages.shape, "int32")}

    def scalars(self) -> dict[int, np.ndarray]:
        from inferlib.attention_values import AttentionOptions, KvCache
        from inferlib.pallas_kernels.decode_attention_tpu import kernel_of
        from inferlib.pallas_kernels.decode_call_tpu import Call

        shapes: dict[str, Any] = {name: jax.ShapeDtypeStruct(*array) for name, array in self.arguments().items()}
        arrays: list[Any] = [shapes.get(name) for name in ("k", "v", "k_scales", "v_scales")]
        pages = None if self.pages is None else jnp.asarray(self.pages)
        cache = KvCache(*arrays, layer=0, ring=self.slots is not None, pages=pages)
        options = AttentionOptions(self.size**-0.5, self.window)
        call = Call(shapes["q"].shape, cache, options, writes=self.writes, interpret=False)
        scalars = call.scalars(kernel_of(call), jnp.array(self.lengths), None)
        return dict(enumerate(map(np.asarray, jax.tree.leaves(scalars))))


BATCH, LONG = (4096,) * 32, (131072,)
CASES = {
    "A": DecodeAttention(BATCH),
    "F": DecodeAttention(BATCH, heads=8),
    "L": DecodeAttention(LONG),
    "LF": DecodeAttention(LONG, heads=8),
    "A, page 128": DecodeAttention(BATCH, page=128),
    "F, page 128": DecodeAttention(BATCH, heads=8, page=128),
    "L, page 128": DecodeAttention(LONG, page=128),
    "LF, page 128": DecodeAttention(LONG, heads=8, page=128),
    "A, page 16": DecodeAttention(BATCH, page=16),
    "F, page 16": DecodeAttention(BATCH, heads=8, page=16),
    "uneven": DecodeAttention(UNEVEN),
    "uneven, 8 heads": DecodeAttention(UNEVEN, heads=8),
    "short": DecodeAttention(SHORT),
    "short, 8 heads": DecodeAttention(SHORT, heads=8),
    "A, head 64": DecodeAttention(BATCH, size=64),
    "F, head 64": DecodeAttention(BATCH, heads=8, size=64),
    "A, head 80": DecodeAttention(BATCH, size=80),
    "F, head 80": DecodeAttention(BATCH, heads=8, size=80),
    "F, head 96": DecodeAttention(BATCH, heads=8, size=96),
    "A, head 256": DecodeAttention(BATCH, size=256),
    "A, 4 queries": DecodeAttention(BATCH, queries=4),
    "F, 4 queries": DecodeAttention(BATCH, heads=8, queries=4),
    "A, sinks": DecodeAttention(BATCH, sinks=True),
    "A, int8": DecodeAttention(BATCH, stored="int8"),
    "F, int8": DecodeAttention(BATCH, heads=8, stored="int8"),
    "A, fp8": DecodeAttention(BATCH, stored="float8_e4m3fn"),
    "F, fp8": DecodeAttention(BATCH, heads=8, stored="float8_e4m3fn"),
    "A, written": DecodeAttention(BATCH, writes=True),
    "F, written": DecodeAttention(BATCH, heads=8, writes=True),
    "A, int8, written": DecodeAttention(BATCH, stored="int8", writes=True),
    "F, int8, written": DecodeAttention(BATCH, heads=8, stored="int8", writes=True),
    "F, fp8, written": DecodeAttention(BATCH, heads=8, stored="float8_e4m3fn", writes=True),
    "A, page 16, written": DecodeAttention(BATCH, page=16, writes=True),
    "F, 4 queries, written": DecodeAttention(BATCH, heads=8, queries=4, writes=True),
    "F, head 64, written": DecodeAttention(BATCH, heads=8, size=64, writes=True),
    "F, int8, window 1024, written": DecodeAttention(
        (5000,) * 32, heads=8, window=1024, slots=1536, stored="int8", writes=True
    ),
    "F, tree of 4": DecodeAttention(BATCH, heads=8, queries=4, tree=True),
    "300, written": DecodeAttention((300,) * 64, writes=True),
    "300, page 128, written": DecodeAttention((300,) * 64, page=128, writes=True),
    "1024, written": DecodeAttention((1024,) * 128, writes=True),
    "1024, int8, written": DecodeAttention((1024,) * 128, stored="int8", writes=True),
    "window 128, sinks, written": DecodeAttention(
        (5000,) * 64, group=8, size=64, window=128, slots=256, sinks=True, writes=True
    ),
    "window 512, written": DecodeAttention((5000,) * 32, window=512, slots=768, writes=True),
    "A, window 1024": DecodeAttention((5000,) * 32, window=1024, slots=1536),
    "F, window 1024": DecodeAttention((5000,) * 32, heads=8, window=1024, slots=1536),
}
