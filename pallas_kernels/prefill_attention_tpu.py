"""Prefill attention on TPUs: flash attention of chunks over a paged cache that has their prefix and the chunks
themselves (Dao 2023, "FlashAttention-2").

The queries of a tile and a KV head visit blocks of keys one after another. The kernel never copies blocks that no query
of the tile sees, and uses no mask for blocks that all of them see. It computes the next logits during a softmax,
also from one block to the next. Copies run ahead of the computation, also from one tile to the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import AttentionOptions, KvCache, Shaped
from inferlib.pallas_kernels.arithmetic_tpu import LANES, div, folded, rem, wide
from inferlib.pallas_kernels.generations_tpu import cores, untaken
from inferlib.pallas_kernels.tile_stream_tpu import STATE, SUBLANES, TileGrid, TileStream, scale_rows, visible
from inferlib.pallas_kernels.tuned_tpu import tuned

# Finite, so that differences are finite. A maximum starts at LOWEST: weights are 0 even where all logits are masked.
MASKED, LOWEST = (-part * float(jnp.finfo(jnp.float32).max) for part in (0.7, 0.3))
LOG2E = math.log2(math.e)
FAR = 1 << 30  # a position behind all others
# Buffers of blocks: one is in the softmax, one awaits its last product, one has its logits computed, one is copied.
BUFFERS = 4
# The most bytes of a tile's queries, of all heads of a KV head, and the most tokens of a tile in units of 128.
ROWS_BYTES, MOST_TILES = 512 << 10, 8
VMEM_BYTES = 14 << 20  # of the 16 MiB that the compiler gives a kernel on v5e and v5p by default
SMEM_BYTES = 512 << 10  # of 1 MiB
QUANTISED = (jnp.int8, jnp.float8_e4m3fn)


@dataclass(frozen=True)
class Blocks:
    """queries: tokens of a tile. keys: positions of a block. rows: the most queries times heads that share a product
    and a softmax. edge: positions that are computed at once in blocks with a mask. listed: positions of a block of a
    list, of which as many as fill `keys` are computed at once; None: `keys`."""

    queries: int
    keys: int
    rows: int = 256
    edge: int = 256
    listed: int | None = None

    def __post_init__(self):
        if self.rows % LANES or (self.queries > LANES and self.queries % LANES):
            raise ValueError(f"tiles of {self.queries} queries in products of {self.rows} are not multiples of {LANES}")
        if self.keys % self.edge or self.edge % LANES:
            raise ValueError(f"blocks of {self.keys} keys do not divide into parts of {self.edge}, a multiple of 128")
        if self.keys % self.of_list or (self.of_list % self.edge and self.edge % self.of_list):
            raise ValueError(f"{self.keys} keys are not listed blocks of {self.of_list} in parts of {self.edge}")

    @property
    def of_list(self) -> int:
        """Positions of a block of a list."""
        return self.listed or self.keys

    @property
    def part(self) -> int:
        """Tokens of a product."""
        return self.queries if self.queries <= LANES else math.gcd(self.queries, self.rows)

    def stacked(self, group: int) -> int:
        """Heads of a product, of `group` that share a KV head."""
        return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * self.part <= self.rows))


@tuned("prefill_attention", Blocks)
def blocks(width: int, group: int, size: int, itemsize: int) -> Blocks:
    """Block sizes for chunks of `width` tokens and `group` heads of `size` that share a KV head."""
    most = min(max(ROWS_BYTES // (group * size * itemsize * LANES), 1), MOST_TILES) * LANES
    if width <= LANES:
        queries = width
    else:  # equal tiles instead of full ones and a small rest
        tiles = pl.cdiv(pl.cdiv(width, most), cores()) * cores()
        queries = min(pl.cdiv(pl.cdiv(width, tiles), LANES), width // LANES) * LANES
    chosen = Blocks(queries, 512)
    # Few products wait for one another, so they should be large.
    return chosen if group // chosen.stacked(group) > 2 else replace(chosen, edge=512)


def unsupported(q: Shaped, cache: KvCache, *, visits: int = 0, blocks: Blocks | None = None) -> str | None:
    """Why the kernel cannot run q [P, C, K, G, h] on a cache, or None if it can. The arrays may be shapes.

    q: as `narrowed` has them. visits: the most blocks that are listed for a tile.
    """
    k, scales = cache.k, cache.scaled
    dtype, slots, size = jnp.dtype(k.dtype), k.shape[-2], k.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or (dtype not in QUANTISED if scales else dtype != q.dtype):
        stored = "int8 or float8_e4m3fn" if scales else "their type"
        return f"it takes queries of bfloat16 or float32 and a cache of {stored}, not {q.dtype} and {dtype}"
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
    scalars = 4 * q.shape[0] * (2 * pl.cdiv(q.shape[1], blocks.part) + (cache.columns or 0) + listed)
    if scalars > SMEM_BYTES:
        return f"tables of {q.shape[0]} chunks need {scalars} bytes of scalar memory, not {SMEM_BYTES}"
    need = _vmem_bytes(q, size * dtype.itemsize, scale_rows(q.shape[2]) if scales else 0, blocks)
    if need > VMEM_BYTES:
        return f"{q.shape[3]} heads of size {size} need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def narrowed(q: Shaped, key_size: int | None) -> jax.ShapeDtypeStruct:
    """Queries of which the kernel reads the lanes that meet keys. key_size: see `AttentionOptions`."""
    size = min(pl.cdiv(key_size or q.shape[-1], LANES) * LANES, q.shape[-1])
    return jax.ShapeDtypeStruct((*q.shape[:-1], size), q.dtype)


def _default(q: Shaped) -> Blocks:
    return blocks(q.shape[1], q.shape[3], q.shape[4], jnp.dtype(q.dtype).itemsize)


def _vmem_bytes(q: Shaped, cell: int, scales: int, blocks: Blocks) -> int:
    """cell: bytes of one. scales: how many scales of a position are copied."""
    *_, group, size = q.shape
    queries, position = blocks.queries * group, cell + 4 * (scales and -(-scales // SUBLANES) * SUBLANES)
    state = queries * (4 * size * jnp.dtype(q.dtype).itemsize + 4 * size + 8 * LANES) + 4 * blocks.queries * LANES
    return state + 2 * BUFFERS * blocks.keys * position + 3 * 4 * blocks.rows * blocks.keys


def prefill_attention(
    q: jax.Array,
    cache: KvCache,
    rows: jax.Array,
    positions: jax.Array,
    options: AttentionOptions,
    *,
    visits: jax.Array | None = None,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [P, C, K, G, h]: chunk p holds the ascending positions[p], [P, C] int32, of row rows[p].

    The cache has all of these positions already. Negative positions see nothing (out 0, lse -inf); chunks of rows that
    do not exist give 0. A ring has at least as many slots as the window and a chunk's span. visits [P, K, T, M] int32:
    the queries of tile t see only positions of these blocks, where block n begins at position n * blocks.of_list and
    negative numbers are no block. The kernel does not read blocks that no query of a tile sees.
    Returns out [P, C, K, G, h] in q's dtype and the log of the softmax's denominator, lse [P, C, K, G] float32.
    Raises ValueError with the reason of `unsupported`, for a ring without a window and for visits without blocks.
    """
    window, narrow = options.shared_window, narrowed(q, options.key_size)
    if reason := unsupported(narrow, cache, visits=0 if visits is None else visits.shape[-1], blocks=blocks):
        raise ValueError(f"the TPU kernel does not run this prefill attention: {reason}")
    if cache.ring and window is None:
        raise ValueError("a ring cache forgets old positions: pass the layer's window")
    if visits is not None and blocks is None:
        raise ValueError("visits are numbers of blocks: pass `blocks`, which says of what size")
    first_value = 0 if options.key_size is None else options.key_size // LANES * LANES
    blocks = blocks or _default(narrow)
    arrays = [x if cache.k.ndim == 5 else x[None] for x in cache.arrays]
    scalars = _scalars(cache, rows, positions, window, visits, blocks)
    if not interpret:  # otherwise XLA would bring a small cache to VMEM
        arrays = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
    inputs = _lay_out(q[..., : narrow.shape[-1]], positions, options.sinks, arrays)
    grid = TileGrid.of(q.shape[0], q.shape[2], pl.cdiv(q.shape[1], blocks.queries))
    kernel = _kernel_of(cache, options, 0 if visits is None else visits.shape[-1], blocks, grid)
    scratch = _scratch(inputs, first_value, blocks)
    cost = _cost(inputs, scratch, cache, window, blocks)
    out, lse = _call(kernel, scalars, inputs, scratch, blocks, grid, cost, interpret)
    out = out.reshape(*q.shape[:-1], -1)
    return jnp.pad(out, ((0, 0),) * 4 + ((first_value, 0),)), jnp.moveaxis(lse, 3, 1)


