"""Prefill attention on TPUs: flash attention of chunks of queries over a paged cache that holds their prefix and
themselves (Dao 2023, "FlashAttention-2").

Queries of a tile and a KV head visit blocks of keys one after another. Blocks that no query of the tile sees are never
copied, those that all see are taken without a mask. The next logits are computed while a softmax is taken, also from
one block to the next; copies run ahead of the computation, also from one tile to the next.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import LANES, div, folded, rem, wide
from inferlib.pallas_kernels.generations_tpu import untaken
from inferlib.pallas_kernels.tile_stream_tpu import STATE, SUBLANES, TileStream, scale_rows, visible
from inferlib.pallas_kernels.tuned_tpu import tuned

# Finite, so that differences are; a maximum starts higher, so that what is masked weighs nothing even alone.
MASKED, LOWEST = (-part * float(jnp.finfo(jnp.float32).max) for part in (0.7, 0.3))
LOG2E = math.log2(math.e)
BUFFERS = 4  # of blocks: one computes, one has a product left, of one logits are ahead, and one is being copied
ROWS_BYTES, MOST_TILES = 512 << 10, 8  # most queries of a tile, all heads of a KV head; most times 128 tokens
VMEM_BYTES = 14 << 20  # of the 16 MiB that the compiler gives a kernel on v5e and v5p unless told otherwise
SMEM_BYTES = 512 << 10  # of 1 MiB
QUANTISED = (jnp.int8, jnp.float8_e4m3fn)


@dataclass(frozen=True)
class Blocks:
    """queries: tokens of a tile; keys: positions of a block; rows: most queries times heads that share a product and a
    softmax; edge: positions that are computed at once where some are masked."""

    queries: int
    keys: int
    rows: int = 256
    edge: int = 256

    def __post_init__(self):
        if self.rows % LANES or (self.queries > LANES and self.queries % LANES):
            raise ValueError(f"tiles of {self.queries} queries in products of {self.rows} are not multiples of {LANES}")
        if self.keys % self.edge or self.edge % LANES:
            raise ValueError(f"blocks of {self.keys} keys do not divide into parts of {self.edge}, a multiple of 128")

    @property
    def part(self) -> int:
        """Tokens of a product."""
        return self.queries if self.queries <= LANES else math.gcd(self.queries, self.rows)

    def stacked(self, group: int) -> int:
        """Heads of a product, of `group` that share a KV head."""
        return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * self.part <= self.rows))


@tuned("prefill_attention", Blocks)
def blocks(width: int, group: int, size: int, itemsize: int) -> Blocks:
    """For chunks of `width` tokens and `group` heads of `size` that share a KV head."""
    most = min(max(ROWS_BYTES // (group * size * itemsize * LANES), 1), MOST_TILES) * LANES
    if width <= LANES:
        queries = width
    else:  # alike, rather than full ones and a small rest
        tiles = pl.cdiv(width, most)
        queries = min(pl.cdiv(pl.cdiv(width, tiles), LANES), width // LANES) * LANES
    chosen = Blocks(queries, 512)
    # Where there are few products, each waits for the one before: they had better be large.
    return chosen if group // chosen.stacked(group) > 2 else replace(chosen, edge=512)


def unsupported(
    q: jax.ShapeDtypeStruct,
    k: jax.ShapeDtypeStruct,
    *,
    pages: int | None = None,
    visits: int = 0,
    scales: bool = False,
    blocks: Blocks | None = None,
) -> str | None:
    """Why the kernel cannot run q [P, C, K, G, h] on a cache k [..., K, S, h], or None if it can.

    pages: columns of the page table, None if rows are pages; visits: most blocks that are listed for a tile; scales: of
    a quantised cache.
    """
    dtype, slots, size = jnp.dtype(k.dtype), k.shape[-2], k.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or (dtype not in QUANTISED if scales else dtype != q.dtype):
        cache = "int8 or float8_e4m3fn" if scales else "their type"
        return f"it takes queries of bfloat16 or float32 and a cache of {cache}, not {q.dtype} and {dtype}"
    if reason := untaken(dtype):
        return reason
    if size % LANES:
        return f"heads of size {size} are not a multiple of {LANES}"
    tile = 32 // jnp.dtype(q.dtype).itemsize  # rows of a register
    if slots % (unit := LANES if scales else tile):
        return f"pages of {slots} positions do not divide into tiles of {unit}"
    if q.shape[1] % tile:
        return f"chunks of {q.shape[1]} tokens do not divide into tiles of {tile}"
    blocks = blocks or _default(q)
    listed = q.shape[2] * pl.cdiv(q.shape[1], blocks.queries) * (visits + 1) if visits else 0
    scalars = 4 * q.shape[0] * (2 * pl.cdiv(q.shape[1], blocks.part) + (pages or 0) + listed)
    if scalars > SMEM_BYTES:
        return f"tables of {q.shape[0]} chunks need {scalars} bytes of scalar memory, not {SMEM_BYTES}"
    need = _vmem_bytes(q, dtype.itemsize, scale_rows(q.shape[2]) if scales else 0, blocks)
    if need > VMEM_BYTES:
        return f"{q.shape[3]} heads of size {size} need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def _default(q: jax.ShapeDtypeStruct) -> Blocks:
    return blocks(q.shape[1], q.shape[3], q.shape[4], jnp.dtype(q.dtype).itemsize)


def _vmem_bytes(q: jax.ShapeDtypeStruct, itemsize: int, scales: int, blocks: Blocks) -> int:
    """itemsize: of the cache; scales: how many of a position are copied."""
    *_, group, size = q.shape
    queries, position = blocks.queries * group, size * itemsize + 4 * (scales and -(-scales // SUBLANES) * SUBLANES)
    state = queries * (4 * size * jnp.dtype(q.dtype).itemsize + 4 * size + 8 * LANES) + 4 * blocks.queries * LANES
    return state + 2 * BUFFERS * blocks.keys * position + 3 * 4 * blocks.rows * blocks.keys


def prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    rows: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: bool = False,
    limit: int | None = None,
    layer: jax.Array | int = 0,
    pages: jax.Array | None = None,
    visits: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, K, G, h]: chunk p holds the ascending positions[p], [P, C] int32, of row rows[p]; negative ones see
    nothing (out 0, lse -inf). All are written in the cache. Chunks of rows that are not there give 0.

    k, v: [N, K, S, h], or [L, N, K, S, h] of which `layer` is read; v None: keys are values too. Position p of row b
    lives in page pages[b, p // S], slot p mod S; pages [B, M] int32; without, row b is page b. ring: the positions of a
    row wrap around its pages; then there are at least as many slots as the window and a chunk's span. window: a query
    sees only the last `window` positions up to its own. limit: no position reaches it. sinks [K, G]: a logit that joins
    the softmax's denominator. visits [P, K, T, M] int32: of the positions that the queries of tile t see, only those in
    these blocks count, block n being the positions from n * blocks.keys on; negative ones are none. k_scales, v_scales
    [N, K, S] or [L, N, K, S] float32: of keys and values that are int8 or float8_e4m3fn. Blocks that no query of a tile
    sees are not read.
    Returns out [P, C, K, G, h] in q's dtype and the log of the softmax's denominator, lse [P, C, K, G] float32.
    Raises ValueError where `unsupported` says why.
    """
    chunks, width, heads, group, size = q.shape
    columns, listed = None if pages is None else pages.shape[1], 0 if visits is None else visits.shape[-1]
    scaled = k_scales is not None
    if reason := unsupported(q, k, pages=columns, visits=listed, scales=scaled, blocks=blocks):
        raise ValueError(f"the TPU kernel does not run this prefill attention: {reason}")
    if ring and window is None:
        raise ValueError("a ring cache forgets old positions: pass the layer's window")
    if visits is not None and blocks is None:
        raise ValueError("visits are numbers of blocks: pass `blocks`, which says of what size")
    blocks = blocks or _default(q)
    cache = [x if k.ndim == 5 else x[None] for x in (k, v, k_scales, v_scales) if x is not None]
    slots, tile, part, stacked = k.shape[-2], blocks.queries, blocks.part, blocks.stacked(group)
    capacity = slots * (columns or 1)
    if limit is not None and not ring:
        capacity = min(capacity, limit)
    tiles, parts = pl.cdiv(width, tile), tile // part
    at = jnp.arange(tiles * parts) * part
    firsts, lasts = (positions[:, jnp.minimum(x, width - 1)].astype(jnp.int32) for x in (at, at + part - 1))
    lasts = lasts if ring else jnp.minimum(lasts, capacity - 1)
    there = rows < (cache[0].shape[1] if pages is None else pages.shape[0])
    scalars = _Scalars(
        jnp.where(there, rows, -1).astype(jnp.int32), jnp.asarray(layer, jnp.int32).reshape(1), firsts, lasts
    )
    if pages is not None:
        scalars = scalars._replace(table=pages[jnp.where(there, rows, 0)].astype(jnp.int32))
    if visits is not None:
        lists = visible(visits, firsts[:, ::parts], lasts[:, parts - 1 :: parts], window, blocks.keys)
        scalars = scalars._replace(listed=tuple(lists))
    if not interpret:  # or XLA would bring a small cache to VMEM whole
        cache = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in cache]
    flat = (chunks, width, heads * group * size)
    tokens = pl.BlockSpec((None, tile, group * size), lambda p, k, t, _: (p, t, k))
    # Head by head, as products with weights leave them: in any other order XLA would copy them.
    inputs = _Inputs(jnp.transpose(q, (2, 3, 0, 1, 4)), positions.astype(jnp.int32)[:, None], None, tuple(cache))
    specs = _Inputs(
        pl.BlockSpec((None, group, None, tile, size), lambda p, k, t, _: (k, 0, p, t, 0)),
        pl.BlockSpec((None, 1, tile), lambda p, k, t, _: (p, 0, t)),
        None,
        (pl.BlockSpec(memory_space=pl.ANY),) * len(cache),
    )
    if sinks is not None:
        wide = jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None] * LOG2E, (heads, group, LANES))
        inputs = inputs._replace(sinks=wide)
        specs = specs._replace(sinks=pl.BlockSpec((None, group, LANES), lambda p, k, t, _: (k, 0, 0)))
    products, count = parts * (group // stacked), stacked * part
    kernel = functools.partial(
        _kernel,
        arrays=1 if v is None else 2,
        scaled=scaled,
        most_listed=listed,
        scale=scale * LOG2E,
        window=window,
        softcap=softcap and softcap * LOG2E,
        ring=ring,
        capacity=capacity,
        unit=slots if pages is not None and slots <= 2 * LANES else math.gcd(slots, LANES),
        edge=blocks.edge,
    )
    seen = min(max(capacity - width // 2, 1), window or capacity)  # by a query; the most, of full chunks
    pairs = chunks * width * heads * group * seen
    position_bytes = sum(size * x.dtype.itemsize if x.ndim == 5 else 4 * scale_rows(heads) for x in cache)
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks, heads, tiles),
            in_specs=(specs,),
            out_specs=[tokens, pl.BlockSpec((None, None, group, tile), lambda p, k, t, _: (p, k, 0, t))],
            scratch_shapes=[
                _Scratch(
                    buffers=(
                        *[pltpu.VMEM((BUFFERS, blocks.keys, size), x.dtype) for x in cache if x.ndim == 5],
                        *[pltpu.VMEM((BUFFERS, scale_rows(heads), blocks.keys), x.dtype) for x in cache if x.ndim == 4],
                    ),
                    queries=pltpu.VMEM((parts, count, LANES), jnp.int32),
                    ahead=pltpu.VMEM((count, blocks.keys), jnp.float32),
                    weights=pltpu.VMEM((count, blocks.keys), q.dtype),
                    decay=pltpu.VMEM((count, LANES), jnp.float32),
                    top=pltpu.VMEM((products, count, LANES), jnp.float32),
                    sum=pltpu.VMEM((products, count, LANES), jnp.float32),
                    acc=pltpu.VMEM((products, count, size), jnp.float32),
                    state=pltpu.SMEM((STATE,), jnp.int32),
                    semaphores=pltpu.SemaphoreType.DMA((len(cache), BUFFERS)),
                )
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(flat, q.dtype),
            jax.ShapeDtypeStruct((chunks, heads, group, width), jnp.float32),
        ],
        # Checks triple what it takes to start a copy; `TileStream` and `lasts` keep them in bounds.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * size,
            bytes_accessed=2 * q.size * q.dtype.itemsize + chunks * heads * tiles * seen * position_bytes,
            transcendentals=pairs,
        ),
        interpret=interpret,
        name="prefill_attention",
    )(scalars, inputs)
    return out.reshape(q.shape), jnp.moveaxis(lse, 3, 1)


