"""Decode attention over latents (MLA) on NVIDIA GPUs: each latent is read once, as a key and as a value.

A program computes one share of a row's positions for a tile of its heads; if rows have more than one share, a second
small kernel merges the shares by log-sum-exp. The new token's latent and rotary key never come from the cache: all
programs have them in registers, and one stores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import LatentCache, NewCells, Shaped
from inferlib.pallas_kernels.decode_attention_gpu import LONG_SHARE, merge, share_of
from inferlib.pallas_kernels.processors_gpu import PROCESSORS
from inferlib.pallas_kernels.row_cells_gpu import RowCells, of_one_layer, page_specs, unsupported_pages

PROGRAMS = 2 * PROCESSORS  # programs that are resident at once with these tiles
MOST_SHARES = 128  # most shares of a row
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Blocks:
    """heads, positions: of a tile, powers of two from 16 on, for the tensor cores. A share is a whole number of tiles.

    With 4 warps, queries and the accumulator of 16 x 512 take three quarters of a program's registers."""

    heads: int = 16
    positions: int = 32
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        if any(n < 16 or n & (n - 1) for n in (self.heads, self.positions)):
            raise ValueError(f"tiles have powers of two from 16 on of heads and positions: {self}")


def blocks(dtype: jax.typing.DTypeLike) -> Blocks:
    """Tile sizes, of equal bytes for all dtypes."""
    return Blocks(positions=16) if jnp.dtype(dtype).itemsize == 4 else Blocks()


def fits(rank: int, rotary: int) -> bool:
    """True if latents and rotary keys of these sizes are tiles that the kernel keeps in registers."""
    return all(16 <= n <= 512 and n & (n - 1) == 0 for n in (rank, rotary))


def unsupported(q: Shaped, latents: Shaped, keys: Shaped) -> str | None:
    """Why the kernel cannot run q [B, H, R] on latents [N, 1, S, R] and rotary keys [N, 1, S, r], or None if it can."""
    rank, rotary = latents.shape[-1], keys.shape[-1]
    if latents.dtype.name not in DTYPES or q.dtype != latents.dtype or keys.dtype != latents.dtype:
        return f"it takes queries and a cache of one of {', '.join(DTYPES)}, not {q.dtype} and {latents.dtype}"
    if q.ndim != 3:
        return "it takes one query of a row"
    if latents.ndim != 4 or keys.shape[:3] != latents.shape[:3]:
        return f"it takes latents and rotary keys of the same positions of one layer, not {latents.shape}, {keys.shape}"
    if not fits(rank, rotary):
        return f"latents of {rank} and rotary keys of {rotary} numbers are no powers of two from 16 to 512"
    return None


