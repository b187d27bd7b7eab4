"""Prefill attention on NVIDIA GPUs: chunks of queries over the visible part of their rows' cache, read in place.

Flash attention (Dao 2023, https://arxiv.org/abs/2307.08691): a program takes a tile of one chunk's queries, of all
heads that share a KV head, and walks over blocks of positions with an online softmax, so logits never reach memory. A
query sees a range of positions, so only the ends of a tile's range are masked. Tiles of one row read the same cells at
about the same time, from the GPU's cache, so it does not matter how a prompt is cut into chunks. Where a step has fewer
tiles than the GPU has processors, several programs share a tile's range, and their results are merged.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import AttentionOptions, KvCache, Shaped
from inferlib.pallas_kernels.decode_attention_gpu import capped, merge, power_of_two

LOG2E = math.log2(math.e)
NOTHING = -1e30  # the largest logit of a query that has seen none: unlike -inf, it can be subtracted from -inf
SMALLEST = 16  # positions of a block, and rows of a tile, that tensor cores take
PROGRAMS = 256  # programs that a GPU runs side by side: about two for each of its processors
LEAST_BLOCKS = 4  # least blocks of the longest range, for each of the programs that share a tile


# Chosen by measuring tiles of 64 and 128 rows, blocks of 32 to 128 positions, 4 and 8 warps and 2 to 4 stages on an
# H200 (jax 0.11.2, bf16, K 8, G 4, h 128), see docs/kernels/measurements.md.
@dataclass(frozen=True)
class Blocks:
    """queries: rows of a tile, a token's query head each. keys: positions of a block. Both are powers of two."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


def blocks(size: int) -> Blocks:
    """For heads of this size: the tiles of larger ones would not fit shared memory."""
    return Blocks() if size <= 128 else Blocks(keys=32, stages=2)


def unsupported(q: Shaped, cache: KvCache) -> str | None:
    """Why the kernel does not run queries [P, C, K, G, h] over this cache; None: it does. Arrays may be shapes."""
    for x in (q, *cache.arrays):
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"{jnp.dtype(x.dtype).name}, where the kernel takes bfloat16 and float16"
    if max(x.shape[-1] for x in cache.arrays) > 256:
        return f"heads of size {max(x.shape[-1] for x in cache.arrays)}, beyond 256"
    if cache.pages is not None and cache.k.shape[-2] % SMALLEST:
        return f"pages of {cache.k.shape[-2]} positions are not a multiple of {SMALLEST}"
    return None


