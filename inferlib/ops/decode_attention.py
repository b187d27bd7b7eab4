"""Attention of each row's newest tokens over the row's cache, which it may write."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.attention import AttentionOptions, masked_attention, merge_attention, slot_positions, visible
from inferlib.ops.by_platform import by_platform
from inferlib.ops.cache_write import cache_write, rounded
from inferlib.ops.choice import Choice
from inferlib.ops.int4_cells import VALUES
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.kv_cache import KvCache, LatentCache, NewCells, Shaped, gather_pages, shape_of

Cache = TypeVar("Cache", KvCache, LatentCache)

# Implementations that read one layer of a stacked cache where it lies, and write new cells there.
IN_PLACE = frozenset({"pallas_tpu"})
_BLOCK = 512  # positions that XLA's form gathers at a time on CPUs
# Most queries of a row and KV head, if the row has several: what fits in registers, and in the partitions of a core.
_MOST_ON_GPUS, _MOST_ON_TRAINIUM = 64, 128


def choose(
    cache: KvCache, window: int | jax.Array | None, backend: str, q: Shaped | None = None, *, new: bool = False
) -> Choice:
    """The implementation for a cache, whose arrays may be shapes.

    window: an array, or its shape, if it is each query's own. q: the queries [B, C, K, G, h]; None: they are not known
    yet, and what the kernel for TPUs lacks for their shapes is not asked. new: the implementation writes new cells.
    """
    if backend == "xla":
        return Choice(backend)
    return Choice.of(backend, _lacks(cache, window, backend, q, new))


def _lacks(cache: KvCache, window, backend: str, q: Shaped | None, new: bool) -> str | None:
    if cache.packed:
        return "a cache of int4"
    if cache.scaled and backend != "pallas_tpu":
        return "a cache of int8 or fp8"
    if cache.v is not None and cache.v.shape[-1] != cache.k.shape[-1] and backend != "pallas_tpu":
        return "values of another size than keys"
    if not isinstance(window, int | None):
        return "chunked attention"
    if backend == "pallas_gpu":
        from inferlib.pallas_kernels.row_cells_gpu import unsupported_pages

        return unsupported_pages(cache.k.shape[-2], cache.columns) or _too_many(q, _MOST_ON_GPUS)
    if q is None or backend == "nki":
        return _too_many(q, _MOST_ON_TRAINIUM)
    from inferlib.pallas_kernels.decode_attention_tpu import unsupported

    return unsupported(shape_of(q), cache, window=window, new=new)


def _too_many(q: Shaped | None, most: int) -> str | None:
    """Why a kernel does not take these queries of a row, if it takes `most` of a KV head."""
    if q is None or q.shape[1] == 1 or q.shape[1] * q.shape[3] <= most:
        return None
    return f"{q.shape[1]} x {q.shape[3]} queries of a KV head exceed {most}"


def decode_attention(
    q: jax.Array,
    cache: KvCache,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    new: NewCells | None = None,
    mask: jax.Array | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array, KvCache]:
    """q [B, K, G, h]: row b's query is at position lengths[b] - 1; or [B, C, K, G, h]: at the last C positions.

    lengths [B] int32 counts the positions written, at most `cache.limit`; 0 marks an inactive row (out 0, lse -inf),
    and a query whose position would be negative sees nothing. In a ring there are at least window + C - 1 slots.
    options.window: one for all queries, or [B] or [B, C] of each, which only "xla" takes. new: cells of the new tokens,
    written before they are read; without, they are in the cache already. "pallas_tpu" writes them where they lie, and
    other cells of their tiles anew. mask [B, C, C] bool: which of a row's new tokens each of its queries sees, of those
    up to its own; without, all. Draft trees are verified with it: a token sees its ancestors. Slots that no query sees
    may hold anything, NaN included.
    backend: "xla"; "nki" for Trainium and "pallas_gpu", without scales or a mask; "pallas_tpu". Those in Pallas are
    interpreted on CPU. All but "xla" read live positions only. Packed cells are read by "xla" alone.
    Returns out in q's shape and dtype, lse [B, K, G] or [B, C, K, G] float32, and the cache, with `new` in it. Raises
    ValueError for what the backend does not take.
    """
    if backend != "xla" and isinstance(options.window, jax.Array):
        raise ValueError(f"backend {backend!r} takes one window for all rows; use xla")
    if backend != "xla" and cache.packed:
        raise ValueError(f"backend {backend!r} takes no packed cells; use xla")
    if backend not in ("xla", "pallas_tpu") and (cache.scaled or mask is not None):
        lacking = "scales of keys and values" if cache.scaled else "mask of new tokens"
        raise ValueError(f"backend {backend!r} takes no {lacking}; use xla")
    if new is not None and backend not in IN_PLACE:
        cache, new = write_new(cache, new, lengths), None
    if backend == "pallas_gpu":
        return *_by_gpu_kernel(q, cache, lengths, options), cache
    single = q.ndim == 4
    if single:
        new = new and replace(new, cells=[x[:, None] for x in new.cells])
        q = q[:, None]
    if backend == "pallas_tpu":
        out, lse, cache = _by_tpu_kernel(q, cache, lengths, options, new, mask)
    elif backend == "nki":
        out, lse = _by_nki_kernel(q, cache, lengths, options)
    else:
        block = max(1, _BLOCK // cache.k.shape[-2])  # columns
        whole = partial(_by_xla, q, cache, lengths, options, mask)
        if cache.ring or mask is not None or (cache.columns or 0) <= block:
            out, lse = whole()
        else:
            blocks = partial(_by_blocks, q, cache, lengths, options, block)
            out, lse = by_platform(cpu=blocks, default=whole)
    out, lse = (out[:, 0], lse[:, 0]) if single else (out, lse)
    if backend == "pallas_tpu" and options.key_size:  # XLA drops this where it is cut off, if nothing lies between
        out = jnp.pad(out, ((0, 0),) * (out.ndim - 1) + ((options.key_size, 0),))
    return out, lse, cache


def _by_gpu_kernel(q, cache: KvCache, lengths, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    from inferlib.pallas_kernels.decode_attention_gpu import decode_attention as kernel

    def run(q, k, v, lengths, *, interpret: bool):
        return kernel(q, replace(cache, k=k, v=v), lengths, options, interpret=interpret)

    return run_kernel(run, q, cache.k, cache.v, lengths)


def _by_nki_kernel(q, cache: KvCache, lengths, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    from inferlib.nki_kernels.flash_decode import flash_decode

    return flash_decode(q, cache, lengths, options)


def _by_tpu_kernel(
    q, cache: KvCache, lengths, options: AttentionOptions, new: NewCells | None, mask
) -> tuple[jax.Array, jax.Array, KvCache]:
    from inferlib.pallas_kernels import decode_attention_tpu

    def run(q, k, v, lengths, *, interpret: bool):
        of_call = replace(cache, k=k, v=v)
        return decode_attention_tpu.decode_attention(
            q, of_call, lengths, options, new=new, mask=mask, interpret=interpret
        )

    out, lse, *arrays = run_kernel(run, q, cache.k, cache.v, lengths)
    return out, lse, cache.with_arrays(arrays) if arrays else cache


def _by_xla(q, cache: KvCache, lengths, options: AttentionOptions, mask) -> tuple[jax.Array, jax.Array]:
    rows, queries = q.shape[:2]
    slots, window = cache.slots, _of_queries(options.window)

    def cells(x: jax.Array) -> jax.Array:
        """The rows' part of one of the cache's arrays, [B, K, slots, ...]."""
        x = cache.of_layer(x) if cache.pages is None else gather_pages(x, cache.pages, cache.layer)
        return x[:rows, :, :slots]

    positions = lengths[:, None] - queries + jnp.arange(queries)
    stored = slot_positions(lengths - 1, slots, cache.ring)
    seen = visible(positions, stored, window)
    if mask is not None:
        index = stored - positions[:, :1]  # which of the new tokens a slot holds, negative if none
        allowed = jnp.take_along_axis(mask, jnp.clip(index, 0, queries - 1)[:, None], axis=2)
        seen &= (index < 0)[:, None] | allowed
    k, v = cells(cache.k), cells(cache.values)
    scales = cache.scales and (cells(cache.scales[0]), cells(cache.scales[1]))
    out, lse = masked_attention(q, k, v, seen, options, scales=scales)
    return out, jnp.where(lengths[:, None, None, None] > 0, lse, -jnp.inf)


def _of_queries(window: int | jax.Array | None) -> int | jax.Array | None:
    """[B, C] of each query, where each row or query has its own."""
    return window[:, None] if isinstance(window, jax.Array) and window.ndim == 1 else window


def _by_blocks(q, cache: KvCache, lengths, options: AttentionOptions, block: int) -> tuple[jax.Array, jax.Array]:
    """`_by_xla` over `block` columns of the page table after the other, as far as the longest row goes. On CPUs, which
    gather a row's pages in memory, for GPUs would wait for the host at each step of such a loop."""
    assert cache.pages is not None
    size, (rows, queries) = cache.k.shape[-2], q.shape[:2]
    pages = cache.pages[:rows]
    pages = jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % block)))
    positions, window = lengths[:, None] - queries + jnp.arange(queries), options.window
    window, parts = _of_queries(window), replace(options, sinks=None)

    def body(i, carry):
        columns = lax.dynamic_slice_in_dim(pages, i * block, block, axis=1)
        cells = lambda x: gather_pages(x, columns, cache.layer)  # noqa: E731
        stored = i * block * size + jnp.arange(block * size)
        seen = visible(positions, jnp.broadcast_to(stored, (rows, stored.size)), window)
        scales = cache.scales and (cells(cache.scales[0]), cells(cache.scales[1]))
        part = masked_attention(q.astype(jnp.float32), cells(cache.k), cells(cache.values), seen, parts, scales=scales)
        out, lse = (jnp.stack(pair) for pair in zip(carry, part, strict=True))
        return merge_attention(out, lse)

    width = cache.values.shape[-1]
    shape = (*q.shape[:-1], VALUES.size(width) if cache.packed else width)
    nothing = jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf)
    out, lse = lax.fori_loop(0, -(-jnp.max(lengths) // (block * size)), body, nothing)
    out, lse = merge_attention(out[None], lse[None], sinks=options.sinks)
    return out.astype(q.dtype), jnp.where(lengths[:, None, None, None] > 0, lse, -jnp.inf)


def write_new(cache: Cache, new: NewCells, lengths: jax.Array) -> Cache:
    """The cache with the cells of the last tokens of `lengths` positions, by XLA."""
    arrays, pages, ring = cache.arrays, cache.pages, isinstance(cache, KvCache) and cache.ring
    cells = [x[:, None] if x.ndim == 3 else x for x in new.cells]
    (rows, queries), (count, _, slots) = cells[0].shape[:2], arrays[0].shape[-4:-1]
    positions, row = lengths[:, None] - queries + jnp.arange(queries), jnp.arange(rows)[:, None]
    written = (positions >= 0) & (lengths[:, None] > 0)
    written = written if new.written is None else written & (jnp.arange(queries) >= queries - new.written[:, None])
    positions = positions % (slots * (1 if pages is None else pages.shape[1])) if ring else positions
    page = row if pages is None else jnp.take_along_axis(pages, jnp.maximum(positions, 0) // slots, axis=1)
    at = jnp.where(written, page, count + row).reshape(-1), (positions % slots).reshape(-1)
    cells = [x.reshape(-1, *x.shape[2:]) for x in cells]
    cells = rounded(cells, arrays[0], scaled=arrays[-1].ndim < arrays[0].ndim)
    pairs = zip(arrays, cells, strict=True)
    return cache.with_arrays([cache_write(x, part, *at, layer=cache.layer) for x, part in pairs])
