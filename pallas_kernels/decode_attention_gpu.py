"""Decode attention on NVIDIA GPUs: the newest queries of each row over the live part of that row's cache.

XLA copies a sliced or masked cache before it reads it; this kernel reads each visible key and value once,
and nothing else. A program computes one share (a run of visible positions) of one row and KV head; if rows
have more than one share, a second small kernel merges the shares by log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.pallas_kernels.lowered_once import call_lowered
from inferlib.pallas_kernels.processors_gpu import PROCESSORS
from inferlib.pallas_kernels.row_cells_gpu import RowCells, of_one_layer, page_specs, unsupported_pages

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
WARPS = 4
CONCURRENT = 2 * PROCESSORS  # up to so many programs all work at once, and shares may be half as long
EVEN_SHARE = 1024  # rows get equal shares if none is longer than so many positions
SHORT_SHARE, LONG_SHARE = 128, 2048
MERGED = 1024  # numbers that a program of the merging kernel takes at once
MERGING = 1024  # programs from which on each merges several heads


class Launch(NamedTuple):
    """resident: programs to divide the rows into, if they are long enough. stages: blocks that a program has loads of
    under way for. warps: of a program."""

    resident: int
    stages: int
    warps: int = WARPS


# BALANCED: longer rows get more shares, of more programs than work at once. EVEN: equal shares, of as many programs as
# work at once, each with more loads under way. (Attention of 8B, eight partial sums of its projection and the merge
# included, one H200, us: 8 rows x 2,176 positions 26.8 and 24.4, 16 x 2,048 41.7 and 39.5; one row of 2,048 and seven
# of 256 16.4 and 15.9.)
# Even shares of one query take less time with two warps than with four (pages of 128, us: 4 rows x 2,040 positions 11.7
# and 12.2, 8 x 2,064 20.8 and 21.1, 16 x 2,040 35.6 and 36.0). With eight queries they take 17 to 25 % longer, and
# BALANCED shares 1 to 5 %.
BALANCED, EVEN = Launch(4 * PROCESSORS, stages=2), Launch(CONCURRENT, stages=3, warps=2)


def decode_attention(
    q: jax.Array, cache: KvCache, lengths: jax.Array, options: AttentionOptions, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [B, K, G, h]: row b's query stands at position lengths[b] - 1; or [B, C, K, G, h]: at the last C.

    cache: k, v [N, K, S, h], which have the queries' own keys and values already; scales are not read. Row b's cache is
    page b, N >= B, or the pages of its row of a table, which may be those of a layer of a stack. A tight `limit` saves
    programs without work. lengths [B] int32 counts the valid positions, at most the row's slots except in a ring; 0
    marks an inactive row (out 0, lse -inf). The kernel does not read slots that no query sees. interpret: run on any
    device.
    Returns out in q's shape and dtype and the log of the softmax's denominator, lse [B, (C,) K, G] float32. Raises
    ValueError for caches of other shapes and for a ring without a window.
    """
    cache = of_one_layer(cache)
    if q.ndim == 5:
        rows, queries, kv_heads, group, size = q.shape
        sinks = None if options.sinks is None else jnp.tile(options.sinks, (1, queries))
        of_head = jnp.moveaxis(q, 1, 2).reshape(rows, kv_heads, queries * group, size)
        parts = _attend(of_head, cache, lengths, options, sinks, queries, interpret)
        out, lse = (jnp.moveaxis(x.reshape(rows, kv_heads, queries, group, *x.shape[3:]), 2, 1) for x in parts)
        return out, lse
    return _attend(q, cache, lengths, options, options.sinks, 1, interpret)


def _attend(
    q: jax.Array,
    cache: KvCache,
    lengths: jax.Array,
    options: AttentionOptions,
    sinks: jax.Array | None,
    queries: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, K, C * G, h], `queries` C of a row, with sinks [K, C * G]."""
    parts, lses = attend_shares(q, cache, lengths, options, sinks, queries, interpret)
    return (parts[0], lses[0]) if parts.shape[0] == 1 else merge(parts, lses, q.dtype, interpret)


def attend_shares(
    q: jax.Array,
    cache: KvCache,
    lengths: jax.Array,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
    queries: int = 1,
    interpret: bool = False,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, K, C * G, h], `queries` C of a row, with sinks [K, C * G], to each share of the rows.

    launch: by default as `tiling` chooses.

    Returns [splits, B, K, C * G, h], in q's dtype if rows are whole, else float32; and lses [splits, B, K, C * G],
    -inf of shares that are empty, whose other numbers may be anything.
    """
    weighing = options.scale, options.shared_window, options.softcap
    return call_lowered(_attend_shares, (weighing, queries, launch), q, cache, lengths, sinks, interpret=interpret)