def mla_decode_attention(
    q: jax.Array,
    rotary: jax.Array,
    cache: LatentCache,
    lengths: jax.Array,
    scale: float,
    *,
    new: NewCells | None = None,
    chosen: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Attend with q [B, H, R] and its rotary part [B, H, r]: row b's query stands at position lengths[b] - 1.

    H heads are in the latents' R dimensions. Row b's cache is page b of latents [N, 1, S, R] and rotary keys [N, 1, S,
    r], N >= B, or the pages of its row of a table, which may be those of a layer of a stack. lengths [B] int32 counts
    positions, at most a row's slots and `cache.limit`; 0 marks an inactive row (out 0, lse -inf). scale multiplies the
    logits. new: latents [B, 1, R] and rotary keys [B, 1, r] of the queries' positions, which the kernel writes in
    place, in all active rows whose page exists; without, the cache has them already. The kernel does not read slots
    that hold no position. interpret: run on any device.
    Returns out [B, H, R] in q's dtype and the log of the softmax's denominator, lse [B, H] float32; with `new` also the
    cache's latents and rotary keys. Raises ValueError with the reason of `unsupported`, and for shapes that differ.
    """
    cache = of_one_layer(cache)
    latents, keys, limit, columns = cache.latents, cache.keys, cache.limit, cache.columns
    if reason := unsupported(q, latents, keys) or unsupported_pages(latents.shape[2], columns):
        raise ValueError(f"the GPU kernel does not run this latent attention: {reason}")
    (rows, heads, rank), slots = q.shape, latents.shape[2] * (columns or 1)
    fewer = columns is None and latents.shape[0] < rows
    if fewer or rotary.shape != (rows, heads, keys.shape[3]) or rank != latents.shape[3]:
        raise ValueError(f"q {q.shape}, rotary {rotary.shape} and a cache {latents.shape}, {keys.shape} do not match")
    chosen = chosen or blocks(q.dtype)
    if columns is not None:
        chosen = replace(chosen, positions=math.gcd(chosen.positions, latents.shape[2]))
    tiles = pl.cdiv(heads, chosen.heads)
    splits = _splits(rows * tiles, slots if limit is None else min(limit, slots), chosen.positions)
    cells = None
    if new is not None:
        cells = [x.astype(old.dtype) for x, old in zip(new.cells, (latents, keys), strict=True)]
    kernel = partial(_kernel, scale=scale, chosen=chosen, splits=splits, programs=PROGRAMS / tiles)
    operands = lengths, q, rotary, latents, keys, cells, cache.pages
    out, lse, *written = _call(kernel, operands, (tiles, splits, rows), chosen, interpret)
    out, lse = (out[0], lse[0]) if splits == 1 else merge(out, lse, q.dtype, interpret)
    return out, lse, *written


def _call(
    kernel: Callable[..., None], operands: tuple, grid: tuple[int, int, int], chosen: Blocks, interpret: bool
) -> Sequence[jax.Array]:
    """operands: lengths, q, rotary, latents, keys, new cells or None, pages or None. grid: tiles of heads, shares,
    rows."""
    lengths, q, rotary, latents, keys, new, pages = operands
    _, splits, rows = grid

    def of_row(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda t, s, b: (b, *(0,) * (x.ndim - 1)))

    def of_share(x: jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda t, s, b: (s, b, *(0,) * (x.ndim - 2)))

    written = [] if new is None else [latents, keys]
    shapes = [
        jax.ShapeDtypeStruct((splits, *q.shape), q.dtype if splits == 1 else jnp.float32),
        jax.ShapeDtypeStruct((splits, *q.shape[:2]), jnp.float32),
    ]
    cells, (_, table) = [page_specs(x, pages, 2, None)[0] for x in (latents, keys)], page_specs(latents, pages, 2, None)
    return pl.pallas_call(
        kernel,
        # Programs of the same positions are neighbours: the first one reads the cells, the others find them in L2.
        grid=grid,
        in_specs=[
            pl.BlockSpec((rows,), lambda t, s, b: (0,)),
            of_row(q),
            of_row(rotary),
            *cells,
            None if new is None else [of_row(x) for x in new],
            table,
        ],
        out_specs=[of_share(x) for x in shapes] + (cells if written else []),
        out_shape=shapes + [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        input_output_aliases={3: 2, 4: 3} if written else {},
        compiler_params=plgpu.CompilerParams(num_warps=chosen.warps, num_stages=chosen.stages),
        interpret=interpret,
        name="mla_decode_attention",
    )(lengths, q, rotary, latents, keys, new, pages)


def _splits(programs: int, longest: int, positions: int) -> int:
    """The most shares of a row of at most `longest` positions. programs: their number if each row has one share.

    Twice an even part of the chip, for rows longer than the average; one if rows fill the chip and none would finish
    far behind the others.
    """
    even = PROGRAMS // programs
    splits = max(2 * even if even > 1 else 1, min(pl.cdiv(longest, LONG_SHARE), 8))
    return min(splits, pl.cdiv(longest, positions), MOST_SHARES)


def _kernel(
    lengths_ref,
    q_ref,
    rotary_ref,
    latents_ref,
    keys_ref,
    new_refs,
    table_ref,
    out_ref,
    lse_ref,
    *written_refs,
    scale,
    chosen,
    splits,
    programs,
):
    """One share of some heads: lengths_ref [B], q_ref, out_ref [H, R], rotary_ref [H, r], latents_ref [S, R] and
    keys_ref [S, r] or, with table_ref [M], [N, 1, S, R] and [N, 1, S, r], new_refs [1, R] and [1, r] or nothing,
    written_refs the cache or nothing, lse_ref [H]."""
    (count, rank), size, block = q_ref.shape, rotary_ref.shape[1], chosen.positions
    heads = pl.program_id(0) * chosen.heads + jnp.arange(chosen.heads)
    real, columns, turned = heads < count, jnp.arange(rank), jnp.arange(size)
    mask = None if count % chosen.heads == 0 else real[:, None]
    other = None if mask is None else 0
    q = plgpu.load(q_ref.at[heads[:, None], columns[None]], mask=mask, other=other)
    rotary = plgpu.load(rotary_ref.at[heads[:, None], turned[None]], mask=mask, other=other)

    split, row = pl.program_id(1), pl.program_id(2)
    cells = RowCells(latents_ref, table_ref, 0, block)
    dealing: dict[str, Any] = dict(
        visible=None, block=block, splits=splits, programs=programs, paged=table_ref is not None
    )
    length, _, start, stop = share_of(lengths_ref, row, split, **dealing)
    page = cells.page(start)
    end = stop if new_refs is None else jnp.minimum(stop, length - 1)  # end of the reads

    acc = jnp.zeros((chosen.heads, rank), jnp.float32)
    top, total = jnp.full(heads.shape, -jnp.inf, jnp.float32), jnp.zeros(heads.shape, jnp.float32)
    if new_refs is not None:
        newest = (start < stop) & (stop == length)
        latent = plgpu.load(new_refs[0].at[0, columns])
        key = plgpu.load(new_refs[1].at[0, turned])
        s = (_times(q, latent) + _times(rotary, key)) * scale
        top, total = jnp.where(newest, s, top), jnp.where(newest, 1.0, total)
        acc = jnp.where(newest, latent.astype(jnp.float32)[None], acc)
        place, exists = cells.cell(jnp.maximum(length - 1, 0))
        writes = newest & exists & (pl.program_id(0) == 0)
        for ref, x, at in zip(written_refs, (latent, key), (columns, turned), strict=True):
            plgpu.store(ref.at[*place, at], x, mask=jnp.broadcast_to(writes, at.shape))

    def step(i, carry):
        acc, top, total, *page = carry
        seen = start + i * block + jnp.arange(block) < end
        at = cells.at(start + i * block, tuple(page))
        page = cells.page(start + (i + 1) * block)
        latents = plgpu.load(latents_ref.at[*at, columns[None]], mask=seen[:, None], other=0)
        keys = plgpu.load(keys_ref.at[*at, turned[None]], mask=seen[:, None], other=0)
        s = _dot(q, latents, trans_b=True) + _dot(rotary, keys, trans_b=True)
        s = jnp.where(seen[None], s * scale, -jnp.inf)
        new_top = jnp.maximum(top, s.max(axis=1))
        p = jnp.exp(s - new_top[:, None])
        decay = jnp.exp(top - new_top)
        acc = acc * decay[:, None] + _dot(p.astype(latents.dtype), latents)
        return acc, new_top, total * decay + p.sum(axis=1), *page

    acc, top, total, *_ = lax.fori_loop(0, pl.cdiv(end - start, block), step, (acc, top, total, *page))
    total = jnp.where(total > 0, total, 1.0)  # an empty share: acc 0, top -inf
    out = (acc / total[:, None]).astype(out_ref.dtype)
    # The merge skips the outputs of empty shares.
    stored = real if splits == 1 else real & (start < stop)
    plgpu.store(out_ref.at[heads[:, None], columns[None]], out, mask=stored[:, None])
    plgpu.store(lse_ref.at[heads], top + jnp.log(total), mask=real)


def _times(x: jax.Array, y: jax.Array) -> jax.Array:
    """[H, n] . [n] -> [H], in float32."""
    return (x.astype(jnp.float32) * y.astype(jnp.float32)[None]).sum(axis=1)


_dot = partial(plgpu.dot, precision=lax.Precision.HIGHEST)
