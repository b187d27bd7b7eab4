"""Decode attention over latents (MLA) on TPUs: each latent is read once, as a key and as a value of all heads.

The live parts of all rows are one stream of blocks, copied from HBM ahead of the computation and across rows. The 128
heads of DeepSeek-V3 make 240 operations for each byte, so the matrix unit must not wait either: a block that all
queries see is straight-line code that computes the logits of one part beside the softmax of the part before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import LatentCache, Shaped
from inferlib.pallas_kernels.arithmetic_tpu import LANES, LOG2E, MASKED, div, rem, wide
from inferlib.pallas_kernels.generations_tpu import by_vmem
from inferlib.pallas_kernels.tuned_tpu import tuned

SUBLANES = 8
UNROLL = 4  # copies of pages that are started together
TOGETHER = 2  # edges that are computed in one go, while at least as many are left
MOST_QUERIES = 1024  # most queries of a row, heads times tokens
VMEM_BYTES = 40 << 20  # of 64 MiB, see `by_vmem`
SMEM_BYTES = 512 << 10  # of 1 MiB


@dataclass(frozen=True)
class Blocks:
    """positions: of a block, which is computed in one go if all queries see all of it. part: positions whose logits
    exist at a time. edge: positions that are computed in one go in other blocks. buffers: blocks on chip."""

    positions: int
    part: int
    edge: int
    buffers: int = 3

    def __post_init__(self):
        if self.part % LANES or self.edge % self.part or self.positions % self.edge or self.buffers < 2:
            raise ValueError(
                f"positions must be a multiple of edge, that of part, that of {LANES}, buffers at least 2: {self}"
            )


@tuned("mla_decode_attention", Blocks)
def blocks(width: int, unit: int, longest: int, rank: int, itemsize: int) -> Blocks:
    """Block sizes for `width` queries of a row of at most `longest` latents of `rank` numbers, copied in multiples of
    `unit`. With few queries the matrix unit has little to do for each position, so a part takes more positions to make
    up for the cost of starting it."""
    row = max(unit, 1 << (longest - 1).bit_length())
    part = min(row, max(unit, 1 << (min(1024, (1 << 15) // width).bit_length() - 1)))
    edge = max(part, min(row, 512))
    return Blocks(max(edge, min(row, by_vmem(4096), by_vmem(1 << (19 - (width - 1).bit_length())))), part, edge)


def unsupported(
    q: Shaped,
    latents: Shaped,
    keys: Shaped,
    *,
    pages: int | None = None,
    sizes: Blocks | None = None,
) -> str | None:
    """Why the kernel cannot run q [B, C, H, R + r] on latents [..., S, R] and rotary keys [..., S / f, f * r], or None
    if it can.

    pages: columns of the page table, None if rows are pages. sizes: block sizes other than those of `blocks`.
    """
    dtype, (slots, rank), width = jnp.dtype(latents.dtype), latents.shape[-2:], q.shape[1] * q.shape[2]
    if dtype not in (jnp.bfloat16, jnp.float32) or q.dtype != dtype or keys.dtype != dtype:
        return f"it takes queries and a cache of bfloat16 or float32, both alike, not {q.dtype} and {dtype}"
    if rank % LANES or keys.shape[-1] != LANES:
        return f"latents of {rank} and rotary keys of {keys.shape[-1]} numbers do not fill lanes of {LANES}"
    if slots % (unit := _unit(latents.shape, keys.shape)):
        return f"pages of {slots} positions are no multiple of {unit}"
    if width > MOST_QUERIES:
        return f"{q.shape[1]} x {q.shape[2]} queries of a row exceed {MOST_QUERIES}"
    table = 4 * q.shape[0] * pl.cdiv(pages or 0, LANES) * LANES
    if table > SMEM_BYTES:
        return f"a table of {q.shape[0]} x {pages} pages needs {table} bytes of scalar memory, more than {SMEM_BYTES}"
    chosen = _chosen(sizes, width, latents, keys, pages)
    if chosen.part % unit:
        return f"a part of {chosen.part} positions is no multiple of {unit}"
    need = _vmem_bytes(width, rank, dtype.itemsize, chosen)
    if need > (have := by_vmem(VMEM_BYTES)):
        return f"{width} queries of {rank} numbers need {need} bytes of on-chip memory, more than {have}"
    return None


def _unit(latents: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """Positions that are copied together: those of 128 rows of keys."""
    return LANES * (latents[-2] // keys[-2])


def _chosen(
    sizes: Blocks | None,
    width: int,
    latents: Shaped,
    keys: Shaped,
    pages: int | None,
) -> Blocks:
    slots, rank = latents.shape[-2:]
    unit = _unit(latents.shape, keys.shape)
    return sizes or blocks(width, unit, slots * (pages or 1), rank, latents.dtype.itemsize)


def _vmem_bytes(width: int, rank: int, itemsize: int, blocks: Blocks) -> int:
    rows = pl.cdiv(width, 2 * SUBLANES) * 2 * SUBLANES
    cells = blocks.buffers * blocks.positions * (rank + LANES) * itemsize
    state = rows * (4 * (rank + 2 * LANES) + 2 * (2 * rank + 4 * LANES) * itemsize)
    return cells + state + rows * (4 * 4 * blocks.part + 2 * 4 * rank)


def mla_decode_attention(
    q: jax.Array,
    cache: LatentCache,
    lengths: jax.Array,
    scale: float,
    *,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [B, C, H, R + r]: row b's queries stand at the last C of its lengths[b] positions.

    H heads are in the latents' R dimensions, with their rotary part behind them. The cache has all positions already,
    and its arrays lack the axis of KV heads: latents [N, S, R] and folded rotary keys [N, S / f, f * r], or [L, N,
    ...]; f * r = 128. Scales and `limit` are not read. lengths [B] int32, 0 marks an inactive row (out 0, lse -inf).
    scale multiplies the logits. Only live pages are read.
    Returns out [B, C, H, R] in q's dtype and the log of the softmax's denominator, lse [B, C, H] float32.
    Raises ValueError with the reason of `unsupported`.
    """
    if reason := unsupported(q, cache.latents, cache.keys, pages=cache.columns, sizes=blocks):
        raise ValueError(f"the TPU kernel does not run this latent attention: {reason}")
    (rows, queries, heads, _), rank = q.shape, cache.latents.shape[-1]
    latents, keys = (x if x.ndim == 4 else x[None] for x in (cache.latents, cache.keys))
    width = queries * heads
    chosen = _chosen(blocks, width, latents, keys, cache.columns)
    q, rotary = _spread(q.reshape(rows, width, -1), latents, keys)
    if not interpret:  # otherwise XLA would bring a small cache to VMEM
        latents, keys = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (latents, keys))
    scalars = _Scalars(lengths.astype(jnp.int32), jnp.asarray(cache.layer_or_first, jnp.int32).reshape(1))
    if cache.pages is not None:
        scalars = scalars._replace(table=cache.pages.astype(jnp.int32))
    kernel = functools.partial(_kernel, queries=queries, heads=heads, scale=scale * LOG2E, blocks=chosen)
    live = rows * latents.shape[2] * (cache.columns or 1)
    out, lse = _call(kernel, scalars, _Inputs(q, rotary, latents, keys), chosen, live, interpret)
    shape = rows, queries, heads
    return out.reshape(*shape, rank), lse.reshape(rows, -1)[:, :width].reshape(shape)


