"""Attention of each row's newest tokens over the row's cache of latents, by queries in the latents' space."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from inferlib.ops.attention import AttentionOptions, masked_attention, slot_positions, visible
from inferlib.ops.cache_write import unfolded
from inferlib.ops.choice import Choice
from inferlib.ops.decode_attention import write_new
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.kv_cache import LatentCache, NewCells, Shaped, gather_pages, shape_of

# Implementations that read one layer of a stacked cache where it lies.
IN_PLACE = frozenset({"pallas_tpu"})
# Implementations that write new cells where they lie, in caches that are not stacked.
WRITING = frozenset({"pallas_gpu"})


def choose(rank: int, rotary: int, backend: str, *, scaled: bool) -> Choice:
    """The implementation for latents of `rank` and rotary keys of `rotary` numbers, quantised if `scaled`."""
    if backend == "xla":
        return Choice(backend)
    if scaled and backend != "pallas_tpu":
        return Choice("xla", "a cache of int8 or fp8")
    if backend == "pallas_gpu":
        from inferlib.pallas_kernels.mla_decode_attention_gpu import fits

        tiles = fits(rank, rotary)
    elif backend == "nki":
        from inferlib.nki_kernels.mla_decode import fits

        tiles = fits(rank, rotary)
    else:
        tiles = rank % 128 == 0 and rotary in (32, 64, 128)
    return Choice.of(backend, None if tiles else f"latents of {rank} and rotary keys of {rotary}")


def choose_for(q: Shaped, cache: LatentCache, backend: str) -> Choice:
    """The implementation for queries with their rotary part [B, C, H, R + r] and a cache, whose arrays may be shapes,
    where `choose` has taken the backend's."""
    if backend == "pallas_gpu":
        from inferlib.pallas_kernels.row_cells_gpu import unsupported_pages

        return Choice.of(backend, unsupported_pages(cache.latents.shape[-2], cache.columns))
    if backend == "xla":
        return Choice(backend)
    if backend == "nki":
        from inferlib.nki_kernels.mla_decode import unsupported
    else:
        from inferlib.pallas_kernels.mla_decode_attention_tpu import unsupported

    shapes = map(shape_of, (q, cache.latents, cache.keys))
    return Choice.of(backend, unsupported(*shapes, pages=cache.columns))


def mla_decode_attention(
    q: jax.Array,
    rotary: jax.Array,
    cache: LatentCache,
    lengths: jax.Array,
    *,
    scale: float,
    new: NewCells | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array, LatentCache]:
    """q [B, H, R] and rotary [B, H, r]: row b's query, at position lengths[b] - 1: H heads taken to the latents' R
    dimensions, and their rotary part; or [B, C, H, R] and [B, C, H, r]: at the last C positions.

    lengths: as in `decode_attention`. scale multiplies the logits. new: latents [B, 1, R] and rotary keys [B, 1, r] of
    the new tokens, or [B, C, 1, ...], written before they are read; without, they are in the cache already.
    backend: "xla", the only one that takes scales; "pallas_tpu", which reads live pages only; "pallas_gpu", which reads
    live positions only (the cache of one layer), and writes new cells of one query a row where they lie; several
    queries are rows of their own to it, whose cells are written before; "nki" for Trainium, which reads pages with live
    positions only. Those in Pallas are interpreted on CPU.
    Returns out in q's shape and dtype, lse [B, H] or [B, C, H] float32, and the cache, with `new` in it. Raises
    ValueError for what the backend does not take.
    """
    if backend != "xla" and cache.scales is not None:
        raise ValueError(f"backend {backend!r} takes no scales of latents; use xla")
    single = q.ndim == 3
    if backend == "pallas_gpu" and single:
        return _by_gpu_kernel(q, rotary, cache, lengths, scale, new)
    if new is not None:
        cache = write_new(cache, new, lengths)
    if backend == "pallas_gpu":
        return *_apart(q, rotary, cache, lengths, scale), cache
    if single:
        q, rotary = q[:, None], rotary[:, None]
    run = {"pallas_tpu": _by_tpu_kernel, "nki": _by_nki_kernel}.get(backend, _by_xla)
    out, lse = run(q, rotary, cache, lengths, scale)
    return (out[:, 0], lse[:, 0], cache) if single else (out, lse, cache)


