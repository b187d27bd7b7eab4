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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import LANES, div, folded, rem, wide
from inferlib.pallas_kernels.tuned_tpu import tuned

# Finite, so that differences are; a maximum starts higher, so that what is masked weighs nothing even alone.
MASKED, LOWEST = (-part * float(jnp.finfo(jnp.float32).max) for part in (0.7, 0.3))
LOG2E = math.log2(math.e)
BUFFERS = 4  # of blocks: one computes, one has a product left, of one logits are ahead, and one is being copied
ROWS_BYTES, MOST_TILES = 512 << 10, 8  # most queries of a tile, all heads of a KV head; most times 128 tokens
VMEM_BYTES = 14 << 20  # of the 16 MiB that the compiler gives a kernel on v5e and v5p unless told otherwise
SMEM_BYTES = 512 << 10  # of 1 MiB


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
    blocks: Blocks | None = None,
) -> str | None:
    """Why the kernel cannot run q [P, C, K, G, h] on a cache k [..., S, h], or None if it can.

    pages: columns of the page table, None if rows are pages; visits: most blocks that are listed for a tile.
    """
    dtype, slots, size = jnp.dtype(k.dtype), k.shape[-2], k.shape[-1]
    if dtype not in (jnp.bfloat16, jnp.float32) or q.dtype != dtype:
        return f"it takes queries and a cache of bfloat16 or float32, both alike, not {q.dtype} and {dtype}"
    if size % LANES:
        return f"heads of size {size} are not a multiple of {LANES}"
    tile = 32 // dtype.itemsize  # rows of a register
    if slots % tile:
        return f"pages of {slots} positions do not divide into tiles of {tile}"
    if q.shape[1] % tile:
        return f"chunks of {q.shape[1]} tokens do not divide into tiles of {tile}"
    blocks = blocks or _default(q)
    listed = q.shape[2] * pl.cdiv(q.shape[1], blocks.queries) * (visits + 1) if visits else 0
    scalars = 4 * q.shape[0] * (2 * pl.cdiv(q.shape[1], blocks.part) + (pages or 0) + listed)
    if scalars > SMEM_BYTES:
        return f"tables of {q.shape[0]} chunks need {scalars} bytes of scalar memory, not {SMEM_BYTES}"
    need = _vmem_bytes(q.shape, dtype.itemsize, blocks)
    if need > VMEM_BYTES:
        return f"{q.shape[3]} heads of size {size} need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def _default(q: jax.ShapeDtypeStruct) -> Blocks:
    return blocks(q.shape[1], q.shape[3], q.shape[4], jnp.dtype(q.dtype).itemsize)


def _vmem_bytes(q: tuple[int, ...], itemsize: int, blocks: Blocks) -> int:
    *_, group, size = q
    queries = blocks.queries * group
    kept = queries * (4 * size * itemsize + 4 * size + 8 * LANES) + 4 * blocks.queries * LANES
    return kept + 2 * BUFFERS * blocks.keys * size * itemsize + 3 * 4 * blocks.rows * blocks.keys


def prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, K, G, h]: chunk p holds the ascending positions[p], [P, C] int32, of row rows[p]; negative ones see
    nothing (out 0, lse -inf). All are written in the cache. Chunks of rows that are not there give 0.

    k, v: [N, K, S, h], or [L, N, K, S, h] of which `layer` is read. Position p of row b lives in page
    pages[b, p // S], slot p mod S; pages [B, M] int32; without, row b is page b. ring: the positions of a row wrap
    around its pages; then there are at least as many slots as the window and a chunk's span. window: a query sees only
    the last `window` positions up to its own. limit: no position reaches it. sinks [K, G]: a logit that joins the
    softmax's denominator. visits [P, K, T, M] int32: of the positions that the queries of tile t see, only those in
    these blocks count, block n being the positions from n * blocks.keys on; negative ones are none. Blocks that no
    query of a tile sees are not read.
    Returns out [P, C, K, G, h] in q's dtype and the log of the softmax's denominator, lse [P, C, K, G] float32.
    Raises ValueError where `unsupported` says why.
    """
    chunks, width, heads, group, size = q.shape
    columns = None if pages is None else pages.shape[1]
    if reason := unsupported(q, k, pages=columns, visits=0 if visits is None else visits.shape[-1], blocks=blocks):
        raise ValueError(f"the TPU kernel does not run this prefill attention: {reason}")
    if ring and window is None:
        raise ValueError("a ring cache forgets old positions: pass the layer's window")
    if visits is not None and blocks is None:
        raise ValueError("visits are numbers of blocks: pass `blocks`, which says of what size")
    blocks = blocks or _default(q)
    k, v = (x if x.ndim == 5 else x[None] for x in (k, v))
    slots, tile, part, stacked = k.shape[3], blocks.queries, blocks.part, blocks.stacked(group)
    capacity = slots * (columns or 1)
    if limit is not None and not ring:
        capacity = min(capacity, limit)
    tiles, parts = pl.cdiv(width, tile), tile // part
    at = jnp.arange(tiles * parts) * part
    firsts, lasts = (positions[:, jnp.minimum(x, width - 1)].astype(jnp.int32) for x in (at, at + part - 1))
    lasts = lasts if ring else jnp.minimum(lasts, capacity - 1)
    there = rows < (k.shape[1] if pages is None else pages.shape[0])
    scalars = [jnp.where(there, rows, -1).astype(jnp.int32), jnp.asarray(layer, jnp.int32).reshape(1), firsts, lasts]
    if pages is not None:
        scalars.append(pages[jnp.where(there, rows, 0)].astype(jnp.int32))
    if visits is not None:
        scalars += _visible(visits, firsts[:, ::parts], lasts[:, parts - 1 :: parts], window, blocks.keys)
    if not interpret:  # or XLA would bring a small cache to VMEM whole
        k, v = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k, v))
    flat = (chunks, width, heads * group * size)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    tokens = pl.BlockSpec((None, tile, group * size), lambda p, k, t, *_: (p, t, k))
    inputs = [q.reshape(flat), positions.astype(jnp.int32)[:, None]]
    specs = [tokens, pl.BlockSpec((None, 1, tile), lambda p, k, t, *_: (p, 0, t))]
    if sinks is not None:
        inputs.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None] * LOG2E, (heads, group, LANES)))
        specs.append(pl.BlockSpec((None, group, LANES), lambda p, k, t, *_: (k, 0, 0)))
    products, count = parts * (group // stacked), stacked * part
    kernel = functools.partial(
        _kernel,
        paged=pages is not None,
        most_visits=None if visits is None else visits.shape[-1],
        has_sinks=sinks is not None,
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
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(chunks, heads, tiles),
            in_specs=[*specs, whole, whole],
            out_specs=[tokens, pl.BlockSpec((None, None, group, tile), lambda p, k, t, *_: (p, k, 0, t))],
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, blocks.keys, size), k.dtype),
                pltpu.VMEM((BUFFERS, blocks.keys, size), v.dtype),
                pltpu.VMEM((parts, count, LANES), jnp.int32),
                pltpu.VMEM((count, blocks.keys), jnp.float32),
                pltpu.VMEM((count, blocks.keys), v.dtype),
                pltpu.VMEM((count, LANES), jnp.float32),
                pltpu.VMEM((products, count, LANES), jnp.float32),
                pltpu.VMEM((products, count, LANES), jnp.float32),
                pltpu.VMEM((products, count, size), jnp.float32),
                pltpu.SMEM((3,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, BUFFERS)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(flat, q.dtype),
            jax.ShapeDtypeStruct((chunks, heads, group, width), jnp.float32),
        ],
        # Checks triple what it takes to start a copy; `start_copy` and `last_of` keep them in bounds.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * size,
            bytes_accessed=2 * q.size * q.dtype.itemsize + 2 * chunks * heads * tiles * seen * size * k.dtype.itemsize,
            transcendentals=pairs,
        ),
        interpret=interpret,
        name="prefill_attention",
    )(*scalars, *inputs, k, v)
    return out.reshape(q.shape), jnp.moveaxis(lse, 3, 1)


def _visible(visits: jax.Array, first: jax.Array, last: jax.Array, window: int | None, keys: int) -> list[jax.Array]:
    """Of visits [P, K, T, M] those that some query of a tile sees, whose first and last positions are [P, T]: how many
    [P, K * T], and these in order, [P, K * T * M]."""
    first, last = first[:, None, :, None], last[:, None, :, None]
    seen = (visits >= 0) & (visits * keys <= last)
    if window is not None:
        seen &= (visits + 1) * keys > first - window + 1
    ordered = jnp.sort(jnp.where(seen, visits, jnp.iinfo(jnp.int32).max), axis=-1)
    return [x.astype(jnp.int32).reshape(visits.shape[0], -1) for x in (jnp.sum(seen, axis=-1), ordered)]


def _kernel(*refs, paged, most_visits, has_sinks, scale, window, softcap, ring, capacity, unit, edge):
    """One tile of queries and one KV head. Logits are in units of log 2, as exponentials are taken with base 2.

    Scalars: rows [P], -1 if absent; layer [1]; positions of the first and the last query of every product [P, T * R];
    pages of each chunk [P, M]; number of visits and these [P, K * T (* M)]. q, out [tile, G * h], positions [1, tile],
    sinks [G, 128], k, v [L, N, K, S, h] in HBM, lse [G, tile]. Scratch: copies of blocks [BUFFERS, keys, h]; for each
    part of the tile, positions of a product's queries [R, rows, 128]; the logits that are ahead [rows, keys]; what is
    left of the block before: weights [rows, keys] and decay [rows, 128]; for each product, of some heads and a part,
    the running maximum and sum [n, rows, 128] (the sum's lanes add up, the maximum's are alike) and accumulator
    [n, rows, h]; the step and block to be copied next and the buffer to be read next; semaphores.
    """
    refs = list(refs)
    rows_ref, layer_ref, firsts_ref, lasts_ref = (refs.pop(0) for _ in range(4))
    table = refs.pop(0) if paged else None
    counts_ref, visits_ref = (refs.pop(0), refs.pop(0)) if most_visits else (None, None)
    q_ref, positions_ref = refs.pop(0), refs.pop(0)
    sinks_ref = refs.pop(0) if has_sinks else None
    k_hbm, v_hbm, out_ref, lse_ref, k_buf, v_buf, *refs = refs
    query_s, ahead_s, p_s, decay_s, top_s, sum_s, acc_s, state, sems = refs
    products, rows, size = acc_s.shape
    parts, keys, slots = query_s.shape[0], k_buf.shape[1], k_hbm.shape[3]
    part = q_ref.shape[0] // parts
    stacked, per_part = rows // part, products // parts
    heads, tiles = pl.num_programs(1), pl.num_programs(2)
    steps = pl.num_programs(0) * heads * tiles
    here = tuple(pl.program_id(n) for n in range(3))  # chunk, head, tile
    exact = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    # ---- which blocks a tile visits; `at` is its chunk, head and tile

    def last_of(at):
        """The last position that a query of the tile sees."""
        return lasts_ref[at[0], at[2] * parts + parts - 1]

    def lowest_of(at):
        """The first."""
        return 0 if window is None else jnp.maximum(firsts_ref[at[0], at[2] * parts] - window + 1, 0)

    def visits_of(at):
        """How many."""
        if most_visits:
            count = counts_ref[at[0], at[1] * tiles + at[2]]
        else:
            count = lax.div(last_of(at) + keys - start_of(at, 0), keys)
        return jnp.where(rows_ref[at[0]] < 0, 0, jnp.maximum(count, 0))

    def start_of(at, index):
        """The first position of one."""
        if most_visits:
            first = (at[1] * tiles + at[2]) * most_visits
            return visits_ref[at[0], first + jnp.minimum(index, most_visits - 1)] * keys
        return div(lowest_of(at), unit) * unit + index * keys

    # ---- copies

    def start_copy(at, position, offset, count, buf):
        """Start the copies that bring `count` positions of a page to `offset` in a buffer."""
        page, slot = rows_ref[at[0]], lax.rem(position, capacity) if ring else position
        if paged:
            page, slot = jnp.clip(table[at[0], div(slot, slots)], 0, k_hbm.shape[1] - 1), rem(slot, slots)
        source, into = pl.ds(pl.multiple_of(slot, unit), count), pl.ds(pl.multiple_of(offset, unit), count)
        for n, (hbm, vmem) in enumerate(((k_hbm, k_buf), (v_hbm, v_buf))):
            source_ref = hbm.at[layer_ref[0], page, at[1], source]
            pltpu.make_async_copy(source_ref, vmem.at[buf, into], sems.at[n, buf]).start()

    def units_of(at, index):
        """How many units of a block there are."""
        return jnp.minimum(div(last_of(at) - start_of(at, index) + unit, unit), keys // unit)

    def start_block(at, index, buf):
        units, start = units_of(at, index), start_of(at, index)
        if slots >= keys:
            whole = (units == keys // unit) & (rem(start, slots) + keys <= slots)
            pl.when(whole)(lambda: start_copy(at, start, 0, keys, buf))
            units = jnp.where(whole, 0, units)
        lax.fori_loop(0, units, lambda i, _: start_copy(at, start + i * unit, i * unit, unit, buf), None)

    def wait_block(index, buf):
        units = units_of(here, index)

        def wait(i, count):
            """A wait takes only the number of bytes from its copy."""
            for n, vmem in enumerate((k_buf, v_buf)):
                some = vmem.at[buf, pl.ds(pl.multiple_of(i * unit, unit), count)]
                pltpu.make_async_copy(some, some, sems.at[n, buf]).wait()

        whole = units == keys // unit
        pl.when(whole)(lambda: wait(0, keys))
        lax.fori_loop(0, jnp.where(whole, 0, units), lambda i, _: wait(i, unit), None)

    def where(step):
        return lax.div(step, heads * tiles), lax.rem(lax.div(step, tiles), heads), lax.rem(step, tiles)

    def is_empty(step):
        return (step < steps) & (visits_of(where(jnp.minimum(step, steps - 1))) == 0)

    def start_next(buf):
        """Start the copies of the block whose turn it is, if any is left."""
        step, index = state[0], state[1]

        @pl.when(step < steps)
        def _():
            at = where(step)
            start_block(at, index, buf)
            ends = index + 1 == visits_of(at)
            state[0] = lax.while_loop(is_empty, lambda step: step + 1, step + ends.astype(jnp.int32))
            state[1] = jnp.where(ends, 0, index + 1)

    @pl.when((here[0] == 0) & (here[1] == 0) & (here[2] == 0))
    def _():
        state[0] = lax.while_loop(is_empty, lambda step: step + 1, 0)
        state[1] = 0
        state[2] = 0
        lax.fori_loop(0, BUFFERS - 2, lambda buf, _: start_next(buf), None)

    # ---- computation

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

    def scores(product, buf, at):
        """Logits [rows, n] of the positions `at` in a buffer."""
        of, tokens = heads_of(product)
        queries = jnp.concatenate([q_ref[tokens, head * size : (head + 1) * size] for head in of])
        dimensions = (((1,), (1,)), ((), ()))
        s = lax.dot_general(queries, k_buf[buf, at], dimensions, exact, preferred_element_type=jnp.float32)
        return s * scale if softcap is None else softcap * jnp.tanh(s * (scale / softcap))

    def weights(product, logits):
        """Of the values, and of what the accumulator holds."""
        old = top_s[product]
        top = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
        p, decay = jnp.exp2(logits - wide(top, logits.shape[1])), jnp.exp2(old - top)
        top_s[product] = top
        sum_s[product] = sum_s[product] * decay + folded(p)
        return p.astype(v_buf.dtype), decay

    def accumulate(product, p, decay, values):
        out = jnp.dot(p, values, precision=exact, preferred_element_type=jnp.float32)
        acc_s[product] = acc_s[product] * wide(decay, size) + out

    def is_full(index):
        """Whether there is such a block, and all queries of the tile see all of it."""
        start, first, last = start_of(here, index), firsts_ref[here[0], here[2] * parts], last_of(here)
        full = (index < visits) & (start + keys - 1 <= jnp.minimum(first, last))
        return full if window is None else full & (start > last - window)

    def take_full(carry):
        """Take in a block that is there, the last product's values of the block before, and all but those of its own.
        Its first logits are ahead, and the next block's will be, if it is full."""
        index, buf, previous = carry
        more, then = is_full(index + 1), _after(buf)
        start_next(_after(then))
        pl.when(more)(lambda: wait_block(index + 1, then))
        logits, behind = ahead_s[...], (products - 1, p_s[...], decay_s[...], v_buf[previous])
        for product in range(products):
            following = (product + 1, buf) if product + 1 < products else (0, jnp.where(more, then, buf))
            ahead = scores(*following, slice(None))
            p, decay = weights(product, logits)
            accumulate(*behind)
            logits, behind = ahead, (product, p, decay, v_buf[buf])
        ahead_s[...], p_s[...], decay_s[...] = logits, p, decay
        return index + 1, then, buf

    def take_all_full(carry):
        index, buf = carry
        wait_block(index, buf)
        ahead_s[...] = scores(0, buf, slice(None))
        p_s[...], decay_s[...] = jnp.zeros_like(p_s), jnp.ones_like(decay_s)  # nothing is left of a block before
        *carry, last = lax.while_loop(lambda c: is_full(c[0]), take_full, (index, buf, buf))
        accumulate(products - 1, p_s[...], decay_s[...], v_buf[last])
        return tuple(carry)

    def take_edge(carry):
        """Take in a block of which some queries do not see all, in parts."""
        index, buf = carry
        start_next(_after(_after(buf)))
        wait_block(index, buf)
        start, last = start_of(here, index), last_of(here)

        def take_part(i, _):
            at = pl.ds(pl.multiple_of(i * edge, edge), edge)
            for p in range(parts):
                seen = start + i * edge <= lasts_ref[here[0], here[2] * parts + p]
                if window is not None:
                    seen &= start + (i + 1) * edge > firsts_ref[here[0], here[2] * parts + p] - window + 1
                pl.when(seen)(functools.partial(take_masked, p, buf, at, start + i * edge))

        lax.fori_loop(0, jnp.minimum(div(last - start, edge) + 1, keys // edge), take_part, None)
        return index + 1, _after(buf)

    def take_masked(p, buf, at, start):
        """Take in some positions, from `start` on, for the queries of part `p`."""
        held = start + lax.broadcasted_iota(jnp.int32, (edge, size), 0)
        held = (held >= lowest_of(here)) & (held <= last_of(here))  # 0 * NaN is NaN
        values = jnp.where(held, v_buf[buf, at].astype(jnp.float32), 0).astype(v_buf.dtype)
        query, key = wide(query_s[p], edge), start + lax.broadcasted_iota(jnp.int32, (rows, edge), 1)
        seen = (key <= query) & (key <= last_of(here))
        if window is not None:
            seen &= key > query - window
        ahead = scores(p * per_part, buf, at)
        for product in range(p * per_part, (p + 1) * per_part):
            logits = ahead
            if product + 1 < (p + 1) * per_part:
                ahead = scores(product + 1, buf, at)
            accumulate(product, *weights(product, jnp.where(seen, logits, MASKED)), values)

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

    visits = visits_of(here)
    prepare()
    carry = 0, state[2]
    if window is not None:
        carry = lax.while_loop(lambda c: (c[0] < visits) & ~is_full(c[0]), take_edge, carry)
    carry = lax.cond(is_full(carry[0]), take_all_full, lambda carry: carry, carry)
    state[2] = lax.while_loop(lambda c: c[0] < visits, take_edge, carry)[1]
    finish()


def _after(buf: jax.Array) -> jax.Array:
    return jnp.where(buf == BUFFERS - 1, 0, buf + 1)