def _attend_shares(
    weighing: tuple[float, int | None, float | None],
    queries: int,
    launch: Launch | None,
    q: jax.Array,
    cache: KvCache,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    (rows, kv_heads, group, size), (scale, window, softcap) = q.shape, weighing
    split, launch = dealt(cache, rows, kv_heads, size, window=window, queries=queries, launch=launch)
    splits, (page, table) = split["splits"], page_specs(cache.k, cache.pages, 0, 1)
    kernel = functools.partial(_kernel, scale=scale, softcap=softcap, queries=queries, **split)
    return pl.pallas_call(
        kernel,
        grid=(rows, kv_heads, splits),
        in_specs=[
            pl.BlockSpec((rows,), lambda b, h, s: (0,)),
            pl.BlockSpec((None, None, group, size), lambda b, h, s: (b, h, 0, 0)),
            page,
            page,
            None if sinks is None else pl.BlockSpec((None, group), lambda b, h, s: (h, 0)),
            table,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group, size), lambda b, h, s: (s, b, h, 0, 0)),
            pl.BlockSpec((None, None, None, group), lambda b, h, s: (s, b, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *q.shape), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *q.shape[:3]), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name="decode_attention",
    )(lengths, q, cache.k, cache.values, sinks, cache.pages)


def dealt(
    cache: KvCache,
    rows: int,
    kv_heads: int,
    size: int,
    *,
    window: int | None,
    queries: int = 1,
    launch: Launch | None = None,
) -> tuple[dict[str, Any], Launch]:
    """How programs divide the rows of a cache: the kernels' arguments window, ring, block, splits, programs; and how
    the kernel is launched.

    queries: of a row. launch: None as `tiling` chooses. Raises ValueError if the cache does not have these rows, heads
    and size, for pages that are no multiple of 16, and for a ring without a window.
    """
    k, v, ring, columns = cache.k, cache.values, cache.ring, cache.columns
    if k.shape != v.shape or (columns is None and k.shape[0] < rows) or (k.shape[1], k.shape[3]) != (kv_heads, size):
        raise ValueError(f"k {k.shape} and v {v.shape} must both be [N >= {rows}, {kv_heads}, S, {size}]")
    if reason := unsupported_pages(k.shape[2], columns):
        raise ValueError(reason)
    slots = k.shape[2] * (columns or 1)
    if ring:
        if window is None:
            raise ValueError("a ring cache forgets old positions: pass the layer's window")
        window = min(window, slots)
    visible = None if window is None else window + queries - 1
    longest = min(n for n in (None if ring else slots, visible, cache.limit) if n is not None)
    block, splits, launch = tiling(rows * kv_heads, power_of_two(size) * k.dtype.itemsize, longest, launch)
    block = block if columns is None else math.gcd(block, k.shape[2])
    launch = launch if queries == 1 else launch._replace(warps=WARPS)
    programs = launch.resident / kv_heads
    return dict(window=window, ring=ring, block=block, splits=splits, programs=programs), launch