def _spread(q: jax.Array, latents: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries [B, W, R + r], and their rotary parts [B, f * W, 128]: one copy for each part of a row of keys, with
    zeros at the other parts."""
    rows, _, size = q.shape
    rank, fold = latents.shape[-1], latents.shape[2] // keys.shape[2]
    rotary = jnp.pad(q[..., rank:], ((0, 0), (0, 0), (0, LANES // fold - (size - rank))))
    return q, (jnp.eye(fold, dtype=q.dtype)[:, None, :, None] * rotary[:, None, :, None]).reshape(rows, -1, LANES)


def _call(
    kernel: Callable[..., None],
    scalars: _Scalars,
    inputs: _Inputs,
    blocks: Blocks,
    live: int,
    interpret: bool | pltpu.InterpretParams,
) -> Sequence[jax.Array]:
    """live: the most positions of all rows that are read."""
    (rows, width, size), rank, dtype = inputs.q.shape, inputs.latents.shape[-1], inputs.q.dtype
    fold, lines = inputs.latents.shape[2] // inputs.keys.shape[2], pl.cdiv(width, LANES)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    need = _vmem_bytes(width, rank, inputs.latents.dtype.itemsize, blocks)

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, _: (b, 0, 0))

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=(_Inputs(of_row(width, rank), of_row(fold * width, LANES), whole, whole),),
            out_specs=[of_row(width, rank), of_row(lines, LANES)],
            scratch_shapes=[_scratch(inputs, blocks, width, fold)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, width, rank), dtype),
            jax.ShapeDtypeStruct((rows, lines, LANES), jnp.float32),
        ],
        # Checks triple the work of starting a copy; `start_copy` and `length_of` keep them in bounds.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=max(need + (4 << 20), 16 << 20),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * live * width * (size + rank),
            bytes_accessed=(live * (rank + LANES // fold) + rows * width * (size + rank)) * dtype.itemsize,
            transcendentals=live * width,
        ),
        interpret=interpret,
        name="mla_decode_attention",
    )(scalars, inputs._replace(q=inputs.q[..., :rank]))


def _scratch(inputs: _Inputs, blocks: Blocks, width: int, fold: int) -> _Scratch:
    rank = inputs.latents.shape[-1]
    return _Scratch(
        pltpu.VMEM((blocks.buffers, blocks.positions, rank), inputs.latents.dtype),
        pltpu.VMEM((blocks.buffers, blocks.positions // fold, LANES), inputs.keys.dtype),
        pltpu.VMEM((width, LANES), jnp.float32),
        pltpu.VMEM((width, LANES), jnp.float32),
        pltpu.VMEM((width, rank), jnp.float32),
        pltpu.SMEM((3,), jnp.int32),
        pltpu.SemaphoreType.DMA((2, blocks.buffers)),
    )


class _Scalars(NamedTuple):
    """Scalar memory: lengths [B], layer [1], page table [B, M]."""

    lengths: Any
    layer: Any
    table: Any = None


class _Inputs(NamedTuple):
    """W = C * H queries q [W, R] and their rotary parts [f * W, 128]. HBM: latents [L, N, S, R], keys
    [L, N, S / f, 128]."""

    q: Any
    rotary: Any
    latents: Any
    keys: Any


class _Scratch(NamedTuple):
    """latents [n, T, R], keys [n, T / f, 128]: copies of n blocks. top, sum [W, 128]: the running maximum (equal in all
    lanes) and sum (spread over the lanes). acc [W, R]: the accumulator. state: the row and the block to be copied next
    and the buffer to be read next."""

    latents: Any
    keys: Any
    top: Any
    sum: Any
    acc: Any
    state: Any
    semaphores: Any


def _kernel(scalars: _Scalars, inputs: _Inputs, out_ref, lse_ref, scratch: _Scratch, *, queries, heads, scale, blocks):
    """One row: out_ref [W, R], lse_ref [W / 128, 128]. Logits are in units of log 2: exponentials have base 2."""
    lengths_ref, layer_ref, table = scalars
    q_ref, rotary_ref, latents_hbm, keys_hbm = inputs
    latents_buf, keys_buf, top_ref, sum_ref, acc_ref, state, sems = scratch
    row, rows = pl.program_id(0), pl.num_programs(0)
    width, rank = acc_ref.shape
    slots, fold = latents_hbm.shape[2], latents_hbm.shape[2] // keys_hbm.shape[2]
    block, unit, buffers = blocks.positions, LANES * fold, blocks.buffers
    capacity = slots * (1 if table is None else table.shape[1])
    exact = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    def length_of(row):
        return jnp.minimum(lengths_ref[row], capacity)

    # ---- copies

    def parts_of(offset, count):
        """The rows of latents and of keys that hold `count` positions from `offset`, both multiples of a unit."""
        return (
            pl.ds(pl.multiple_of(offset, unit), count),
            pl.ds(pl.multiple_of(div(offset, fold), LANES), count // fold),
        )

    def start_copy(row, index, offset, count, buf):
        """Start the copies that bring `count` positions of a page to `offset` in a buffer."""
        page, slot = row, index * block + offset
        if table is not None:
            page, slot = jnp.clip(table[row, div(slot, slots)], 0, latents_hbm.shape[1] - 1), rem(slot, slots)
        arrays, sources, targets = (latents_hbm, keys_hbm), parts_of(slot, count), parts_of(offset, count)
        for n, (hbm, vmem) in enumerate(zip(arrays, (latents_buf, keys_buf), strict=True)):
            source = hbm.at[layer_ref[0], page, sources[n]]
            pltpu.make_async_copy(source, vmem.at[buf, targets[n]], sems.at[n, buf]).start()

    def units_of(row, index):
        """How many units of a row's block there are."""
        return jnp.minimum(div(length_of(row) - index * block + unit - 1, unit), block // unit)

    def start_block(row, index, buf):
        units = units_of(row, index)
        if slots >= block:
            whole = units == block // unit
            if table is not None:
                whole &= rem(index * block, slots) + block <= slots
            pl.when(whole)(lambda: start_copy(row, index, 0, block, buf))
            units = jnp.where(whole, 0, units)

        def start_units(first, stop, count):
            def start_some(i, _):
                for n in range(count):
                    start_copy(row, index, (first + i * count + n) * unit, unit, buf)

            lax.fori_loop(0, div(stop - first, count), start_some, None)

        together = units & -UNROLL
        start_units(0, together, UNROLL)
        start_units(together, units, 1)

    def wait_block(row, index, buf):
        units = units_of(row, index)

        def wait(i, count):
            """A wait takes only the number of bytes from its copy."""
            at = parts_of(i * unit, count)
            for n, vmem in enumerate((latents_buf, keys_buf)):
                part = vmem.at[buf, at[n]]
                pltpu.make_async_copy(part, part, sems.at[n, buf]).wait()

        whole = units == block // unit
        pl.when(whole)(lambda: wait(0, block))
        lax.fori_loop(0, jnp.where(whole, 0, units), lambda i, _: wait(i, unit), None)

    def blocks_of(length):
        return div(length + block - 1, block)

    def start_next(buf):
        """Start the copies of the block whose turn it is, if any is left."""
        at, index = state[0], state[1]

        @pl.when(at < rows)
        def _():
            start_block(at, index, buf)
            ends = index + 1 == blocks_of(length_of(at))
            state[0] = lax.while_loop(is_empty, lambda at: at + 1, at + ends.astype(jnp.int32))
            state[1] = jnp.where(ends, 0, index + 1)

    def is_empty(at):
        return (at < rows) & (lengths_ref[jnp.minimum(at, rows - 1)] == 0)

    @pl.when(row == 0)
    def _():
        state[0] = lax.while_loop(is_empty, lambda at: at + 1, 0)
        state[1] = 0
        state[2] = 0
        lax.fori_loop(0, buffers - 1, lambda buf, _: start_next(buf), None)

    # ---- computation

    length = length_of(row)
    # [W, 1] position of each query; of all, if there is one to a head.
    query = length - queries
    if queries > 1:
        query = query + lax.div(lax.broadcasted_iota(jnp.int32, (width, 1), 0), heads)

    def dot(x, y, contract):
        return lax.dot_general(x, y, (((1,), (contract,)), ((), ())), exact, preferred_element_type=jnp.float32)

    def scores(buf, offset):
        """Logits [W, n] of a part of a buffer."""
        at, at_keys = parts_of(offset, blocks.part)
        s = dot(q_ref[...], latents_buf[buf, at], 1)
        turned = dot(rotary_ref[...], keys_buf[buf, at_keys], 1)  # [f * W, n / f]
        groups = range(0, blocks.part // fold, LANES)
        turned = [turned[f * width : (f + 1) * width, g : g + LANES] for g in groups for f in range(fold)]
        return (s + jnp.concatenate(turned, axis=1)) * scale

    def take_in(buf, offset, count, fresh, start=None):
        """Take in `count` positions of a buffer from `offset`, and write the row's output so far. start: the buffer's
        first position, if unseen positions are to be masked. fresh: these are the row's first positions."""
        ahead = scores(buf, offset)
        for at in range(0, count, blocks.part):
            s, old = ahead, top_ref[...]
            if start is not None:
                position = start + offset + at + lax.broadcasted_iota(jnp.int32, s.shape, 1)
                s = jnp.where(position <= query, s, MASKED)
            total, acc = sum_ref[...], acc_ref[...]
            if at == 0:
                old, total, acc = (jnp.where(fresh, x, y) for x, y in ((MASKED, old), (0.0, total), (0.0, acc)))
            top = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
            if at + blocks.part < count:
                ahead = scores(buf, offset + at + blocks.part)
            p = jnp.exp2(s - wide(top, blocks.part))
            values = latents_buf[buf, parts_of(offset + at, blocks.part)[0]]
            decay = jnp.exp2(old - top)
            total = total * decay + sum(p[:, i : i + LANES] for i in range(0, blocks.part, LANES))
            acc = acc * wide(decay, rank) + dot(p.astype(values.dtype), values, 0)
            top_ref[...], sum_ref[...], acc_ref[...] = top, total, acc
        total = jnp.sum(total, axis=1, keepdims=True)
        empty = top <= MASKED / 2
        total = jnp.where(empty, 1.0, total)
        out_ref[...] = (acc * wide(jnp.where(empty, 0.0, 1.0 / total), rank)).astype(out_ref.dtype)
        write_lse(jnp.where(empty, -jnp.inf, top / LOG2E + jnp.log(total)))

    def write_lse(lse):
        """[W, 128], all lanes alike, as rows of lanes."""
        for line in range(lse_ref.shape[0]):
            some = lse[line * LANES : (line + 1) * LANES]
            diagonal = lax.broadcasted_iota(jnp.int32, some.shape, 0) == lax.broadcasted_iota(jnp.int32, some.shape, 1)
            lse_ref[line] = jnp.sum(jnp.where(diagonal, some, 0.0), axis=0)

    def clean(buf, start, count):
        """Zero the latents that no query sees, of a buffer's first `count` positions, and their keys in rows that are
        seen in part: 0 * NaN is NaN."""
        after = jnp.minimum(div(length - start, LANES), div(count, LANES) - 1)
        at = pl.ds(pl.multiple_of(after * LANES, LANES), LANES)
        position = start + after * LANES + lax.broadcasted_iota(jnp.int32, (LANES, rank), 0)
        cleaned = jnp.where(position < length, latents_buf[buf, at].astype(jnp.float32), 0)
        latents_buf[buf, at] = cleaned.astype(latents_buf.dtype)
        if fold > 1:
            line = div(after, fold)
            at = pl.ds(pl.multiple_of(line * LANES, LANES), LANES)
            part = lax.div(lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1), LANES // fold)
            position = start + line * unit + part * LANES + lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
            cleaned = jnp.where(position < length, keys_buf[buf, at].astype(jnp.float32), 0)
            keys_buf[buf, at] = cleaned.astype(keys_buf.dtype)

        def zero(i, _):
            at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
            latents_buf[buf, at] = jnp.zeros((LANES, rank), latents_buf.dtype)

        lax.fori_loop(after + 1, div(count, LANES), zero, None)

    def step(index, buf):
        start_next(jnp.where(buf == 0, buffers - 1, buf - 1))
        wait_block(row, index, buf)
        start = index * block
        whole = start + block <= length - queries + 1

        @pl.when(whole)
        def _():
            take_in(buf, 0, block, index == 0)

        @pl.when(~whole)
        def _():
            parts = div(jnp.minimum(length - start, block) + blocks.edge - 1, blocks.edge)
            clean(buf, start, parts * blocks.edge)

            def take_parts(i, count):
                at = pl.multiple_of(i * blocks.edge, blocks.edge)
                take_in(buf, at, count * blocks.edge, (index == 0) & (i == 0), start)

            together = min(block // blocks.edge, TOGETHER)
            most = div(parts, together)
            lax.fori_loop(0, most, lambda i, _: take_parts(i * together, together), None)
            lax.fori_loop(most * together, parts, lambda i, _: take_parts(i, 1), None)

        return jnp.where(buf == buffers - 1, 0, buf + 1)

    @pl.when(length == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)
        lse_ref[...] = jnp.full_like(lse_ref, -jnp.inf)

    state[2] = lax.fori_loop(0, blocks_of(length), step, state[2])