class _Scalars(NamedTuple):
    """In scalar memory, as in `TileStream`: rows, layer, positions of queries, the page table, lists of blocks."""

    rows: Any
    layer: Any
    firsts: Any
    lasts: Any
    table: Any = None
    listed: tuple | None = None


class _Inputs(NamedTuple):
    """q [G, tile, h], positions [1, tile], sinks [G, 128]; in HBM k, v [L, N, K, S, h] (or k alone), then scales
    [L, N, K, S]."""

    q: Any
    positions: Any
    sinks: Any
    cache: tuple


class _Scratch(NamedTuple):
    """buffers: copies of blocks, then of scales. queries: for each part of the tile, positions of a product's queries
    [parts, rows, 128]. ahead: the logits that are ahead [rows, keys]. weights [rows, keys], decay [rows, 128]: what is
    left of the block before. For each product, of some heads and a part, the running maximum and sum [n, rows, 128]
    (the sum's lanes add up, the maximum's are alike) and accumulator [n, rows, h]. The stream's state and semaphores.
    """

    buffers: tuple
    queries: Any
    ahead: Any
    weights: Any
    decay: Any
    top: Any
    sum: Any
    acc: Any
    state: Any
    semaphores: Any


def _kernel(
    scalars: _Scalars,
    inputs: _Inputs,
    out_ref,
    lse_ref,
    scratch: _Scratch,
    *,
    arrays,
    scaled,
    most_listed,
    scale,
    window,
    softcap,
    ring,
    capacity,
    unit,
    edge,
):
    """One tile of queries and one KV head: out_ref [tile, G * h], lse_ref [G, tile]. Logits are in units of log 2, as
    exponentials are taken with base 2."""
    q_ref, positions_ref, sinks_ref, in_hbm = inputs
    in_vmem, query_s, ahead_s, p_s, decay_s, top_s, sum_s, acc_s, state, semaphores = scratch
    k_buf, v_buf, scales = in_vmem[0], in_vmem[arrays - 1], in_vmem[arrays:]
    products, rows, size = acc_s.shape
    parts, keys = query_s.shape[0], k_buf.shape[1]
    part = q_ref.shape[1] // parts
    stacked, per_part = rows // part, products // parts
    exact = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    stream = TileStream(*scalars, most_listed, in_hbm, in_vmem, state, semaphores, parts, window, ring, capacity, unit)

    def heads_of(product):
        """The head of each `part` rows of a product, and where they are in the tile."""
        first = product % per_part * stacked
        return range(first, first + stacked), pl.ds(product // per_part * part, part)

    def prepare():
        if sinks_ref is None:
            top_s[...] = jnp.full_like(top_s, LOWEST)
        else:
            for product in range(products):
                sinks = [jnp.broadcast_to(sinks_ref[head : head + 1], (part, LANES)) for head in heads_of(product)[0]]
                top_s[product] = jnp.concatenate(sinks)
        lanes = lax.broadcasted_iota(jnp.int32, sum_s.shape, 2)
        sum_s[...] = jnp.where(lanes == 0, 0.0 if sinks_ref is None else 1.0, 0.0)
        acc_s[...] = jnp.zeros_like(acc_s)
        some = min(part, LANES)
        for n in range(0, parts * part, some):
            positions = jnp.broadcast_to(positions_ref[:, n : n + some], (LANES, some)).T
            for head in range(stacked):
                query_s[n // part, pl.ds(head * part + n % part, some)] = positions

    def operand(x):
        """The matrix unit takes fp8 beside bfloat16."""
        return x if q_ref.dtype == jnp.bfloat16 and x.dtype == jnp.float8_e4m3fn else x.astype(q_ref.dtype)

    def scales_of(n, buf, at):
        """[1, n], of the positions `at` in a buffer: of keys (0) or values (1)."""
        return scales[n][buf, pl.ds(rem(stream.here[1], scales[n].shape[1]), 1), at]

    def keys_of(buf, at):
        """Those at the positions `at` in a buffer, and what products with them are multiplied by."""
        factor = scale if softcap is None else scale / softcap
        return operand(k_buf[buf, at]), factor * scales_of(0, buf, at) if scaled else factor

    def scores(product, keys, factor):
        """Logits [rows, n]."""
        of, tokens = heads_of(product)
        queries = jnp.concatenate([q_ref[head, tokens] for head in of])
        dimensions = (((1,), (1,)), ((), ()))
        s = lax.dot_general(queries, keys, dimensions, exact, preferred_element_type=jnp.float32) * factor
        return s if softcap is None else softcap * jnp.tanh(s)

    def weights(product, logits, scales):
        """Of the values, and of what the accumulator holds. scales [1, n]: of the values, or None."""
        old = top_s[product]
        top = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
        p, decay = jnp.exp2(logits - wide(top, logits.shape[1])), jnp.exp2(old - top)
        top_s[product] = top
        sum_s[product] = sum_s[product] * decay + folded(p)
        return (p * scales if scaled else p).astype(p_s.dtype), decay

    def accumulate(product, p, decay, values):
        out = jnp.dot(p, values, precision=exact, preferred_element_type=jnp.float32)
        acc_s[product] = acc_s[product] * wide(decay, size) + out

    def is_full(index):
        """Whether there is such a block, and all queries of the tile see all of it."""
        start, first, last = stream.start(index), stream.first(), stream.last()
        full = (index < visits) & (start + keys - 1 <= jnp.minimum(first, last))
        return full if window is None else full & (start > last - window)

    def take_full(carry):
        """Take in a block that is there, the last product's values of the block before, and all but those of its own.
        Its first logits are ahead, and the next block's will be, if it is full."""
        index, buf, previous = carry
        more, then = is_full(index + 1), stream.after(buf)
        stream.start_next(stream.after(then))
        pl.when(more)(lambda: stream.wait(index + 1, then))
        block, values = keys_of(buf, slice(None)), operand(v_buf[buf])
        value_scales = scales_of(1, buf, slice(None)) if scaled else None
        logits, behind = ahead_s[...], (products - 1, p_s[...], decay_s[...], operand(v_buf[previous]))
        for product in range(products):
            if product + 1 < products:
                ahead = scores(product + 1, *block)
            else:
                ahead = scores(0, *keys_of(jnp.where(more, then, buf), slice(None)))
            p, decay = weights(product, logits, value_scales)
            accumulate(*behind)
            logits, behind = ahead, (product, p, decay, values)
        ahead_s[...], p_s[...], decay_s[...] = logits, p, decay
        return index + 1, then, buf

    def take_all_full(carry):
        index, buf = carry
        stream.wait(index, buf)
        ahead_s[...] = scores(0, *keys_of(buf, slice(None)))
        p_s[...], decay_s[...] = jnp.zeros_like(p_s), jnp.ones_like(decay_s)  # nothing is left of a block before
        *carry, last = lax.while_loop(lambda c: is_full(c[0]), take_full, (index, buf, buf))
        accumulate(products - 1, p_s[...], decay_s[...], operand(v_buf[last]))
        return tuple(carry)

    def take_edge(carry):
        """Take in a block of which some queries do not see all, in parts."""
        index, buf = carry
        stream.start_next(stream.after(stream.after(buf)))
        stream.wait(index, buf)
        start, last = stream.start(index), stream.last()

        def take_part(i, _):
            at = pl.ds(pl.multiple_of(i * edge, edge), edge)
            for p in range(parts):
                seen = start + i * edge <= stream.last(p)
                if window is not None:
                    seen &= start + (i + 1) * edge > stream.first(p) - window + 1
                pl.when(seen)(functools.partial(take_masked, p, buf, at, start + i * edge))

        lax.fori_loop(0, jnp.minimum(div(last - start, edge) + 1, keys // edge), take_part, None)
        return index + 1, stream.after(buf)

    def take_masked(p, buf, at, start):
        """Take in some positions, from `start` on, for the queries of part `p`."""

        def cleaned(x, axis):
            """Zero where no query of the tile sees a position: 0 * NaN is NaN."""
            position = start + lax.broadcasted_iota(jnp.int32, x.shape, axis)
            seen = (position >= stream.lowest()) & (position <= stream.last())
            return jnp.where(seen, x.astype(jnp.float32), 0)

        values = v_buf[buf, at]
        values = (values if values.dtype == jnp.int8 else cleaned(values, 0)).astype(p_s.dtype)
        value_scales = cleaned(scales_of(1, buf, at), 1) if scaled else None
        query, key = wide(query_s[p], edge), start + lax.broadcasted_iota(jnp.int32, (rows, edge), 1)
        seen = (key <= query) & (key <= stream.last())
        if window is not None:
            seen &= key > query - window
        part_keys = keys_of(buf, at)
        ahead = scores(p * per_part, *part_keys)
        for product in range(p * per_part, (p + 1) * per_part):
            logits = ahead
            if product + 1 < (p + 1) * per_part:
                ahead = scores(product + 1, *part_keys)
            accumulate(product, *weights(product, jnp.where(seen, logits, MASKED), value_scales), values)

    def finish():
        some = min(part, LANES)
        row, lane = (lax.broadcasted_iota(jnp.int32, (some, LANES), n) for n in (0, 1))
        for product in range(products):
            top = top_s[product]
            total = jnp.broadcast_to(jnp.sum(sum_s[product], axis=1, keepdims=True), top.shape)
            out = acc_s[product] * wide(1.0 / jnp.maximum(total, 1e-37), size)
            lse = top * (1 / LOG2E) + jnp.log(total)
            of, tokens = heads_of(product)
            for n, head in enumerate(of):
                mine = slice(n * part, (n + 1) * part)
                out_ref[tokens, head * size : (head + 1) * size] = out[mine].astype(out_ref.dtype)
                for at in range(0, part, some):
                    column = jnp.where(row == lane, lse[mine][at : at + some], 0.0)
                    lse_ref[head, pl.ds(tokens.start + at, some)] = jnp.sum(column, axis=0)[:some]

    stream.begin(BUFFERS - 2)
    visits = stream.visits()
    prepare()
    carry = 0, state[2]
    if window is not None:
        carry = lax.while_loop(lambda c: (c[0] < visits) & ~is_full(c[0]), take_edge, carry)
    carry = lax.cond(is_full(carry[0]), take_all_full, lambda carry: carry, carry)
    state[2] = lax.while_loop(lambda c: c[0] < visits, take_edge, carry)[1]
    finish()
