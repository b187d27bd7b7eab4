"""Write new keys, values or latents, or their scales, into the cache.

Cells narrower than the 128 lanes of a TPU's memory may be folded: one row of the cache then holds f positions, position
p of a page in row p // (128 f) * 128 + p % 128, and there in part p // 128 % f. So 128 consecutive positions are one
part of 128 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops import int4_cells
from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.quantized import Scheme, quantize

ROWS = 128  # rows of a folded cache whose first parts are consecutive positions


def rounded(new: Sequence[jax.Array], stored: jax.Array, *, scaled: bool) -> list[jax.Array]:
    """What a cache, whose first array is `stored`, stores of `new`, [T, K, h] each: the same arrays, or, if it is
    scaled, their quantised values followed by the scales [T, K] of each; or of keys and values packed cells (see
    `inferlib.ops.int4_cells`)."""
    if stored.dtype == int4_cells.DTYPE:
        keys, values = new
        return [int4_cells.cells_of_keys(stored.shape[-1]).encode(keys), int4_cells.VALUES.encode(values)]
    if not scaled:
        return list(new)
    quantized = [quantize(x, (2,), Scheme(stored.dtype.name)) for x in new]
    return [x.values for x in quantized] + [x.scales for x in quantized]


def choose_chunk_write(cache: Sequence[Any], width: int, *, ring: bool, backend: str) -> Choice:
    """The implementation of `chunk_write` for chunks of `width` tokens and a cache's arrays, which may be shapes."""
    if backend != "pallas_tpu":
        return Choice("xla")
    from inferlib.pallas_kernels.chunk_write_tpu import unsupported

    return Choice.of(backend, unsupported(cache, width, ring=ring))


def chunk_write(
    cache: Sequence[jax.Array],
    new: Sequence[jax.Array],
    pages: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    ring: bool = False,
    backend: str = "xla",
) -> tuple[jax.Array, ...]:
    """Put token c of chunk p at page pages[p], slot slots[p] + c, modulo S in a ring; pages, slots: [P] int32.

    cache: arrays [N, K, S, h], or [L, N, K, S, h] with `layer` the layer to write, and if they are quantised then their
    scales, without h; new: [P, C, K, h] of any float type for each array of cells. A page >= N or a slot >= S writes
    nothing. backend: "xla"; "pallas_tpu", which writes whole tiles of memory, and is interpreted on CPU.
    Returns the cache.
    """
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import chunk_write_tpu

        kernel = partial(chunk_write_tpu.chunk_write, layer=0 if layer is None else layer, ring=ring)
        return run_kernel(kernel, cache, new, pages, slots)
    width, capacity = new[0].shape[1], cache[0].shape[-2]
    at = slots[:, None] + jnp.arange(width)
    at, pages = (at % capacity if ring else at).reshape(-1), jnp.repeat(pages, width)
    new = rounded([x.reshape(-1, *x.shape[2:]) for x in new], cache[0], scaled=cache[-1].ndim < cache[0].ndim)
    pairs = zip(cache, new, strict=True)
    return tuple(cache_write(x, part, pages, at, layer=layer, run=width) for x, part in pairs)


def cache_write(
    cache: jax.Array,
    new: jax.Array,
    pages: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    run: int = 1,
) -> jax.Array:
    """Put the cell of token t at page `pages[t]`, slot `slots[t]`.

    cache: [N, K, S, h], or [L, N, K, S, h] with `layer` the layer to write; or folded, [..., S / f, f * h]; new:
    [T, K, h]; all without h for scales. pages, slots: [T] int32. A page >= N or a slot >= S writes nothing: that is how
    padding and inactive rows are dropped. Pairs (page, slot) are distinct. A donated cache is updated in place. run:
    every `run` consecutive tokens are of one page; if run > 1, scales are written page by page.
    """
    if new.ndim == 2 and run > 1:
        return _write_pages(cache, new.reshape(-1, run, new.shape[1]), pages[::run], slots.reshape(-1, run), layer)
    if new.ndim == 3 and cache.shape[-1] != new.shape[2]:
        return _write_folded(cache, new, pages, slots, layer)
    # Head by head. For a slice of heads a TPU would lay the whole cache out anew; and the write of one row would become
    # a slice update, of which XLA:CPU makes two, each on a copy of the cache.
    heads = jnp.arange(new.shape[1], dtype=jnp.int32)
    at = (pages[:, None], heads, slots[:, None])
    at = at if layer is None else (layer, *at)
    return cache.at[at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)


def _write_pages(
    cache: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, layer: jax.Array | int | None
) -> jax.Array:
    """Write whole pages of scales. For a write of single numbers a TPU's compiler changes the whole cache's layout, and
    changes it back at every layer where a kernel reads the cache too."""
    count, (heads, size) = cache.shape[-3], cache.shape[-2:]
    for x, page, at in zip(new, pages, slots, strict=True):
        start = (jnp.minimum(page, count - 1), 0, 0)
        start = start if layer is None else (layer, *start)
        old = lax.dynamic_slice(cache, start, (1,) * (cache.ndim - 2) + (heads, size))
        at = jnp.where(page < count, at, size)
        merged = old.at[..., at].set(x.T, mode="drop", unique_indices=True)
        cache = lax.dynamic_update_slice(cache, merged, start)
    return cache


def _write_folded(
    cache: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, layer: jax.Array | int | None
) -> jax.Array:
    """Write whole rows, part by part: for a write that begins within a row a TPU's compiler would copy the cache.
    Positions of a chunk share rows, but not parts."""
    size, rows = new.shape[2], cache.shape[-2]
    fold, heads = cache.shape[-1] // size, jnp.arange(new.shape[1], dtype=jnp.int32)
    new = jnp.tile(new.astype(cache.dtype), (1, 1, fold))
    row, part = slots // (ROWS * fold) * ROWS + slots % ROWS, slots // ROWS % fold
    for n in range(fold):
        at = (pages[:, None], heads, jnp.where(part == n, row, rows + slots)[:, None])
        at = at if layer is None else (layer, *at)
        in_part = jnp.arange(cache.shape[-1]) // size == n
        merged = jnp.where(in_part, new, cache.at[at].get(mode="clip", unique_indices=True))
        cache = cache.at[at].set(merged, mode="drop", unique_indices=True)
    return cache


def folded_rows(slots: int, fold: int) -> int:
    """Rows of a cache that hold the first `slots` positions of a page."""
    return slots if fold == 1 else -(-slots // (ROWS * fold)) * ROWS


def unfolded(cache: jax.Array, fold: int) -> jax.Array:
    """[..., S / f, f * h] -> [..., S, h]. Parts are concatenated, since a TPU's compiler would copy for a transpose."""
    if fold == 1:
        return cache
    *lead, rows, width = cache.shape
    lines = cache.reshape(*lead, rows // ROWS, ROWS, width)
    parts = jnp.split(lines, fold, axis=-1)
    return jnp.concatenate(parts, axis=-2).reshape(*lead, rows * fold, width // fold)