def tiling(heads: int, row_bytes: int, longest: int, launch: Launch | None = None) -> tuple[int, int, Launch]:
    """Positions per loop step, the most shares of a row with at most `longest` visible positions, and the launch.

    heads: B * K. launch: None chooses. Merging costs about 7 us at 64 x 8 heads. So rows stay whole if they fill the
    chip and none is so long that it would finish far behind the others; otherwise rows longer than the average get more
    shares, unless even shares are short enough.
    """
    block, even = max(TILE_BYTES // row_bytes, 16), CONCURRENT // heads
    fits = block * row_bytes <= TILE_BYTES  # an SM's memory has room for more stages
    if launch is None and fits and longest <= even * EVEN_SHARE:
        launch, splits = EVEN, even
    else:
        launch = launch or BALANCED
        even = launch.resident // heads
        splits = max(2 * even if even > 1 else 1, min(pl.cdiv(longest, LONG_SHARE), 8))
    short = SHORT_SHARE // 2 if heads * pl.cdiv(longest, SHORT_SHARE // 2) <= CONCURRENT else SHORT_SHARE
    return block, min(splits, pl.cdiv(longest, max(block, short))), launch


def power_of_two(n: int, least: int = 16) -> int:
    return max(1 << (n - 1).bit_length(), least)


def _kernel(
    lengths_ref,
    q_ref,
    k_ref,
    v_ref,
    sinks_ref,
    table_ref,
    out_ref,
    lse_ref,
    *,
    scale,
    window,
    softcap,
    queries,
    ring,
    block,
    splits,
    programs,
):
    """One share of `queries` C: lengths_ref [B], q_ref, out_ref [C * G, h], k_ref, v_ref [S, h] or, with table_ref [M],
    [N, K, S, h], sinks_ref, lse_ref [C * G]."""
    (group, size), split = q_ref.shape, pl.program_id(2)
    # Tiles have power-of-two sides, and the tensor cores want 16 rows; masks cut the padding off.
    heads = jnp.arange(power_of_two(group))
    columns = jnp.arange(power_of_two(size))
    tile = heads[:, None], columns[None]
    in_tile = (heads < group)[:, None] & (columns < size)[None]
    compute = jnp.promote_types(q_ref.dtype, k_ref.dtype)
    q = plgpu.load(q_ref.at[tile], mask=in_tile, other=0).astype(compute)

    cells = RowCells(k_ref, table_ref, pl.program_id(1), block, ring)
    visible = window if window is None else window + queries - 1
    dealing: dict[str, Any] = dict(
        visible=visible, block=block, splits=splits, programs=programs, paged=table_ref is not None
    )
    share = share_of(lengths_ref, pl.program_id(0), split, **dealing)
    page = cells.page(share.start)
    real = heads < group
    top, total = sums_before(sinks_ref, heads, real, (split == 0) & (share.length > 0))
    spans = None
    if queries > 1:
        last = share.length - queries + jnp.minimum(heads // (group // queries), queries - 1)
        spans = jnp.zeros_like(last) if window is None else last - window + 1, last
    carry = jnp.zeros((heads.size, columns.size), jnp.float32), top, total, *page
    acc, top, total = attend(q, (cells, v_ref), share, carry, scale=scale, softcap=softcap, spans=spans)
    written = real & (share.start < share.stop) if splits > 1 else real
    store_share((acc, top, total), out_ref, lse_ref, (heads,), written, real)


class Share(NamedTuple):
    """A program's part of a row's positions, from `start` to before `stop`.

    length: of the row. first: positions before it are not seen; None: none of them is in the share.
    """

    length: jax.Array
    first: jax.Array | int | None
    start: jax.Array
    stop: jax.Array


def sums_before(sinks_ref, heads: jax.Array, real: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit and the sum of exponentials [R] of queries that have seen no position.

    heads [R]: of each query, the place of its sink in sinks_ref, which may be None. real [R]: queries that exist. The
    row's `first` share counts the sinks.
    """
    top, total = jnp.full(real.shape, -jnp.inf, jnp.float32), jnp.zeros(real.shape, jnp.float32)
    if sinks_ref is None:
        return top, total
    sinks = plgpu.load(sinks_ref.at[heads], mask=real, other=0).astype(jnp.float32)
    return jnp.where(first, sinks, top), jnp.where(first, 1.0, total)


def attend(
    q: jax.Array,
    cache: tuple[RowCells, Any],
    share: Share,
    carry: tuple[jax.Array, ...],
    *,
    scale: float,
    softcap: float | None,
    spans: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Online softmax of queries q [R, C] over a share of a row's positions, in a kernel.

    cache: cells of keys, and the ref of values, which has the same shape. carry: the weighted sum of values [R, C], the
    largest logit [R] and the sum of exponentials [R] so far, and the page of the share's first block. spans: the
    first and the last position that each query sees, [R] each; None: all see the share. Returns the new sums. R and C
    are powers of two, C at least h.
    """
    (cells, v_ref), (_, first, start, stop) = cache, share
    k_ref, block, columns = cells.ref, cells.block, jnp.arange(q.shape[1])
    size = k_ref.shape[-1]

    def step(i, carry):
        acc, top, total, *page = carry
        position = start + i * block + jnp.arange(block)
        seen = position < stop
        if first is not None:
            seen = seen & (position >= first)
        at = *cells.at(start + i * block, tuple(page)), columns[None]
        page = cells.page(start + (i + 1) * block)
        mask = seen[:, None] if size == columns.size else seen[:, None] & (columns < size)[None]
        keys = plgpu.load(k_ref.at[at], mask=mask, other=0).astype(q.dtype)
        of_query = seen[None]
        if spans is not None:
            of_query = of_query & (position[None] >= spans[0][:, None]) & (position[None] <= spans[1][:, None])
        values = lambda: plgpu.load(v_ref.at[at], mask=mask, other=0).astype(q.dtype)  # noqa: E731
        unseen = spans is not None or first is not None
        sums = add_block(q, keys, values, of_query, (acc, top, total), scale=scale, softcap=softcap, unseen=unseen)
        return *sums, *page

    acc, top, total, *_ = lax.fori_loop(0, pl.cdiv(stop - start, block), step, carry)
    return acc, top, total


def add_block(
    q: jax.Array,
    keys: jax.Array,
    values: Callable[[], jax.Array],
    seen: jax.Array,
    sums: tuple[jax.Array, jax.Array, jax.Array],
    *,
    scale: float,
    softcap: float | None,
    unseen: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend with queries q [R, C] to keys [N, C] and what `values` loads, [N, C], where `seen` [R or 1, N].

    sums: as `attend` returns them, which are returned with this block. unseen: a query may have seen nothing yet.
    """
    acc, top, total = sums
    s = capped(plgpu.dot(q, keys, trans_b=True, precision=lax.Precision.HIGHEST) * scale, softcap)
    s = jnp.where(seen, s, -jnp.inf)
    new_top = jnp.maximum(top, s.max(axis=1))
    # A query that has seen nothing yet has no largest logit to subtract.
    base = jnp.where(new_top > -jnp.inf, new_top, 0.0) if unseen else new_top
    p = jnp.exp(s - base[:, None])
    decay = jnp.exp(top - base)
    acc = acc * decay[:, None] + plgpu.dot(p.astype(q.dtype), values(), precision=lax.Precision.HIGHEST)
    return acc, new_top, total * decay + p.sum(axis=1)


def add_cell(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sums: tuple[jax.Array, jax.Array, jax.Array],
    *,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend as `add_block` does to one key and value [C], which all queries see."""
    acc, top, total = sums
    logits = jnp.sum(q.astype(jnp.float32) * key.astype(jnp.float32)[None], axis=1)
    logits = capped(logits * scale, softcap)
    new_top = jnp.maximum(top, logits)
    weight, decay = jnp.exp(logits - new_top), jnp.exp(top - new_top)
    acc = acc * decay[:, None] + weight[:, None] * value.astype(jnp.float32)[None]
    return acc, new_top, total * decay + weight


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def store_share(
    sums: tuple[jax.Array, jax.Array, jax.Array],
    out_ref,
    lse_ref,
    at: tuple[jax.Array | int, ...],
    written: jax.Array,
    real: jax.Array,
) -> None:
    """Store what `attend` returns: queries' results in out_ref [..., h] and their log-sum-exps in lse_ref [...].

    at: the place of each query in lse_ref, [R] each. written [R]: whose results are stored; of an empty share none are,
    as the merge skips them. real [R]: queries that exist, whose log-sum-exps are stored.
    """
    (acc, top, total), size = sums, out_ref.shape[-1]
    columns = jnp.arange(acc.shape[1])
    total = jnp.where(total > 0, total, 1.0)  # an empty share: acc 0, top -inf
    out = (acc / total[:, None]).astype(out_ref.dtype)
    place = *(x if isinstance(x, int) else x[:, None] for x in at), columns[None]
    plgpu.store(out_ref.at[place], out, mask=written[:, None] & (columns < size)[None])
    plgpu.store(lse_ref.at[at], top + jnp.log(total), mask=real)


def share_of(
    lengths_ref,
    row,
    split,
    *,
    visible: int | None,
    block: int,
    splits: int,
    programs: float,
    paged: bool,
) -> Share:
    """Share `split` of the positions that a row's queries see, the last `visible` of its length; None: all. paged: it
    starts where a block does."""
    length = plgpu.load(lengths_ref.at[row])
    begin = first = 0 if visible is None else jnp.maximum(length - visible, 0)
    if paged and visible is not None:
        begin = first - lax.rem(first, block)
    shares = 1 if splits == 1 else _shares_of(length, lengths_ref, visible, splits, programs)
    share = pl.cdiv(pl.cdiv(length - begin, block), shares) * block
    start = begin + split * share
    return Share(length, first if paged and visible is not None else None, start, jnp.minimum(start + share, length))


def _shares_of(length, lengths_ref, most, splits, programs):
    """Shares of a row if rows get `programs` in proportion to their visible positions, at most `most`."""
    if lengths_ref.size == 1:
        return max(min(int(programs + 0.5), splits), 1)
    rows = jnp.arange(power_of_two(lengths_ref.size))
    visible = plgpu.load(lengths_ref.at[rows], mask=rows < lengths_ref.size, other=0)
    if most is not None:
        visible, length = jnp.minimum(visible, most), jnp.minimum(length, most)
    mean = jnp.maximum(visible.sum(axis=0), 1).astype(jnp.float32) / programs
    return jnp.clip(length.astype(jnp.float32) / mean + 0.5, 1.0, float(splits)).astype(jnp.int32)


def merge(
    parts: jax.Array, lses: jax.Array, dtype: jax.typing.DTypeLike, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Merge shares, parts [splits, *heads, h] and lses [splits, *heads], in one launch (XLA takes two).

    Parts whose lse is -inf are not read. Returns out [*heads, h] in `dtype`, lse [*heads].
    """
    return call_lowered(_merge, (jnp.dtype(dtype),), parts, lses, interpret=interpret)


def _merge(dtype, parts: jax.Array, lses: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    splits, *heads, size = parts.shape
    count = math.prod(heads)
    # All shares of some columns are in registers at once, of one head or several.
    tile = min(power_of_two(size), max(MERGED // power_of_two(splits, 1), 16))
    room = max(MERGED // (power_of_two(splits, 1) * tile), 1)
    each = next((n for n in (4, 2) if n <= room and count % n == 0 and count // n >= MERGING), 1)
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, tile=tile),
        grid=(count // each, pl.cdiv(size, tile)),
        in_specs=[
            pl.BlockSpec((splits, each, size), lambda i, n: (0, i, 0)),
            pl.BlockSpec((splits, each), lambda i, n: (0, i)),
        ],
        out_specs=[pl.BlockSpec((each, size), lambda i, n: (i, 0)), pl.BlockSpec((each,), lambda i, n: (i,))],
        out_shape=[
            jax.ShapeDtypeStruct((count, size), dtype),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=each),  # four of one head wait for each other: 0.2 us of 1.5
        interpret=interpret,
        name="merge_shares",
    )(parts.reshape(splits, count, size), lses.reshape(splits, count))
    return out.reshape(*heads, size), lse.reshape(heads)


def _merge_kernel(parts_ref, lses_ref, out_ref, lse_ref, *, tile):
    """A tile of columns of R query heads: parts_ref [splits, R, h], lses_ref [splits, R], out_ref [R, h], lse_ref
    [R]."""
    splits, each, size = parts_ref.shape
    shares, heads = jnp.arange(power_of_two(splits, 1)), jnp.arange(each)
    columns = pl.program_id(1) * tile + jnp.arange(tile)
    real = jnp.broadcast_to((shares < splits)[:, None], (shares.size, each))
    lses = plgpu.load(lses_ref.at[shares[:, None], heads[None]], mask=real, other=-jnp.inf)
    top = lses.max(axis=0)
    weight = jnp.exp(lses - jnp.where(top > -jnp.inf, top, 0.0)[None])
    total = weight.sum(axis=0)
    total = jnp.where(total > 0, total, 1.0)  # an inactive row: weights 0, top -inf
    written = (lses > -jnp.inf)[:, :, None] & (columns < size)[None, None]
    at = shares[:, None, None], heads[None, :, None], columns[None, None]
    parts = plgpu.load(parts_ref.at[at], mask=written, other=0)
    out = (parts * weight[:, :, None]).sum(axis=0) / total[:, None]
    inside = jnp.broadcast_to((columns < size)[None], out.shape)
    plgpu.store(out_ref.at[heads[:, None], columns[None]], out.astype(out_ref.dtype), mask=inside)
    plgpu.store(lse_ref.at[heads], top + jnp.log(total))  # the same from each tile