def _capacity(cache: KvCache) -> int:
    """Positions that a row of the cache has room for."""
    capacity = cache.k.shape[-2] * (cache.columns or 1)
    return capacity if cache.limit is None or cache.ring else min(capacity, cache.limit)


def _scalars(
    cache: KvCache,
    rows: jax.Array,
    positions: jax.Array,
    window: int | None,
    visits: jax.Array | None,
    blocks: Blocks,
) -> _Scalars:
    width, tile, part = positions.shape[1], blocks.queries, blocks.part
    parts = tile // part
    at = jnp.arange(pl.cdiv(width, tile) * parts) * part
    firsts, lasts = (positions[:, jnp.minimum(x, width - 1)].astype(jnp.int32) for x in (at, at + part - 1))
    lasts = lasts if cache.ring else jnp.minimum(lasts, _capacity(cache) - 1)
    there = rows < (cache.k.shape[-4] if cache.pages is None else cache.pages.shape[0])
    chosen = jnp.where(there, rows, -1).astype(jnp.int32)
    scalars = _Scalars(chosen, jnp.asarray(cache.layer_or_first, jnp.int32).reshape(1), firsts, lasts)
    if cache.pages is not None:
        scalars = scalars._replace(table=cache.pages[jnp.where(there, rows, 0)].astype(jnp.int32))
    if visits is not None:
        lists = visible(visits, firsts[:, ::parts], lasts[:, parts - 1 :: parts], window, blocks.of_list)
        scalars = scalars._replace(listed=tuple(lists))
    return scalars