def _by_gpu_kernel(
    q, rotary, cache: LatentCache, lengths, scale: float, new: NewCells | None
) -> tuple[jax.Array, jax.Array, LatentCache]:
    if cache.layer is not None and (cache.pages is None or new is not None):
        raise ValueError("backend 'pallas_gpu' takes a stack of layers with a page table, and writes to none; use xla")
    from inferlib.pallas_kernels import mla_decode_attention_gpu

    def run(q, rotary, latents, keys, lengths, cells, *, interpret: bool):
        of_call, added = replace(cache, latents=latents, keys=keys), None if cells is None else NewCells(cells)
        kernel = mla_decode_attention_gpu.mla_decode_attention
        return kernel(q, rotary, of_call, lengths, scale, new=added, interpret=interpret)

    operands = q, rotary, cache.latents, cache.keys, lengths, new and new.cells
    out, lse, *arrays = run_kernel(run, *operands)
    return out, lse, cache.with_arrays(arrays) if arrays else cache


def _apart(q, rotary, cache: LatentCache, lengths, scale: float) -> tuple[jax.Array, jax.Array]:
    """The attention of C queries of each row as if each were the query of a row that ends there. On the chip, what the
    queries of a row see is read from memory about once."""
    rows, queries = q.shape[:2]
    ends = jnp.maximum(lengths[:, None] - queries + 1 + jnp.arange(queries), 0).reshape(-1)
    pages = jnp.arange(rows)[:, None] if cache.pages is None else cache.pages
    q, rotary = (x.reshape(-1, *x.shape[2:]) for x in (q, rotary))
    cache = replace(cache, pages=jnp.repeat(pages, queries, axis=0))
    out, lse, _ = _by_gpu_kernel(q, rotary, cache, ends, scale, None)
    return out.reshape(rows, queries, *out.shape[1:]), lse.reshape(rows, queries, -1)


def _by_tpu_kernel(q, rotary, cache: LatentCache, lengths, scale: float) -> tuple[jax.Array, jax.Array]:
    from inferlib.pallas_kernels import mla_decode_attention_tpu

    q = jnp.concatenate([q, rotary], axis=-1)
    latents, keys = jnp.squeeze(cache.latents, -3), jnp.squeeze(cache.keys, -3)

    def run(q, latents, keys, lengths, *, interpret: bool):
        of_call = replace(cache, latents=latents, keys=keys)
        return mla_decode_attention_tpu.mla_decode_attention(q, of_call, lengths, scale, interpret=interpret)

    return run_kernel(run, q, latents, keys, lengths)


def _by_nki_kernel(q, rotary, cache: LatentCache, lengths, scale: float) -> tuple[jax.Array, jax.Array]:
    from inferlib.nki_kernels.mla_decode import mla_decode

    if cache.layer is not None:
        cache = replace(cache, latents=cache.latents[cache.layer], keys=cache.keys[cache.layer], layer=None)
    return mla_decode(q, rotary, cache, lengths, scale)


def _by_xla(q, rotary, cache: LatentCache, lengths, scale: float) -> tuple[jax.Array, jax.Array]:
    rows, queries = q.shape[:2]
    if cache.pages is not None:
        arrays = tuple(gather_pages(x, cache.pages, cache.layer) for x in cache.arrays)
    else:
        arrays = cache.arrays if cache.layer is None else tuple(x[cache.layer] for x in cache.arrays)
    arrays = arrays[0], unfolded(arrays[1], cache.fold(rotary.shape[-1])), *arrays[2:]
    slots = arrays[0].shape[2] if cache.limit is None else min(cache.limit, arrays[0].shape[2])
    latents, keys, *scales = (x[:rows, :, :slots] for x in arrays)
    of_latents, of_keys = scales or (None, None)
    positions = lengths[:, None] - queries + jnp.arange(queries)
    seen = visible(positions, slot_positions(lengths - 1, slots, ring=False), None)
    scales = None if of_latents is None else (of_latents, of_latents)
    apart = rotary[:, :, None], keys, of_keys
    q, options = q[:, :, None], AttentionOptions(scale)
    out, lse = masked_attention(q, latents, latents, seen, options, scales=scales, rotary=apart)
    return out[:, :, 0], jnp.where(lengths[:, None, None] > 0, lse[:, :, 0], -jnp.inf)
