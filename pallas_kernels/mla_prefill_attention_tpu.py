"""Prefill attention over latents (MLA) on TPUs: flash attention of chunks over a paged cache of latents, which has
their prefix and the chunks themselves; the kernel expands keys and values on chip.

A grid step takes some heads and a tile of their queries through the blocks of latents that the tile sees. For each pair
of heads it expands a block to keys, as columns, and values, uses them for all queries of the tile and drops them. So
memory holds only latents, and a position costs as few operations as with expanded keys and values, plus its expansion.
From about 170 queries of a tile on, this is less than with queries in the latents' space (`mla_decode_attention_tpu`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import Expansion, LatentCache, Shaped
from inferlib.pallas_kernels.arithmetic_tpu import LANES, LOG2E, MASKED, folded, wide
from inferlib.pallas_kernels.generations_tpu import by_vmem, generation, vmem_limit
from inferlib.pallas_kernels.tile_stream_tpu import STATE, TileGrid, TileStream
from inferlib.pallas_kernels.tuned_tpu import tuned

# A maximum starts above masked logits, so that their weights are 0 even where all logits are masked.
LOWEST = -0.3 * float(jnp.finfo(jnp.float32).max)
BUFFERS = 2  # of blocks: one in use, one being copied
TOGETHER = 2  # heads that are expanded in one product, which fill a matrix unit of 256
MOST_TILE, MOST_HEADS = 512, 8  # tokens and heads of a step
NARROW = ("v4", "v5e", "v5p")  # their products take longer: half the heads are as fast, with half the code
VMEM_BYTES = 40 << 20  # of 64 MiB, see `by_vmem`
SMEM_BYTES = 512 << 10  # of 1 MiB


@dataclass(frozen=True)
class Blocks:
    """queries: tokens of a tile. heads: heads of a grid step. keys: positions of a block. rows: the most queries that
    share a product and a softmax."""

    queries: int
    heads: int
    keys: int = 512
    rows: int = 256

    def __post_init__(self):
        if self.rows % LANES or (self.queries > LANES and self.queries % LANES):
            raise ValueError(f"tiles of {self.queries} queries in products of {self.rows} are not multiples of {LANES}")
        if self.keys % LANES:
            raise ValueError(f"blocks of {self.keys} keys are not a multiple of {LANES}")

    @property
    def part(self) -> int:
        """Tokens of a product."""
        return self.queries if self.queries <= LANES else math.gcd(self.queries, self.rows)


@tuned("mla_prefill_attention", Blocks)
def blocks(width: int, heads: int, unit: int) -> Blocks:
    """Block sizes for chunks of `width` tokens and `heads` heads; latents are copied in multiples of `unit`."""
    tile = min(MOST_TILE, by_vmem(2 * MOST_TILE))  # with less memory fewer heads, since each tile expands anew
    if width <= LANES:
        queries = width
    else:  # equal tiles instead of full ones and a small rest
        tiles = pl.cdiv(width, tile)
        queries = min(pl.cdiv(pl.cdiv(width, tiles), LANES), width // LANES) * LANES
    most = min(MOST_HEADS // 2 if generation() in NARROW else MOST_HEADS, by_vmem(MOST_HEADS))
    return Blocks(queries, max(n for n in range(1, most + 1) if heads % n == 0), max(unit, 512))


def unsupported(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    latents: Shaped,
    keys: Shaped,
    *,
    pages: int | None = None,
    blocks: Blocks | None = None,
) -> str | None:
    """Why the kernel cannot run q [P, C, H, n + r] with k [..., H, n, R], v [..., H, R, v] on latents [..., S, R] and
    rotary keys [..., S / f, f * r], or None if it can.

    pages: columns of the page table, None if rows are pages.
    """
    dtype, (slots, rank) = jnp.dtype(latents.dtype), latents.shape[-2:]
    if dtype not in (jnp.bfloat16, jnp.float32) or any(x.dtype != dtype for x in (q, k, v, keys)):
        kinds = f"{q.dtype}, {k.dtype} and {dtype}"
        return f"it takes queries, weights and a cache of bfloat16 or float32, all alike, not {kinds}"
    if rank % LANES or keys.shape[-1] != LANES or LANES % (q.shape[3] - k.shape[-2]):
        return f"latents of {rank} and rotary keys of {keys.shape[-1]} numbers do not fill lanes of {LANES}"
    tile = 32 // dtype.itemsize  # rows of a register
    if k.shape[-2] % tile or v.shape[-1] % LANES:
        return f"keys of {k.shape[-2]} and values of {v.shape[-1]} numbers are no multiples of {tile} and {LANES}"
    unit = _unit(q, k)
    if slots % unit:
        return f"pages of {slots} positions are no multiple of {unit}"
    if q.shape[1] % tile:
        return f"chunks of {q.shape[1]} tokens do not divide into tiles of {tile}"
    blocks = blocks or _default(q, k)
    if blocks.keys % unit or q.shape[2] % blocks.heads:
        return f"blocks of {blocks.keys} positions of {blocks.heads} heads do not fit {unit} of {q.shape[2]}"
    scalars = 4 * q.shape[0] * (2 * pl.cdiv(q.shape[1], blocks.part) + (pages or 0))
    if scalars > SMEM_BYTES:
        return f"tables of {q.shape[0]} chunks need {scalars} bytes of scalar memory, not {SMEM_BYTES}"
    need = _vmem_bytes(q, k, v, blocks)
    if need > (have := by_vmem(VMEM_BYTES)):
        sizes = f"{blocks.heads} heads, {k.shape[-2]} and {v.shape[-1]} numbers of latents of {rank}"
        return f"{sizes} need {need} bytes of on-chip memory, and there are {have}"
    return None


def _unit(q: Shaped, k: Shaped) -> int:
    """Positions that are copied together: those of 128 rows of rotary keys."""
    return LANES * (LANES // (q.shape[3] - k.shape[-2]))


def _default(q: Shaped, k: Shaped) -> Blocks:
    return blocks(q.shape[1], q.shape[2], _unit(q, k))


def _depth(size: int) -> int:
    """How many numbers a product of queries and keys sums over if heads have `size`."""
    return pl.cdiv(size, LANES) * LANES


def _vmem_bytes(q: Shaped, k: Shaped, v: Shaped, blocks: Blocks) -> int:
    itemsize, depth, (rank, size) = jnp.dtype(q.dtype).itemsize, _depth(q.shape[3]), v.shape[-2:]
    queries, n = blocks.queries * blocks.heads, k.shape[-2]
    state = queries * (2 * itemsize * (depth + size) + 4 * (size + 2 * LANES) + 16) + 8 * blocks.queries * LANES
    weights = 2 * blocks.heads * rank * (n + size) * itemsize
    on_chip = blocks.keys * itemsize * (BUFFERS * (rank + LANES) + blocks.heads * (n + size) + depth - n)
    return state + weights + on_chip + 3 * 4 * blocks.keys * (blocks.part + TOGETHER * (n + size))


def mla_prefill_attention(
    q: jax.Array,
    expansion: Expansion,
    cache: LatentCache,
    rows: jax.Array,
    positions: jax.Array,
    scale: float,
    *,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [P, C, H, n + r]: chunk p holds the ascending positions[p], [P, C] int32, of row rows[p].

    The cache has all of these positions already, and its arrays lack the axis of KV heads, as in
    `mla_decode_attention_tpu`; scales are not read. A head's key is the latent's expansion and the rotary key behind
    it. Negative positions see nothing (out 0, lse -inf); chunks of rows that do not exist give 0. scale multiplies the
    logits. The kernel does not read blocks that no query of a tile sees.
    Returns out [P, C, H, v] in q's dtype and the log of the softmax's denominator, lse [P, C, H] float32.
    Raises ValueError with the reason of `unsupported`.
    """
    k, v, columns = expansion.keys, expansion.values, cache.columns
    if reason := unsupported(q, k, v, cache.latents, cache.keys, pages=columns, blocks=blocks):
        raise ValueError(f"the TPU kernel does not run this latent attention: {reason}")
    blocks = blocks or _default(q, k)
    need, fold = _vmem_bytes(q, k, v, blocks), _unit(q, k) // LANES
    k, v = (x if x.ndim == 4 else x[None] for x in (k, v))
    # [L, N, 1, S, ...], as of one KV head.
    arrays = [(x if x.ndim == 4 else x[None])[:, :, None] for x in (cache.latents, cache.keys)]
    (chunks, width, heads, size), value = q.shape, v.shape[-1]
    capacity = cache.latents.shape[-2] * (columns or 1)
    capacity = capacity if cache.limit is None else min(capacity, cache.limit)
    layers = cache.layer_or_first, 0 if expansion.layer is None else expansion.layer
    scalars = _scalars(cache, rows, positions, layers, capacity, blocks)
    if not interpret:  # otherwise XLA would bring a small cache or stack to VMEM
        k, v, *arrays = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k, v, *arrays))
    q = jnp.transpose(jnp.pad(q, ((0, 0),) * 3 + ((0, _depth(size) - size),)), (2, 0, 1, 3))
    inputs = _Inputs(q, positions.astype(jnp.int32)[:, None], k, v, tuple(arrays))
    grid = TileGrid.of(chunks, heads // blocks.heads, pl.cdiv(width, blocks.queries))
    kernel = functools.partial(_kernel, scale=scale * LOG2E, capacity=capacity, fold=fold, grid=grid)
    out, lse = _call(kernel, scalars, inputs, blocks, grid, need, _cost(inputs, size, capacity, blocks), interpret)
    return out.reshape(chunks, width, heads, value), jnp.moveaxis(lse.reshape(chunks, heads, width), 2, 1)


def _scalars(
    cache: LatentCache,
    rows: jax.Array,
    positions: jax.Array,
    layers: tuple[jax.Array | int, jax.Array | int],
    capacity: int,
    blocks: Blocks,
) -> _Scalars:
    width, tile, part = positions.shape[1], blocks.queries, blocks.part
    at = jnp.arange(pl.cdiv(width, tile) * (tile // part)) * part
    firsts, lasts = (positions[:, jnp.minimum(x, width - 1)].astype(jnp.int32) for x in (at, at + part - 1))
    there = rows < (cache.latents.shape[-3] if cache.pages is None else cache.pages.shape[0])
    stacked = jnp.stack([jnp.asarray(n, jnp.int32) for n in layers])
    scalars = _Scalars(jnp.where(there, rows, -1).astype(jnp.int32), stacked, firsts, jnp.minimum(lasts, capacity - 1))
    if cache.pages is not None:
        scalars = scalars._replace(table=cache.pages[jnp.where(there, rows, 0)].astype(jnp.int32))
    return scalars


def _cost(inputs: _Inputs, size: int, capacity: int, blocks: Blocks) -> pl.CostEstimate:
    """size: numbers n + r of a query."""
    (heads, chunks, width, _), (nope, rank), value = inputs.q.shape, inputs.k.shape[-2:], inputs.v.shape[-1]
    tiles, groups, cell = pl.cdiv(width, blocks.queries), heads // blocks.heads, rank + size - nope
    seen = max(capacity - width // 2, 1)  # most that a query sees, in full chunks
    pairs, expanded = chunks * width * heads * seen, chunks * tiles * heads * seen
    moved = 2 * inputs.q.size + chunks * groups * (tiles * seen * cell + blocks.heads * rank * (nope + value))
    return pl.CostEstimate(
        flops=2 * pairs * (size + value) + 2 * expanded * rank * (nope + value),
        bytes_accessed=moved * inputs.q.dtype.itemsize,
        transcendentals=pairs,
    )


def _call(
    kernel: Callable[..., None],
    scalars: _Scalars,
    inputs: _Inputs,
    blocks: Blocks,
    grid: TileGrid,
    need: int,
    cost: pl.CostEstimate,
    interpret: bool | pltpu.InterpretParams,
) -> Sequence[jax.Array]:
    """need: bytes of on-chip memory."""
    (heads, chunks, width, depth), (nope, rank), value = inputs.q.shape, inputs.k.shape[-2:], inputs.v.shape[-1]
    tile, step, groups = blocks.queries, blocks.heads, heads // blocks.heads
    whole = pl.BlockSpec(memory_space=pl.ANY)
    specs = _Inputs(
        grid.spec((step, None, tile, depth), lambda p, g, t, _: (g, p, t, 0)),
        grid.spec((None, 1, tile), lambda p, g, t, _: (p, 0, t)),
        grid.spec((None, step, nope, rank), lambda p, g, t, scalars: (scalars.layers[1], g, 0, 0)),
        grid.spec((None, step, rank, value), lambda p, g, t, scalars: (scalars.layers[1], g, 0, 0)),
        (whole, whole),
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.shape,
            in_specs=(specs,),
            out_specs=[
                grid.spec((None, tile, step * value), lambda p, g, t, _: (p, t, g)),
                grid.spec((None, None, step, tile), lambda p, g, t, _: (p, g, 0, t)),
            ],
            scratch_shapes=[_scratch(inputs, blocks)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((chunks, width, heads * value), inputs.q.dtype),
            jax.ShapeDtypeStruct((chunks, groups, step, width), jnp.float32),
        ],
        # Checks triple the work of starting a copy; `TileStream` and `lasts` keep them in bounds.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=grid.semantics,
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit(need + by_vmem(8 << 20)),
        ),
        cost_estimate=cost,
        interpret=interpret,
        name="mla_prefill_attention",
    )(scalars, inputs)


def _scratch(inputs: _Inputs, blocks: Blocks) -> _Scratch:
    (nope, rank), value, depth = inputs.k.shape[-2:], inputs.v.shape[-1], inputs.q.shape[-1]
    latents, rotary_keys = inputs.cache
    part, parts, dtype = blocks.part, blocks.queries // blocks.part, inputs.q.dtype
    products = blocks.heads * parts
    return _Scratch(
        pltpu.VMEM((BUFFERS, blocks.keys, rank), latents.dtype),
        pltpu.VMEM((BUFFERS, blocks.keys * rotary_keys.shape[-2] // latents.shape[-2], LANES), rotary_keys.dtype),
        pltpu.VMEM((blocks.heads, nope, blocks.keys), dtype),
        pltpu.VMEM((depth - nope, blocks.keys), dtype),
        pltpu.VMEM((blocks.heads, blocks.keys, value), dtype),
        pltpu.VMEM((parts, part, LANES), jnp.int32),
        pltpu.VMEM((products, part, LANES), jnp.float32),
        pltpu.VMEM((products, part, LANES), jnp.float32),
        pltpu.VMEM((products, part, value), jnp.float32),
        pltpu.SMEM((STATE,), jnp.int32),
        pltpu.SemaphoreType.DMA((2, BUFFERS)),
    )


class _Scalars(NamedTuple):
    """Scalar memory, as in `TileStream`: rows, layers (of the cache and of the weights), positions, page table."""

    rows: Any
    layers: Any
    firsts: Any
    lasts: Any
    table: Any = None


class _Inputs(NamedTuple):
    """q [H, tile, depth], with zeros behind n + r; positions [1, tile]; weights k [H, n, R] and v [H, R, v]. HBM:
    latents [L, N, 1, S, R] and rotary keys [L, N, 1, S / f, 128]."""

    q: Any
    positions: Any
    k: Any
    v: Any
    cache: tuple


class _Scratch(NamedTuple):
    """latents, rotary_keys: copies of blocks. keys [H, n, keys], rotary [depth - n, keys] and values [H, keys, v]: an
    expanded block; keys are columns, and all heads share the rotary part, which has zeros behind it. queries [parts,
    rows, 128]: the positions of a part's queries. top, sum [n, rows, 128], acc [n, rows, v]: the running maximum (equal
    in all lanes), sum (spread over the lanes) and accumulator of each product, which has one head and part. state,
    semaphores: those of the stream."""

    latents: Any
    rotary_keys: Any
    keys: Any
    rotary: Any
    values: Any
    queries: Any
    top: Any
    sum: Any
    acc: Any
    state: Any
    semaphores: Any


def _kernel(scalars: _Scalars, inputs: _Inputs, out_ref, lse_ref, scratch: _Scratch, *, scale, capacity, fold, grid):
    """A tile of queries and some heads, H of them here: out_ref [tile, H * v], lse_ref [H, tile]. Logits are in units
    of log 2: exponentials have base 2."""
    q_ref, positions_ref, up_k, up_v, in_hbm = inputs
    latents_buf, keys_buf, keys_s, rotary_s, values_s, query_s, top_s, sum_s, acc_s, state, semaphores = scratch
    (heads, nope, _), size = up_k.shape, up_v.shape[2]
    (parts, rows, _), keys, products = query_s.shape, latents_buf.shape[1], acc_s.shape[0]
    rotary = LANES // fold
    exact = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    stream = TileStream(
        *scalars,
        listed=None,
        most_listed=0,
        arrays=in_hbm,
        buffers=(latents_buf, keys_buf),
        state=state,
        semaphores=semaphores,
        parts=parts,
        window=None,
        ring=False,
        capacity=capacity,
        unit=LANES * fold,
        grid=grid,
    )

    def dot(x, y, contract=0):
        return lax.dot_general(x, y, (((1,), (contract,)), ((), ())), exact, preferred_element_type=jnp.float32)

    def prepare():
        top_s[...] = jnp.full_like(top_s, LOWEST)
        sum_s[...] = jnp.zeros_like(sum_s)
        acc_s[...] = jnp.zeros_like(acc_s)
        rotary_s[...] = jnp.zeros_like(rotary_s)
        some = min(rows, LANES)
        for n in range(0, parts * rows, some):
            positions = jnp.broadcast_to(positions_ref[:, n : n + some], (LANES, some)).T
            query_s[n // rows, pl.ds(n % rows, some)] = jnp.minimum(positions, stream.last())

    # ---- expansion

    groups = [range(first, min(first + TOGETHER, heads)) for first in range(0, heads, TOGETHER)]

    def turned(buf):
        """Rotary keys of a block, as columns [r, keys]."""
        lines = [keys_buf[buf, at : at + LANES].T for at in range(0, keys // fold, LANES)]
        return jnp.concatenate([x[n : n + rotary] for x in lines for n in range(0, LANES, rotary)], axis=1)

    def expand(group, buf):
        """A block's keys and values of some heads."""
        made = dot(jnp.concatenate([up_k[head] for head in group]), latents_buf[buf], 1).astype(keys_s.dtype)
        for n, head in enumerate(group):
            keys_s[head] = made[n * nope : (n + 1) * nope]
        made = dot(latents_buf[buf], jnp.concatenate([up_v[head] for head in group], axis=1)).astype(values_s.dtype)
        for n, head in enumerate(group):
            values_s[head] = made[:, n * size : (n + 1) * size]

    # ---- computation

    def scores(product):
        """Logits [rows, keys]."""
        head, part = divmod(product, parts)
        columns = jnp.concatenate([keys_s[head], rotary_s[...]])
        return dot(q_ref[head, pl.ds(part * rows, rows)], columns) * scale

    def weights(product, logits, start):
        """The weights of the values of a block that begins at `start`, and the weight of the accumulator."""
        key = start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logits = jnp.where(key <= wide(query_s[product % parts], keys), logits, MASKED)
        old = top_s[product]
        top = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
        p, decay = jnp.exp2(logits - wide(top, keys)), jnp.exp2(old - top)
        top_s[product] = top
        sum_s[product] = sum_s[product] * decay + folded(p)
        return p.astype(values_s.dtype), decay

    def accumulate(product, p, decay):
        acc_s[product] = acc_s[product] * wide(decay, size) + dot(p, values_s[product // parts])

    def arrive(index, buf):
        """Wait for a block, and zero the positions that no query of the tile sees: 0 * NaN is NaN."""
        stream.wait(index, buf)
        count = stream.last() + 1 - stream.start(index)

        @pl.when(count < keys)
        def _():
            row = lax.broadcasted_iota(jnp.int32, latents_buf.shape[1:], 0)
            cleaned = jnp.where(row < count, latents_buf[buf].astype(jnp.float32), 0)
            latents_buf[buf] = cleaned.astype(latents_buf.dtype)

    def take(carry):
        """Take in a block. Heads are expanded while those before them are computed with; the next logits are computed
        while a softmax is taken."""
        index, buf = carry
        stream.start_next(stream.after(buf))
        arrive(index, buf)
        rotary_s[:rotary] = turned(buf)
        expand(groups[0], buf)
        logits, start = scores(0), stream.start(index)
        behind: Any = None
        for product in range(products):
            number, rest = divmod(product, TOGETHER * parts)
            if rest == 0 and number + 1 < len(groups):
                expand(groups[number + 1], buf)
            ahead = scores(product + 1) if product + 1 < products else None
            taken = product, *weights(product, logits, start)
            if behind is not None:
                accumulate(*behind)
            logits, behind = ahead, taken
        accumulate(*behind)
        return index + 1, stream.after(buf)

    def finish():
        some = min(rows, LANES)
        row, lane = (lax.broadcasted_iota(jnp.int32, (some, LANES), n) for n in (0, 1))
        for product in range(products):
            (head, part), top = divmod(product, parts), top_s[product]
            total = jnp.broadcast_to(jnp.sum(sum_s[product], axis=1, keepdims=True), top.shape)
            out = acc_s[product] * wide(1.0 / jnp.maximum(total, 1e-37), size)
            out_ref[pl.ds(part * rows, rows), head * size : (head + 1) * size] = out.astype(out_ref.dtype)
            lse = top * (1 / LOG2E) + jnp.log(total)
            for at in range(0, rows, some):
                column = jnp.where(row == lane, lse[at : at + some], 0.0)
                lse_ref[head, pl.ds(part * rows + at, some)] = jnp.sum(column, axis=0)[:some]

    stream.begin(1)
    visits = stream.visits()
    prepare()
    state[2] = lax.while_loop(lambda c: c[0] < visits, take, (jnp.int32(0), state[2]))[1]
    finish()