def _lay_out(q: jax.Array, positions: jax.Array, sinks: jax.Array | None, arrays: Sequence[jax.Array]) -> _Inputs:
    """The kernel's inputs, for the cache's arrays [L, N, K, S, ...]."""
    # Queries lie head by head, as products with weights leave them. In any other order XLA would copy them.
    inputs = _Inputs(jnp.transpose(q, (2, 3, 0, 1, 4)), positions.astype(jnp.int32)[:, None], None, tuple(arrays))
    if sinks is None:
        return inputs
    shape = (*q.shape[2:4], LANES)
    return inputs._replace(sinks=jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None] * LOG2E, shape))


def _kernel_of(
    cache: KvCache, options: AttentionOptions, most_listed: int, blocks: Blocks, grid: TileGrid
) -> Callable[..., None]:
    slots, softcap = cache.k.shape[-2], options.softcap
    unit = slots if cache.pages is not None and slots <= 2 * LANES else math.gcd(slots, LANES)
    return functools.partial(
        _kernel,
        arrays=1 if cache.v is None else 2,
        scaled=cache.scaled,
        most_listed=most_listed,
        scale=options.scale * LOG2E,
        window=options.shared_window,
        softcap=softcap and softcap * LOG2E,
        ring=cache.ring,
        capacity=_capacity(cache),
        unit=math.gcd(unit, blocks.of_list) if most_listed else unit,
        listed_keys=blocks.of_list,
        edge=blocks.edge,
        grid=grid,
    )


