"""Decode attention on NVIDIA GPUs: one query per row over the live part of that row's cache.

XLA copies a sliced or masked cache before it reads it; this kernel reads each visible key and value once,
and nothing else. A program computes one share (a run of visible positions) of one row and KV head; if rows
have more than one share, a second small kernel merges the shares by log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import AttentionOptions, KvCache

# Chosen by measuring tiles of 4-32 KB, 1-8 warps and 1-4 stages on an H200 (jax 0.11.2, bf16, K 8, G 4,
# h 128; GB/s of live keys and values; in the same run a device memcpy moved 4204-4217 GB/s read plus written
# and x * 1.5 on 4 GB 3192-3205; XLA: einsums and softmax over the whole cache, values not masked):
#   rows x positions                        us    GB/s   XLA us
#   64 x 2048                            134.4    3995    154.4
#   8 x 32768                            265.9    4039    311.1
#   1 x 2048, shares of 128 positions      8.4     995      9.9
#   16 x 2048                             39.6    3387     44.2
#   64 x 1024 live of 8192                69.6    3858    555.2
#   64 x 1 to 2048, lengths at random     82.7    3312    150.4
#   64 x 2048, K 3, G 3, h 64             32.0    3150     36.9
TILE_BYTES = 16 * 1024
WARPS, STAGES = 4, 2
PROGRAMS = 4 * 132  # how many stay resident at once with these tiles, on the 132 SMs of an H100 or H200
FEW = 2 * 132  # up to so many programs all work at once, and a row's shares may be half as long
SHORT_SHARE, LONG_SHARE = 128, 2048
MERGED = 1024  # numbers that a program of the merging kernel takes at once


def decode_attention(
    q: jax.Array, cache: KvCache, lengths: jax.Array, options: AttentionOptions, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [B, K, G, h]: row b's query stands at position lengths[b] - 1, and its cache is page b.

    cache: k, v [N, K, S, h] with N >= B, which have the query's own key and value already; scales, layers and page
    tables are not read. A tight `limit` saves programs without work. lengths [B] int32 counts the valid positions, at
    most S except in a ring; 0 marks an inactive row (out 0, lse -inf). The kernel does not read slots that no query
    sees. interpret: run on any device.
    Returns out [B, K, G, h] in q's dtype and the log of the softmax's denominator, lse [B, K, G] float32. Raises
    ValueError for caches of other shapes and for a ring without a window.
    """
    rows, kv_heads, group, size = q.shape
    k, v, sinks = cache.k, cache.values, options.sinks
    window, ring, limit = options.shared_window, cache.ring, cache.limit
    split = dealt(k, v, rows, kv_heads, size, window=window, ring=ring, limit=limit)
    splits = split["splits"]
    page = pl.BlockSpec((None, None, *k.shape[2:]), lambda b, h, s: (b, h, 0, 0))
    parts, lses = pl.pallas_call(
        functools.partial(_kernel, scale=options.scale, softcap=options.softcap, **split),
        grid=(rows, kv_heads, splits),
        in_specs=[
            pl.BlockSpec((rows,), lambda b, h, s: (0,)),
            pl.BlockSpec((None, None, group, size), lambda b, h, s: (b, h, 0, 0)),
            page,
            page,
            None if sinks is None else pl.BlockSpec((None, group), lambda b, h, s: (h, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group, size), lambda b, h, s: (s, b, h, 0, 0)),
            pl.BlockSpec((None, None, None, group), lambda b, h, s: (s, b, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *q.shape), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *q.shape[:3]), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="decode_attention",
    )(lengths, q, k, v, sinks)
    return (parts[0], lses[0]) if splits == 1 else merge(parts, lses, q.dtype, interpret)


def dealt(
    k: jax.Array,
    v: jax.Array,
    rows: int,
    kv_heads: int,
    size: int,
    *,
    window: int | None,
    ring: bool,
    limit: int | None,
) -> dict[str, Any]:
    """How programs divide the rows of k, v [N, K, S, h]: the kernels' arguments window, ring, block, splits, programs.

    Raises ValueError if the cache does not have these rows, heads and size, and for a ring without a window.
    """
    slots = k.shape[2]
    if k.shape != v.shape or k.shape[0] < rows or (k.shape[1], k.shape[3]) != (kv_heads, size):
        raise ValueError(f"k {k.shape} and v {v.shape} must both be [N >= {rows}, {kv_heads}, S, {size}]")
    if ring:
        if window is None:
            raise ValueError("a ring cache forgets old positions: pass the layer's window")
        window = min(window, slots)
    longest = min(n for n in (None if ring else slots, window, limit) if n is not None)
    block, splits = _tiling(rows * kv_heads, power_of_two(size) * k.dtype.itemsize, longest)
    return dict(window=window, ring=ring, block=block, splits=splits, programs=PROGRAMS / kv_heads)


def _tiling(heads: int, row_bytes: int, longest: int) -> tuple[int, int]:
    """Positions per loop step, and the most shares of a row with at most `longest` visible positions.

    heads: B * K. Merging costs about 7 us at 64 x 8 heads. So rows stay whole if they fill the chip and none is so
    long that it would finish far behind the others; otherwise rows longer than the average get more shares.
    """
    block = max(TILE_BYTES // row_bytes, 16)
    even = PROGRAMS // heads
    splits = max(2 * even if even > 1 else 1, min(pl.cdiv(longest, LONG_SHARE), 8))
    short = SHORT_SHARE // 2 if heads * pl.cdiv(longest, SHORT_SHARE // 2) <= FEW else SHORT_SHARE
    return block, min(splits, pl.cdiv(longest, max(block, short)))


def power_of_two(n: int, least: int = 16) -> int:
    return max(1 << (n - 1).bit_length(), least)


def _kernel(
    lengths_ref,
    q_ref,
    k_ref,
    v_ref,
    sinks_ref,
    out_ref,
    lse_ref,
    *,
    scale,
    window,
    softcap,
    ring,
    block,
    splits,
    programs,
):
    """One share: lengths_ref [B], q_ref, out_ref [G, h], k_ref, v_ref [S, h], sinks_ref, lse_ref [G]."""
    (group, size), split = q_ref.shape, pl.program_id(2)
    # Tiles have power-of-two sides, and the tensor cores want 16 rows; masks cut the padding off.
    heads = jnp.arange(power_of_two(group))
    columns = jnp.arange(power_of_two(size))
    tile = heads[:, None], columns[None]
    in_tile = (heads < group)[:, None] & (columns < size)[None]
    compute = jnp.promote_types(q_ref.dtype, k_ref.dtype)
    q = plgpu.load(q_ref.at[tile], mask=in_tile, other=0).astype(compute)

    length, start, stop = share_of(lengths_ref, pl.program_id(0), split, window, block, splits, programs)
    top = jnp.full(heads.shape, -jnp.inf, jnp.float32)
    total = jnp.zeros(heads.shape, jnp.float32)
    if sinks_ref is not None:  # counted once, by the row's first share
        sinks = plgpu.load(sinks_ref.at[heads], mask=heads < group, other=0)
        here = (split == 0) & (length > 0)
        top, total = jnp.where(here, sinks, top), jnp.where(here, 1.0, total)
    carry = jnp.zeros((heads.size, columns.size), jnp.float32), top, total
    cells = (k_ref, v_ref, start, stop)
    acc, top, total = attend(q, cells, carry, scale=scale, softcap=softcap, ring=ring, block=block)
    store_share(acc, top, total, out_ref, lse_ref, split=splits > 1, some=start < stop)


def attend(
    q: jax.Array,
    cells: tuple,
    carry: tuple[jax.Array, jax.Array, jax.Array],
    *,
    scale: float,
    softcap: float | None,
    ring: bool,
    block: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Online softmax of queries q [R, C] over positions of a cache, in a kernel.

    cells: refs of keys and values [S, h], the first position and the one behind the last. carry: the weighted sum of
    values [R, C], the largest logit [R] and the sum of exponentials [R] so far. Returns the new carry. R and C are
    powers of two, C at least h.
    """
    k_ref, v_ref, start, stop = cells
    (slots, size), columns = k_ref.shape, jnp.arange(q.shape[1])

    def step(i, carry):
        acc, top, total = carry
        position = start + i * block + jnp.arange(block)
        seen = position < stop
        slot = lax.rem(position, slots) if ring else position
        at = slot[:, None], columns[None]
        mask = seen[:, None] if size == columns.size else seen[:, None] & (columns < size)[None]
        keys = plgpu.load(k_ref.at[at], mask=mask, other=0).astype(q.dtype)
        s = capped(plgpu.dot(q, keys, trans_b=True, precision=lax.Precision.HIGHEST) * scale, softcap)
        s = jnp.where(seen[None], s, -jnp.inf)
        new_top = jnp.maximum(top, s.max(axis=1))
        p = jnp.exp(s - new_top[:, None])
        decay = jnp.exp(top - new_top)
        values = plgpu.load(v_ref.at[at], mask=mask, other=0).astype(q.dtype)
        acc = acc * decay[:, None] + plgpu.dot(p.astype(q.dtype), values, precision=lax.Precision.HIGHEST)
        return acc, new_top, total * decay + p.sum(axis=1)

    return lax.fori_loop(0, pl.cdiv(stop - start, block), step, carry)


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def store_share(acc, top, total, out_ref, lse_ref, *, split: bool, some) -> None:
    """Store a share's result [G, h] and lse [G]; of an empty share (`some` false) only lse, as the merge skips it."""
    (group, size), heads, columns = out_ref.shape, jnp.arange(acc.shape[0]), jnp.arange(acc.shape[1])
    in_tile = (heads < group)[:, None] & (columns < size)[None]
    total = jnp.where(total > 0, total, 1.0)  # an empty share: acc 0, top -inf
    out = (acc / total[:, None]).astype(out_ref.dtype)
    at = heads[:, None], columns[None]
    plgpu.store(out_ref.at[at], out, mask=in_tile & some if split else in_tile)
    plgpu.store(lse_ref.at[heads], top + jnp.log(total), mask=heads < group)


def share_of(lengths_ref, row, split, window: int | None, block: int, splits: int, programs: float):
    """The length of a row, and where share `split` of its visible positions starts and stops."""
    length = plgpu.load(lengths_ref.at[row])
    first = 0 if window is None else jnp.maximum(length - window, 0)
    shares = 1 if splits == 1 else _shares_of(length, lengths_ref, window, splits, programs)
    share = pl.cdiv(pl.cdiv(length - first, block), shares) * block
    start = first + split * share
    return length, start, jnp.minimum(start + share, length)


def _shares_of(length, lengths_ref, window, splits, programs):
    """Shares of a row if rows get `programs` in proportion to their visible positions."""
    if lengths_ref.size == 1:
        return max(min(int(programs + 0.5), splits), 1)
    rows = jnp.arange(power_of_two(lengths_ref.size))
    visible = plgpu.load(lengths_ref.at[rows], mask=rows < lengths_ref.size, other=0)
    if window is not None:
        visible, length = jnp.minimum(visible, window), jnp.minimum(length, window)
    mean = jnp.maximum(visible.sum(axis=0), 1).astype(jnp.float32) / programs
    return jnp.clip(length.astype(jnp.float32) / mean + 0.5, 1.0, float(splits)).astype(jnp.int32)


def merge(
    parts: jax.Array, lses: jax.Array, dtype: jax.typing.DTypeLike, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Merge shares, parts [splits, *heads, h] and lses [splits, *heads], in one launch (XLA takes two).

    Parts whose lse is -inf are not read. Returns out [*heads, h] in `dtype`, lse [*heads].
    """
    splits, *heads, size = parts.shape
    count = math.prod(heads)
    # All shares of some columns are in registers at once.
    tile = min(power_of_two(size), max(MERGED // power_of_two(splits, 1), 16))
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, tile=tile),
        grid=(count, pl.cdiv(size, tile)),
        in_specs=[
            pl.BlockSpec((splits, None, size), lambda i, n: (0, i, 0)),
            pl.BlockSpec((splits, None), lambda i, n: (0, i)),
        ],
        out_specs=[pl.BlockSpec((None, size), lambda i, n: (i, 0)), pl.BlockSpec((None,), lambda i, n: (i,))],
        out_shape=[
            jax.ShapeDtypeStruct((count, size), dtype),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="merge_shares",
    )(parts.reshape(splits, count, size), lses.reshape(splits, count))
    return out.reshape(*heads, size), lse.reshape(heads)


def _merge_kernel(parts_ref, lses_ref, out_ref, lse_ref, *, tile):
    """A tile of one query head's columns: parts_ref [splits, h], lses_ref [splits], out_ref [h], lse_ref scalar."""
    splits, size = parts_ref.shape
    shares, columns = jnp.arange(power_of_two(splits, 1)), pl.program_id(1) * tile + jnp.arange(tile)
    lses = plgpu.load(lses_ref.at[shares], mask=shares < splits, other=-jnp.inf)
    top = lses.max(axis=0)
    weight = jnp.exp(lses - jnp.where(top > -jnp.inf, top, 0.0))
    total = weight.sum(axis=0)
    total = jnp.where(total > 0, total, 1.0)  # an inactive row: weights 0, top -inf
    written = (lses > -jnp.inf)[:, None] & (columns < size)[None]
    parts = plgpu.load(parts_ref.at[shares[:, None], columns[None]], mask=written, other=0)
    out = (parts * weight[:, None]).sum(axis=0) / total
    plgpu.store(out_ref.at[columns], out.astype(out_ref.dtype), mask=columns < size)
    plgpu.store(lse_ref, top + jnp.log(total))  # the same from each tile
