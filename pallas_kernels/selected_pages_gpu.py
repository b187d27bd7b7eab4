"""The choice of blocks that decode attention reads, on NVIDIA GPUs (Triton lowering).

A program takes one row and KV head: it bounds the products of its queries with the keys of every block by the block's
summary, finds the best blocks, and writes them as a row of a page table. XLA takes 14 kernels for that, two of them
sorts, and each takes longer to launch than to run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.pallas_kernels.decode_attention_gpu import power_of_two

TILE = 64  # blocks whose summaries are read at once
WARPS = 4
MOST = 8192  # blocks of a row: their bounds are in the registers of one program


def unsupported(blocks: int) -> str | None:
    """Why the kernel does not take rows of so many blocks; None: it does."""
    return None if blocks <= MOST else f"{blocks} blocks of a row exceed {MOST}"


def select_blocks(
    q: jax.Array,
    summaries: jax.Array,
    pages: jax.Array,
    lengths: jax.Array,
    *,
    size: int,
    count: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The blocks that each row and KV head reads, see `inferlib.ops.selected_pages`.

    q [B, K, G, h]; summaries [N, n, K, 2 * h] of blocks of `size` positions; pages [B, M] int32, of which those that do
    not exist are clipped; lengths [B] int32: positions that a row sees, 0 of an inactive one.
    Returns a table [B * K, count] int32 of pages of one head, and how many of their positions are seen, [B * K] int32.
    Raises ValueError with the reason of `unsupported`.
    """
    rows, heads, group, width = q.shape
    if reason := unsupported(pages.shape[1] * summaries.shape[1]):
        raise ValueError(reason)
    table, seen = pl.pallas_call(
        functools.partial(_kernel, size=size),
        grid=(rows, heads),
        in_specs=[
            pl.BlockSpec((rows,), lambda b, k: (0,)),
            pl.BlockSpec((None, None, group, width), lambda b, k: (b, k, 0, 0)),
            pl.BlockSpec(),
            pl.BlockSpec((None, pages.shape[1]), lambda b, k: (b, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, count), lambda b, k: (b, k, 0)),
            pl.BlockSpec((None, None), lambda b, k: (b, k)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, count), jnp.int32),
            jax.ShapeDtypeStruct((rows, heads), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
        name="select_blocks",
    )(lengths, q, summaries, pages)
    return table.reshape(-1, count), seen.reshape(-1)


def _kernel(lengths_ref, q_ref, summaries_ref, pages_ref, table_ref, seen_ref, *, size):
    """lengths_ref [B], q_ref [G, h], summaries_ref [N, n, K, 2 * h], pages_ref [M], table_ref [count]."""
    (count,), (pages, each, heads, _), head = table_ref.shape, summaries_ref.shape, pl.program_id(1)
    length = plgpu.load(lengths_ref.at[pl.program_id(0)])
    newest = lax.div(jnp.maximum(length - 1, 0), size)

    def page_of(block: jax.Array) -> jax.Array:
        column = jnp.minimum(lax.div(block, each), pages_ref.size - 1)
        return jnp.clip(plgpu.load(pages_ref.at[column]), 0, pages - 1)

    def entry(block: jax.Array) -> jax.Array:
        """The number of the block among pages of one head."""
        return (page_of(block) * heads + head) * each + lax.rem(block, each)

    bounds = _bounds(q_ref, summaries_ref, page_of, newest, power_of_two(pages_ref.size * each, TILE))
    numbers = jnp.arange(bounds.shape[0])[:, None] * TILE + jnp.arange(TILE)[None]
    bounds = jnp.where(numbers == 0, jnp.inf, bounds)
    older = jnp.minimum(newest, count - 1)
    chosen = _among_highest(jnp.where(numbers < newest, bounds, -jnp.inf), older) & (numbers < newest)
    # Masked entries get places of their own, because an interpreter writes entries one after the other.
    plgpu.store(table_ref.at[jnp.where(chosen, _ranks(chosen) - 1, count + numbers)], entry(numbers), mask=chosen)
    places = jnp.arange(power_of_two(count))
    last = jnp.broadcast_to(newest, places.shape)
    plgpu.store(table_ref.at[places], entry(last), mask=(places >= older) & (places < count))
    seen = jnp.where(length > 0, older * size + lax.rem(jnp.maximum(length - 1, 0), size) + 1, 0)
    plgpu.store(seen_ref, seen)


def _bounds(q_ref, summaries_ref, page_of: Any, newest: jax.Array, blocks: int) -> jax.Array:
    """The bounds [blocks / TILE, TILE] float32 of blocks before the newest; others are -inf."""
    (group, width), each = q_ref.shape, summaries_ref.shape[1]
    queries, columns = jnp.arange(power_of_two(group)), jnp.arange(power_of_two(width))
    there = (queries < group)[:, None] & (columns < width)[None]
    q = plgpu.load(q_ref.at[queries[:, None], columns[None]], mask=there, other=0)
    q = q.astype(jnp.promote_types(q_ref.dtype, summaries_ref.dtype))
    negative, positive = jnp.minimum(q, 0), jnp.maximum(q, 0)
    tiles, head = jnp.arange(blocks // TILE), pl.program_id(1)

    def product(q: jax.Array, at: tuple, first: int, live: jax.Array) -> jax.Array:
        mask = live[:, None] & (columns < width)[None]
        ends = plgpu.load(summaries_ref.at[*at, head, first + columns[None]], mask=mask, other=0)
        return plgpu.dot(q, ends.astype(q.dtype), trans_b=True, precision=lax.Precision.HIGHEST)

    def step(i, bounds):
        block = i * TILE + jnp.arange(TILE)
        live, at = block < newest, (page_of(block)[:, None], lax.rem(block, each)[:, None])
        products = product(negative, at, 0, live) + product(positive, at, width, live)
        best = jnp.max(jnp.where((queries < group)[:, None], products, -jnp.inf), axis=0)
        return jnp.where(tiles[:, None] == i, best[None], bounds)

    return lax.fori_loop(0, pl.cdiv(newest, TILE), step, jnp.full((tiles.size, TILE), -jnp.inf, jnp.float32))


def _among_highest(bounds: jax.Array, count: jax.Array) -> jax.Array:
    """Which of the bounds are among the `count` highest, of equal ones the first: bool, of their shape.

    The lowest of them is found bit by bit, in integers that are ordered as the bounds are.
    """
    bits = lax.bitcast_convert_type(bounds, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def step(i, least):
        higher = least + lax.shift_left(jnp.int32(1), 31 - i)
        return jnp.where(jnp.sum((keys >= higher).astype(jnp.int32)) >= count, higher, least)

    least = lax.fori_loop(0, 32, step, jnp.int32(-(2**31)))
    above, equal = keys > least, keys == least
    return above | (equal & (_ranks(equal) <= count - jnp.sum(above.astype(jnp.int32))))


def _ranks(chosen: jax.Array) -> jax.Array:
    """For each number how many are chosen up to it, row after row."""
    ones = chosen.astype(jnp.int32)
    of_rows = jnp.sum(ones, axis=1)
    return jnp.cumsum(ones, axis=1) + (jnp.cumsum(of_rows, axis=0) - of_rows)[:, None]