def _cost(inputs: _Inputs, scratch: _Scratch, cache: KvCache, window: int | None, blocks: Blocks) -> pl.CostEstimate:
    heads, group, chunks, width, size = inputs.q.shape
    tokens, numbers = chunks * width * heads * group, size + scratch.acc.shape[-1]  # of a query and its output
    capacity = _capacity(cache)
    seen = min(max(capacity - width // 2, 1), window or capacity)  # most that a query sees, in full chunks
    pairs = tokens * seen
    position_bytes = sum(x.shape[-1] * x.dtype.itemsize if x.ndim == 5 else 4 * scale_rows(heads) for x in inputs.cache)
    copied = chunks * heads * pl.cdiv(width, blocks.queries) * seen * position_bytes
    return pl.CostEstimate(
        flops=2 * pairs * numbers,
        bytes_accessed=tokens * numbers * inputs.q.dtype.itemsize + copied,
        transcendentals=pairs,
    )


def _call(
    kernel: Callable[..., None],
    scalars: _Scalars,
    inputs: _Inputs,
    scratch: _Scratch,
    blocks: Blocks,
    grid: TileGrid,
    cost: pl.CostEstimate,
    interpret: bool | pltpu.InterpretParams,
) -> Sequence[jax.Array]:
    (heads, group, chunks, width, size), values = inputs.q.shape, scratch.acc.shape[-1]
    tile = blocks.queries
    specs = _Inputs(
        grid.spec((None, group, None, tile, size), lambda p, k, t, _: (k, 0, p, t, 0)),
        grid.spec((None, 1, tile), lambda p, k, t, _: (p, 0, t)),
        None if inputs.sinks is None else grid.spec((None, group, LANES), lambda p, k, t, _: (k, 0, 0)),
        (pl.BlockSpec(memory_space=pl.ANY),) * len(inputs.cache),
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.shape,
            in_specs=(specs,),
            out_specs=[
                grid.spec((None, tile, group * values), lambda p, k, t, _: (p, t, k)),
                grid.spec((None, None, group, tile), lambda p, k, t, _: (p, k, 0, t)),
            ],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((chunks, width, heads * group * values), inputs.q.dtype),
            jax.ShapeDtypeStruct((chunks, heads, group, width), jnp.float32),
        ],
        # Checks triple the work of starting a copy; `TileStream` and `lasts` keep them in bounds.
        compiler_params=pltpu.CompilerParams(dimension_semantics=grid.semantics, disable_bounds_checks=True),
        cost_estimate=cost,
        interpret=interpret,
        name="prefill_attention",
    )(scalars, inputs)


def _scratch(inputs: _Inputs, first_value: int, blocks: Blocks) -> _Scratch:
    """first_value: where the values of a cell begin."""
    (heads, group, *_), cache, keys = inputs.q.shape, inputs.cache, blocks.keys
    size = cache[0].shape[-1]
    stacked, parts = blocks.stacked(group), blocks.queries // blocks.part
    products, count = parts * (group // stacked), stacked * blocks.part
    return _Scratch(
        buffers=(
            *[pltpu.VMEM((BUFFERS, keys, size), x.dtype) for x in cache if x.ndim == 5],
            *[pltpu.VMEM((BUFFERS, scale_rows(heads), keys), x.dtype) for x in cache if x.ndim == 4],
        ),
        queries=pltpu.VMEM((parts, count, LANES), jnp.int32),
        ahead=pltpu.VMEM((count, keys), jnp.float32),
        weights=pltpu.VMEM((count, keys), inputs.q.dtype),
        decay=pltpu.VMEM((count, LANES), jnp.float32),
        top=pltpu.VMEM((products, count, LANES), jnp.float32),
        sum=pltpu.VMEM((products, count, LANES), jnp.float32),
        acc=pltpu.VMEM((products, count, size - first_value), jnp.float32),
        state=pltpu.SMEM((STATE,), jnp.int32),
        semaphores=pltpu.SemaphoreType.DMA((len(cache), BUFFERS)),
    )


class _Scalars(NamedTuple):
    """Scalar memory, as in `TileStream`: rows, layer, positions of queries, the page table, lists of blocks."""

    rows: Any
    layer: Any
    firsts: Any
    lasts: Any
    table: Any = None
    listed: tuple | None = None


class _Inputs(NamedTuple):
    """q [G, tile, h], positions [1, tile], sinks [G, 128]. HBM: k, v [L, N, K, S, h] (or only k), then their scales
    [L, N, K, S]."""

    q: Any
    positions: Any
    sinks: Any
    cache: tuple


class _Scratch(NamedTuple):
    """buffers: copies of blocks, then of scales. queries [parts, rows, 128]: the positions of the queries in each part
    of the tile. ahead [rows, keys]: the next logits. weights [rows, keys], decay [rows, 128]: of the block before,
    whose product with values is still to come. top, sum [n, rows, 128], acc [n, rows, h]: the running maximum (equal in
    all lanes), sum (spread over the lanes) and accumulator of each product, which has some heads of a part. state,
    semaphores: those of the stream."""

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
    listed_keys,
    edge,
    grid,
):
    """One tile of queries and one KV head: out_ref [tile, G * h], lse_ref [G, tile]. Logits are in units of log 2, as
    exponentials are taken with base 2."""
    q_ref, positions_ref, sinks_ref, in_hbm = inputs
    in_vmem, query_s, ahead_s, p_s, decay_s, top_s, sum_s, acc_s, state, semaphores = scratch
    k_buf, v_buf, scales = in_vmem[0], in_vmem[arrays - 1], in_vmem[arrays:]
    products, rows, size = acc_s.shape
    key_lanes, first_value = q_ref.shape[-1], v_buf.shape[-1] - size
    parts = query_s.shape[0]
    part = q_ref.shape[1] // parts
    stacked, per_part = rows // part, products // parts
    exact = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    how = parts, window, ring, capacity, unit, grid, listed_keys
    stream = TileStream(*scalars, most_listed, in_hbm, in_vmem, state, semaphores, *how)

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
        """The keys at the positions `at` in a buffer, and the factor on products with them."""
        factor = scale if softcap is None else scale / softcap
        return operand(k_buf[buf, at, :key_lanes]), factor * scales_of(0, buf, at) if scaled else factor

    def values_of(buf):
        return operand(v_buf[buf, :, first_value:])

    def scores(product, keys, factor):
        """Logits [rows, n]."""
        of, tokens = heads_of(product)
        queries = jnp.concatenate([q_ref[head, tokens] for head in of])
        dimensions = (((1,), (1,)), ((), ()))
        s = lax.dot_general(queries, keys, dimensions, exact, preferred_element_type=jnp.float32) * factor
        return s if softcap is None else softcap * jnp.tanh(s)

    def weights(product, logits, scales):
        """The weights of the values, and the weight of the accumulator. scales [1, n]: scales of the values, or
        None."""
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
        """True if the block exists and all queries of the tile see all of it."""
        start, first, last = stream.start(index), stream.first(), stream.last()
        full = (index < visits) & stream.ends_by(index, jnp.minimum(first, last))
        return full if window is None else full & (start > last - window)

    def take_full(carry):
        """Take in a block: first the values of the previous block's last product, then the values of all of this
        block's products but the last. The block's first logits are in `ahead`, and the next block's will be if it is
        full."""
        index, buf, previous = carry
        more, then = is_full(index + 1), stream.after(buf)
        stream.start_next(stream.after(then))
        pl.when(more)(lambda: stream.wait(index + 1, then))
        block, values = keys_of(buf, slice(None)), values_of(buf)
        value_scales = scales_of(1, buf, slice(None)) if scaled else None
        logits, behind = ahead_s[...], (products - 1, p_s[...], decay_s[...], values_of(previous))
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
        accumulate(products - 1, p_s[...], decay_s[...], values_of(last))
        return tuple(carry)

    def take_edge(carry):
        """Take in a block of which some queries do not see all, in parts."""
        index, buf = carry
        stream.start_next(stream.after(stream.after(buf)))
        stream.wait(index, buf)

        def take_part(i, _):
            at, starts = pl.ds(pl.multiple_of(i * edge, edge), edge), starts_of(index, i)
            for p in range(parts):
                seen = starts[0] <= stream.last(p)
                if window is not None and len(starts) == 1:
                    seen &= starts[0] + edge > stream.first(p) - window + 1
                pl.when(seen)(functools.partial(take_masked, p, buf, at, starts))

        lax.fori_loop(0, div(stream.copied(index) + edge - 1, edge), take_part, None)
        return index + 1, stream.after(buf)

    def starts_of(index, i):
        """The positions at which part `i` of a block begins, and each further listed block in it."""
        count = max(edge // listed_keys, 1) if most_listed else 1
        offsets = [i * edge + n * listed_keys for n in range(count)]
        starts = [stream.start(index, offset=offset) for offset in offsets]
        copied = stream.copied(index)
        return starts[:1] + [
            jnp.where(x < copied, start, FAR) for x, start in zip(offsets[1:], starts[1:], strict=True)
        ]

    def take_masked(p, buf, at, starts):
        """Take in some positions, of blocks that begin at `starts`, for the queries of part `p`."""

        def positions(shape, axis):
            each = (*shape[:axis], shape[axis] // len(starts), *shape[axis + 1 :])
            blocks = [start + lax.broadcasted_iota(jnp.int32, each, axis) for start in starts]
            return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis)

        def cleaned(x, axis):
            """x with zeros at positions that no query of the tile sees: 0 * NaN is NaN."""
            position = positions(x.shape, axis)
            seen = (position >= stream.lowest()) & (position <= stream.last())
            return jnp.where(seen, x.astype(jnp.float32), 0)

        values = v_buf[buf, at, first_value:]
        values = (values if values.dtype == jnp.int8 else cleaned(values, 0)).astype(p_s.dtype)
        value_scales = cleaned(scales_of(1, buf, at), 1) if scaled else None
        query, key = wide(query_s[p], edge), positions((rows, edge), 1)
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