def splits_of(programs: int, longest: int) -> int:
    """How many programs share a tile of queries, a power of two: there are `programs` tiles, and `longest` blocks of
    positions in the longest range."""
    most = min(PROGRAMS // programs, longest // LEAST_BLOCKS, 8)
    return 1 << max(most, 1).bit_length() - 1


def prefill_attention(
    q: jax.Array,
    cache: KvCache,
    rows: jax.Array,
    positions: jax.Array,
    options: AttentionOptions,
    *,
    sizes: Blocks | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `inferlib.ops.prefill_attention`; no scales, and each query may have its own window.

    splits: programs that share a tile; by default by `splits_of`. interpret: run on any device, in any float type.
    Returns out [P, C, K, G, h], h the size of values, in q's dtype and lse [P, C, K, G] float32. Raises ValueError for
    what `unsupported` names.
    """
    if not interpret and (reason := unsupported(q, cache)):
        raise ValueError(f"the kernel of prefill attention for GPUs does not take {reason}; use xla")
    sizes = sizes or blocks(max(x.shape[-1] for x in (q, cache.values)))
    outs, lses = _attend(q, cache, rows, positions, options, sizes, splits, interpret)
    return (outs[0], lses[0]) if len(outs) == 1 else merge(outs, lses, q.dtype, interpret)


def _attend(
    q: jax.Array,
    cache: KvCache,
    rows,
    positions,
    options: AttentionOptions,
    sizes: Blocks,
    splits: int | None,
    interpret,
) -> tuple[jax.Array, jax.Array]:
    """Each share's out [splits, P, C, K, G, h], float32 if there are several, and lse [splits, P, C, K, G]."""
    chunks, width, kv_heads, group, size = q.shape
    k, v, table = pages_of(cache, rows)
    page_slots, sinks = None if cache.pages is None else k.shape[2], options.sinks
    queries = min(sizes.queries, power_of_two(width * group))
    keys, tiles = math.gcd(sizes.keys, page_slots or sizes.keys), pl.cdiv(width * group, queries)
    splits = splits or splits_of(kv_heads * tiles * chunks, table.shape[1] * k.shape[2] // keys)
    static = dict(
        scale=options.scale,
        softcap=options.softcap,
        queries=queries,
        keys=keys,
        splits=splits,
        ring=cache.slots if cache.ring else None,
        page_slots=page_slots,
    )
    # The last tiles come first, because they have the longest ranges.
    of_chunk = lambda *block: pl.BlockSpec((None, *block), lambda h, t, p: (chunks - 1 - p, *[0] * len(block)))  # noqa: E731
    of_head = lambda *rest: pl.BlockSpec(  # noqa: E731
        (None, width, None, *rest), lambda h, t, p: (chunks - 1 - p, 0, h // splits, *[0] * len(rest))
    )
    of_share = lambda *rest: pl.BlockSpec(  # noqa: E731
        (None, None, width, None, *rest), lambda h, t, p: (h % splits, chunks - 1 - p, 0, h // splits, *[0] * len(rest))
    )
    return pl.pallas_call(
        functools.partial(_kernel, **static),
        grid=(kv_heads * splits, tiles, chunks),
        in_specs=[
            of_chunk(width),
            of_chunk(width),
            of_chunk(table.shape[1]),
            of_head(group, size),
            pl.BlockSpec(),
            pl.BlockSpec(),
            None if sinks is None else pl.BlockSpec((None, group), lambda h, t, p: (h // splits, 0)),
        ],
        out_specs=[of_share(group, v.shape[-1]), of_share(group)],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *q.shape[:4], v.shape[-1]), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *q.shape[:4]), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="prefill_attention",
    )(*seen(cache, rows, positions, options.window), table, q, k, v, sinks)


def pages_of(cache: KvCache, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values [N, K, S, h], those of all layers if they are stacked, and the chunks' pages [P, M] in them."""
    count = cache.k.shape[-4]
    if cache.pages is None:
        table = jnp.minimum(rows, count - 1)[:, None]
    else:
        table = jnp.clip(cache.pages[jnp.minimum(rows, cache.pages.shape[0] - 1)], 0, count - 1)
    if cache.layer is None:
        return cache.k, cache.values, table
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (cache.k, cache.values))
    return k, v, table + cache.layer * count


def seen(cache: KvCache, rows, positions, window: int | jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The first and the last position that each query sees, [P, C] each; 0 and -1 in absent chunks."""
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)
    if cache.ring:
        first, last = jnp.maximum(first, positions[:, -1:] - cache.slots + 1), positions
    else:
        last = jnp.minimum(positions, cache.slots - 1)
    absent = (rows >= (cache.k.shape[-4] if cache.pages is None else cache.pages.shape[0]))[:, None]
    return jnp.where(absent, 0, first), jnp.where(absent, -1, last)


def _kernel(
    first_ref,
    last_ref,
    table_ref,
    q_ref,
    k_ref,
    v_ref,
    sinks_ref,
    out_ref,
    lse_ref,
    *,
    scale,
    softcap,
    queries,
    keys,
    splits,
    ring,
    page_slots,
):
    """A share of one tile: first_ref, last_ref [C], table_ref [M], q_ref, out_ref [C, G, h], k_ref, v_ref
    [N, K, S, h], sinks_ref [G], lse_ref [C, G]."""
    (width, group, size), values = q_ref.shape, v_ref.shape[-1]
    head, share = pl.program_id(0) // splits, pl.program_id(0) % splits
    tile = pl.num_programs(1) - 1 - pl.program_id(1)
    row = tile * queries + jnp.arange(queries)
    # Rows after the chunk's end see the positions of the last token, and are not stored.
    in_chunk, token, member = row < width * group, jnp.minimum(row // group, width - 1), row % group
    columns, value_columns = jnp.arange(power_of_two(size)), jnp.arange(power_of_two(values))
    q = _load(q_ref, (token[:, None], member[:, None]), columns)
    first, last = plgpu.load(first_ref.at[token]), plgpu.load(last_ref.at[token])
    # Logits are in base 2.
    factor = scale * LOG2E if softcap is None else LOG2E
    carry = (
        jnp.zeros((queries, value_columns.size), jnp.float32),
        jnp.full(queries, NOTHING, jnp.float32),
        jnp.zeros(queries, jnp.float32),
    )
    if sinks_ref is not None:  # sinks count in one share only
        sinks = plgpu.load(sinks_ref.at[member]).astype(jnp.float32) * LOG2E
        carry = carry[0], jnp.where(share == 0, sinks, carry[1]), jnp.where(share == 0, 1.0, carry[2])

    def page_of(block):
        """The page of a row's block of positions, where a row has several."""
        column = (block if ring is None else lax.rem(block, ring // keys)) // (page_slots // keys)
        return plgpu.load(table_ref.at[jnp.minimum(column, table_ref.size - 1)])

    def slots_of(block):
        """The slots of its page that it lies in."""
        if page_slots is not None:
            return block % (page_slots // keys) * keys + jnp.arange(keys)
        slot = block * keys + jnp.arange(keys)
        return slot if ring is None else lax.rem(slot, ring)

    def step(block, carry, *, masked: bool):
        acc, top, total, *page = carry
        # A page that never changes is loaded in the loop too: with a load before the loop it took 1.13 times as long.
        page_of_block = page[0] if page else plgpu.load(table_ref.at[jnp.int32(0)])
        position, at = block * keys + jnp.arange(keys), (page_of_block, head, slots_of(block)[:, None])
        # If there are several pages, the next block's is read early, so that loads of its keys can run ahead.
        page = [page_of(block + 1) for _ in page]
        mask = (position < stop)[:, None] if masked else None
        s = plgpu.dot(q, _load(k_ref, at, columns, mask).astype(q.dtype), trans_b=True, precision=lax.Precision.HIGHEST)
        s = s if softcap is None else capped(s * scale, softcap)
        if masked:
            s = jnp.where((position[None] >= first[:, None]) & (position[None] <= last[:, None]), s, -jnp.inf)
        new_top = jnp.maximum(top, s.max(axis=1) * factor)
        p = jnp.exp2(s * factor - new_top[:, None])
        decay = jnp.exp2(top - new_top)
        v = _load(v_ref, at, value_columns, mask).astype(q.dtype)
        if masked:  # 0 * NaN is NaN
            v = jnp.where(jnp.isfinite(v), v, jnp.zeros_like(v))
        acc = acc * decay[:, None] + plgpu.dot(p.astype(q.dtype), v, precision=lax.Precision.HIGHEST)
        return acc, new_top, total * decay + p.sum(axis=1), *page

    stop = last.max(axis=0) + 1
    begin, end = first.min(axis=0) // keys, pl.cdiv(stop, keys)
    if splits > 1:
        count = pl.cdiv(jnp.maximum(end - begin, 0), splits)
        begin = begin + share * count
        end = jnp.minimum(begin + count, end)
    # From `inner` to `outer`, all queries of the tile see all positions.
    inner = jnp.clip(pl.cdiv(first.max(axis=0), keys), begin, jnp.maximum(begin, end))
    outer = jnp.clip((last.min(axis=0) + 1) // keys, inner, jnp.maximum(inner, end))
    edge = functools.partial(step, masked=True)
    carry = carry if page_slots is None else (*carry, page_of(begin))
    carry = lax.fori_loop(begin, inner, edge, carry)
    carry = lax.fori_loop(inner, outer, functools.partial(step, masked=False), carry)
    acc, top, total, *_ = lax.fori_loop(outer, end, edge, carry)
    out = acc / jnp.where(total > 0, total, 1.0)[:, None]
    token = row // group
    at = token[:, None], member[:, None], value_columns[None]
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=in_chunk[:, None] & (value_columns < values)[None])
    lse = jnp.where(total > 0, top / LOG2E + jnp.log(total), -jnp.inf)
    plgpu.store(lse_ref.at[token, member], lse, mask=in_chunk)


def _load(ref, at: tuple, columns: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The columns of rows `at` of an array, zeros where there are none or the mask is false."""
    if columns.size != ref.shape[-1]:
        inside = (columns < ref.shape[-1])[None]
        mask = inside if mask is None else mask & inside
    return plgpu.load(ref.at[*at, columns[None]], mask=mask, other=None if mask is None else 0)
