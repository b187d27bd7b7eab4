"""XAttention's scores of blocks on TPUs (Xu et al. 2025, https://arxiv.org/abs/2503.16428), pages read in place.

A line is 16 queries of a head, a stride 16 keys; the last query meets the first key, and so on, in one product of the
lines of several tiles and the strides of several blocks. Of each line and block the largest logit and the sum of
weights stay on chip until all blocks have been read, and the softmax follows from these.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import AttentionOptions, KvCache, Shaped
from inferlib.pallas_kernels.arithmetic_tpu import LANES, MASKED, div, rem
from inferlib.pallas_kernels.tile_stream_tpu import SUBLANES

BLOCK, STRIDE = 128, 16
STRIDES = BLOCK // STRIDE  # of a block
TOGETHER = 32  # blocks of a product
LINES = (512, 256, 128)  # the most lines of a product, if a tile has fewer, and if they fit
BUFFERS = 2
VMEM_BYTES = 14 << 20  # of the 16 MiB that the compiler gives a kernel on v5e and v5p by default
SMEM_BYTES = 512 << 10  # of 1 MiB


class _Sizes(NamedTuple):
    """Tiles that a grid step scores, and lines of a tile and head; some of either may not exist."""

    tiles: int
    of_tile: int

    @property
    def lines(self) -> int:
        """Lines of a step and head, which fill registers."""
        return self.tiles * self.of_tile

    @classmethod
    def of(cls, q: Shaped, blocks: int) -> _Sizes:
        """For queries [P, C, K, G, h] and a cache of so many blocks: as many tiles as fit."""
        sublanes, count = SUBLANES * 4 // jnp.dtype(q.dtype).itemsize, pl.cdiv(q.shape[1], BLOCK)
        if count == 1:
            return cls(1, sublanes)
        least = sublanes // STRIDES
        for most in LINES:
            tiles = max(min(most // (q.shape[3] * STRIDES), count) // least, 1) * least
            sizes = cls(tiles, STRIDES)
            if sizes.vmem_bytes(q, blocks) <= VMEM_BYTES:
                break
        return sizes

    def vmem_bytes(self, q: Shaped, blocks: int) -> int:
        """What a step takes of on-chip memory."""
        *_, group, size = q.shape
        lines, itemsize = group * self.lines, jnp.dtype(q.dtype).itemsize
        queries, keys = lines * STRIDE * size * itemsize, TOGETHER * BLOCK * size * itemsize
        of_blocks, of_product = pl.cdiv(blocks, TOGETHER) * TOGETHER * lines, TOGETHER * STRIDES * lines
        return 3 * queries + (BUFFERS + 1) * keys + 4 * (3 * of_blocks + 3 * of_product)


class _Scalars(NamedTuple):
    """starts, stops [P]: positions where a chunk begins and ends, 0 if it has no token. layer [1]. table [P, M]: the
    pages of its row."""

    starts: Any
    stops: Any
    layer: Any
    table: Any


def unsupported(q: Shaped, cache: KvCache) -> str | None:
    """Why the kernel does not score blocks for queries [P, C, K, G, h], or None if it does. Arrays may be shapes."""
    slots, size = cache.k.shape[-2:]
    if cache.scaled or cache.packed or cache.ring:
        return "rings and quantised caches"
    if q.dtype not in (jnp.bfloat16, jnp.float32) or cache.k.dtype != q.dtype:
        return f"queries of {jnp.dtype(q.dtype)} and cells of {jnp.dtype(cache.k.dtype)}"
    if size % LANES:
        return f"heads of size {size} are not a multiple of {LANES}"
    if slots % BLOCK:
        return f"pages of {slots} positions are not a multiple of {BLOCK}"
    if (scalars := 4 * q.shape[0] * ((cache.columns or 1) + 2)) > SMEM_BYTES:
        return f"tables of {q.shape[0]} chunks need {scalars} bytes of scalar memory, not {SMEM_BYTES}"
    blocks = pl.cdiv(cache.slots, BLOCK)
    if (need := _Sizes.of(q, blocks).vmem_bytes(q, blocks)) > VMEM_BYTES:
        return f"{q.shape[3]} heads of size {size} need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def block_scores(
    q: jax.Array,
    cache: KvCache,
    rows: jax.Array,
    first: jax.Array,
    last: jax.Array,
    options: AttentionOptions,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """The scores [P, K, T, n] float32 of a cache's n blocks, as `inferlib.ops.sparse_prefill.antidiagonals` has them.

    Queries q [P, C, K, G, h] of chunks of rows [P], in tiles of 128 tokens. first, last [P, T] int32: positions of a
    tile's first and last token; last -1: it has none. Keys behind a chunk's last token may be anything, as may queries
    behind it. Raises ValueError with the reason of `unsupported`.
    """
    if reason := unsupported(q, cache):
        raise ValueError(f"the TPU kernel does not score these blocks: {reason}")
    blocks = pl.cdiv(cache.slots, BLOCK)
    sizes = _Sizes.of(q, blocks)
    k = cache.k if cache.k.ndim == 5 else cache.k[None]
    if not interpret:  # otherwise XLA would bring a small cache to VMEM
        k = pltpu.with_memory_space_constraint(k, pltpu.HBM)
    # Queries lie head by head, as products with weights leave them.
    inputs = jnp.transpose(q, (2, 3, 0, 1, 4)), _ends(first, last, sizes), k
    scores = _call(_scalars(cache, rows, first, last), inputs, (sizes, blocks), options, interpret)
    return scores.reshape(*scores.shape[:2], -1, scores.shape[4])[:, :, : last.shape[1], :blocks]


def _scalars(cache: KvCache, rows: jax.Array, first: jax.Array, last: jax.Array) -> _Scalars:
    there = rows < (cache.k.shape[-4] if cache.pages is None else cache.pages.shape[0])
    stops = jnp.where(there, jnp.minimum(jnp.max(last, axis=1) + 1, cache.slots), 0)
    rows = jnp.where(there, rows, 0)
    table = rows[:, None] if cache.pages is None else cache.pages[rows]
    layer = jnp.asarray(cache.layer_or_first, jnp.int32).reshape(1)
    return _Scalars(first[:, 0].astype(jnp.int32), stops.astype(jnp.int32), layer, table.astype(jnp.int32))


def _ends(first: jax.Array, last: jax.Array, sizes: _Sizes) -> jax.Array:
    """The last position of each line [P, parts, 1, lines] int32, -1 if it has none."""
    missing = [(0, 0), (0, -last.shape[1] % sizes.tiles)]
    first, last = (jnp.pad(x, missing, constant_values=-1)[..., None] for x in (first, last))
    begin = first + STRIDE * jnp.arange(sizes.of_tile)
    ends = jnp.where((begin <= last) & (last >= 0), jnp.minimum(begin + STRIDE - 1, last), -1)
    return ends.astype(jnp.int32).reshape(first.shape[0], -1, 1, sizes.lines)


def _call(scalars: _Scalars, inputs: tuple, shape: tuple, options: AttentionOptions, interpret) -> jax.Array:
    (q, ends, k), (sizes, blocks) = inputs, shape
    (heads, group, chunks, _, size), parts = q.shape, ends.shape[1]
    padded, lines = pl.cdiv(blocks, LANES) * LANES, group * sizes.lines
    of_blocks = pltpu.VMEM((pl.cdiv(blocks, TOGETHER) * TOGETHER, lines), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, factor=options.scale / STRIDE, softcap=options.softcap, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks, heads, parts),
            in_specs=[
                pl.BlockSpec((None, group, None, sizes.lines * STRIDE, size), lambda p, h, i, _: (h, 0, p, i, 0)),
                pl.BlockSpec((None, None, 1, sizes.lines), lambda p, h, i, _: (p, i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, None, None, sizes.tiles, padded), lambda p, h, i, _: (p, h, i, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((lines, STRIDE * size), q.dtype),
                pltpu.VMEM((BUFFERS, TOGETHER * BLOCK, size), k.dtype),
                of_blocks,
                of_blocks,
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((chunks, heads, parts, sizes.tiles, padded), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, disable_bounds_checks=True),
        cost_estimate=_cost(q, k, blocks, parts),
        interpret=interpret,
        name="antidiagonals",
    )(scalars, *inputs)


def _cost(q: jax.Array, k: jax.Array, blocks: int, parts: int) -> pl.CostEstimate:
    """What chunks [K, G, P, C, h] at the end of full rows cost."""
    heads, group, chunks, width, size = q.shape
    pairs = chunks * heads * group * pl.cdiv(width, STRIDE) * blocks * STRIDES
    return pl.CostEstimate(
        flops=2 * pairs * STRIDE * size,
        bytes_accessed=q.size * q.dtype.itemsize + chunks * heads * parts * blocks * BLOCK * size * k.dtype.itemsize,
        transcendentals=pairs,
    )


@dataclass
class _Stream:
    """The blocks of a row, `TOGETHER` at a time in one of two buffers, copied ahead also from one grid step to the
    next."""

    scalars: _Scalars
    k_ref: Any
    buffers: Any
    semaphores: Any

    def blocks(self, chunk, group) -> jax.Array:
        """How many blocks of a group there are."""
        return jnp.clip(div(self.scalars.stops[chunk] + BLOCK - 1, BLOCK) - group * TOGETHER, 0, TOGETHER)

    def start(self, chunk, head, group, buffer) -> None:
        def copy(n, _):
            position = (group * TOGETHER + n) * BLOCK
            slots = self.k_ref.shape[3]
            page = self.scalars.table[chunk, div(position, slots)]
            slot = pl.multiple_of(rem(position, slots), BLOCK)
            source = self.k_ref.at[self.scalars.layer[0], page, head, pl.ds(slot, BLOCK)]
            into = self.buffers.at[buffer, pl.ds(pl.multiple_of(n * BLOCK, BLOCK), BLOCK)]
            pltpu.make_async_copy(source, into, self.semaphores.at[buffer]).start()

        lax.fori_loop(0, self.blocks(chunk, group), copy, None)

    def wait(self, chunk, group, buffer) -> None:
        def wait_for(first, count) -> None:
            """Only the number of bytes matters in the copy that a wait is given."""
            some = self.buffers.at[buffer, pl.ds(first, count)]
            pltpu.make_async_copy(some, some, self.semaphores.at[buffer]).wait()

        count = self.blocks(chunk, group)
        pl.when(count == TOGETHER)(lambda: wait_for(0, TOGETHER * BLOCK))
        lax.fori_loop(0, jnp.where(count == TOGETHER, 0, count), lambda n, _: wait_for(0, BLOCK), None)


def _kernel(
    scalars: _Scalars,
    q_ref,
    ends_ref,
    k_ref,
    out_ref,
    queries_s,
    buffers,
    top_s,
    sum_s,
    state,
    semaphores,
    *,
    factor,
    softcap,
    sizes,
):
    """q_ref [G, tokens, h], ends_ref [1, lines], k_ref [L, N, K, S, h] in HBM, out_ref [tiles, n]; queries_s
    [G * lines, 16 * h], buffers [2, 32 * 128, h], top_s, sum_s [n, G * lines], state [1]: the buffer to be read
    next."""
    chunk, head, part = (pl.program_id(i) for i in range(3))
    heads, parts = pl.num_programs(1), pl.num_programs(2)
    step, steps = (chunk * heads + head) * parts + part, pl.num_programs(0) * heads * parts
    stream = _Stream(scalars, k_ref, buffers, semaphores)
    stop = scalars.stops[chunk]
    groups = div(stop + TOGETHER * BLOCK - 1, TOGETHER * BLOCK)
    ends = jnp.concatenate([ends_ref[...]] * q_ref.shape[0], axis=1)

    @pl.when(step == 0)
    def _():
        state[0] = 0
        stream.start(0, 0, 0, 0)

    tokens = stop - scalars.starts[chunk] - part * q_ref.shape[1]
    for member in range(q_ref.shape[0]):
        mine = queries_s.at[pl.ds(member * sizes.lines, sizes.lines)]
        mine[...] = jnp.concatenate(_cells(q_ref.at[member], 0, sizes.lines, STRIDE), axis=1)
        _clean(mine, tokens, each=STRIDE)
    top_s[...] = jnp.full_like(top_s, MASKED)
    sum_s[...] = jnp.zeros_like(sum_s)

    def take(group, buffer):
        then, more = step + 1, group + 1 < groups
        pl.when(more)(lambda: stream.start(chunk, head, group + 1, 1 - buffer))

        @pl.when(jnp.logical_not(more) & (then < steps))
        def _():
            stream.start(lax.div(then, heads * parts), lax.rem(lax.div(then, parts), heads), 0, 1 - buffer)

        stream.wait(chunk, group, buffer)
        base = group * TOGETHER * BLOCK
        _clean(buffers.at[buffer], stop - base)
        logits = _products(_keys(buffers.at[buffer]), queries_s[...]) * factor
        logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        at = pl.ds(pl.multiple_of(group * TOGETHER, TOGETHER), TOGETHER)
        top_s[at], sum_s[at] = _of_blocks(logits, base, ends)
        return 1 - buffer

    # A step without keys has its group too, of no block, so that the buffers take turns.
    state[0] = lax.fori_loop(0, jnp.maximum(groups, 1), take, state[0])
    scores = _of_tiles(top_s[...], sum_s[...], ends, sizes)
    out_ref[:, : scores.shape[1]] = scores


def _cells(ref, first: int, count: int, apart: int) -> list[jax.Array]:
    """16 consecutive cells of [n, h] from `first` on and from every `apart`-th on behind it, [count, h] for each of the
    16."""
    if ref.dtype == jnp.float32:
        return [ref[pl.ds(first + n, count, stride=apart)] for n in range(STRIDE)]
    words, cells = ref.bitcast(jnp.uint32), []  # of two consecutive cells, the first in the lower half
    for n in range(0, STRIDE, 2):
        both = words[pl.ds((first + n) // 2, count, stride=apart // 2)]
        halves = both << 16, both & jnp.uint32(0xFFFF0000)
        cells += [lax.bitcast_convert_type(half, jnp.float32).astype(ref.dtype) for half in halves]
    return cells


def _keys(ref) -> jax.Array:
    """The strides of a buffer [blocks * 128, h] with their last key first, [8 * blocks, 16 * h]: the first strides of
    all blocks, the second ones, and so on, so that sums over a block add registers."""
    blocks = ref.shape[0] // BLOCK
    strides = [_cells(ref, first, blocks, BLOCK)[::-1] for first in range(0, BLOCK, STRIDE)]
    return jnp.concatenate([jnp.concatenate(cells, axis=1) for cells in strides])


def _clean(ref, count, each: int = 1) -> None:
    """Put zeros from the cell `count` on, which may be anything. ref [n, each * h]: `each` cells side by side."""

    @pl.when(count < each * ref.shape[0])
    def _():
        row, column = (lax.broadcasted_iota(jnp.int32, ref.shape, n) for n in (0, 1))
        there = each * row + div(column, ref.shape[1] // each) < count
        ref[...] = jnp.where(there, ref[...].astype(jnp.float32), 0).astype(ref.dtype)


def _products(strides: jax.Array, queries: jax.Array) -> jax.Array:
    """[strides, lines] float32, of [strides, 16 * h] and [lines, 16 * h]."""
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    return lax.dot_general(strides, queries, (((1,), (1,)), ((), ())), exact, preferred_element_type=jnp.float32)


def _of_blocks(logits: jax.Array, base: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit and the sum of weights of each block and line, [blocks, lines] each. logits: in the order of
    `_keys`. base: the position of the first stride; ends [1, lines]: the last that a line sees."""
    logits = logits.reshape(STRIDES, -1, logits.shape[1])
    stride, block = (lax.broadcasted_iota(jnp.int32, logits.shape, n) for n in (0, 1))
    logits = jnp.where(base + BLOCK * block + STRIDE * stride <= ends, logits, MASKED)
    top = jnp.max(logits, axis=0)
    return top, jnp.sum(jnp.exp(logits - top), axis=0)


def _of_tiles(top: jax.Array, total: jax.Array, ends: jax.Array, sizes: _Sizes) -> jax.Array:
    """The scores [tiles, n]: weights of blocks, summed over the lines of a tile. top, total [n, G * lines]."""
    weights = total * jnp.exp(top - jnp.max(top, axis=0, keepdims=True))
    whole = jnp.maximum(jnp.sum(weights, axis=0, keepdims=True), 1e-37)
    weights = jnp.where(ends >= 0, weights / whole, 0.0)
    tile, line = (lax.broadcasted_iota(jnp.int32, (sizes.tiles, weights.shape[1]), n) for n in (0, 1))
    mine = (lax.div(lax.rem(line, sizes.lines), sizes.of_tile) == tile).astype(jnp.float32)
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(mine, weights, dimensions, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
