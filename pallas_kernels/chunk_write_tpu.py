"""A TPU kernel that writes the cells of chunks of consecutive positions to a paged cache.

XLA scatters cells one by one. This kernel copies whole tiles of memory; it reads the other positions of the first and
the last tile and writes them again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import Shaped
from inferlib.pallas_kernels.arithmetic_tpu import LANES, div
from inferlib.pallas_kernels.cell_write_tpu import quantised, tile_of
from inferlib.pallas_kernels.tile_stream_tpu import SUBLANES, scale_rows

MOST_BYTES = 1 << 20  # most bytes of a grid step's new cells, for one array in float32


def unsupported(cache: Sequence[Shaped], width: int, *, ring: bool) -> str | None:
    """Why the kernel cannot write chunks of `width` tokens to a cache, or None if it can."""
    if cache[0].shape[-1] % LANES:
        return f"cells of {cache[0].shape[-1]} numbers are not a multiple of {LANES}"
    tiles, slots = _tiles(cache), cache[0].shape[-2]
    if slots % max(tiles):
        return f"pages of {slots} positions do not divide into tiles of {max(tiles)}"
    if width % SUBLANES:
        return f"chunks of {width} tokens are not a multiple of {SUBLANES}"
    tokens = _tokens(cache, width)
    if ring and max(_window(tokens, tile) for tile in tiles) > slots:
        return f"rings of {slots} positions are too small for chunks of {width}"
    return None


def _tiles(cache: Sequence[Shaped]) -> list[int]:
    """Positions of a tile in each array, which has cells or scales."""
    return [tile_of(5 if x.ndim == cache[0].ndim else 4, x.dtype) for x in cache]


def _tokens(cache: Sequence[Shaped], width: int) -> int:
    """Tokens of a grid step: whole tiles, or a part of one, of at most `MOST_BYTES`."""
    tiles, size, heads = _tiles(cache), cache[0].shape[-1], scale_rows(cache[0].shape[-3])
    tokens = width if all(width % tile == 0 or width < tile for tile in tiles) else math.gcd(width, *tiles)
    unit = LANES if tokens % LANES == 0 else math.gcd(tokens, *tiles)
    most = max(MOST_BYTES // (4 * heads * size), unit)
    return max(n for n in range(unit, min(tokens, most) + 1, unit) if tokens % n == 0)


def _window(tokens: int, tile: int) -> int:
    """Positions of the most tiles that `tokens` consecutive positions touch."""
    return (pl.cdiv(tokens, tile) + 1) * tile


def chunk_write(
    cache: Sequence[jax.Array],
    new: Sequence[jax.Array],
    pages: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int = 0,
    ring: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, ...]:
    """Put token c of chunk p at page pages[p], slot slots[p] + c, modulo S in a ring; pages, slots: [P] int32.

    cache: one or two arrays [N, K, S, h], or [L, N, K, S, h] of which `layer` is written; if they are int8 or
    float8_e4m3fn, their scales follow, [N, K, S] or [L, N, K, S] float32. new: for each array of cells
    [P, C, K, h] of any float type. A page of N or more, or a slot of S or more, writes nothing.
    Returns the cache, in the buffers of the one passed in. Raises ValueError with the reason of `unsupported`.
    """
    if reason := unsupported(cache, new[0].shape[1], ring=ring):
        raise ValueError(f"the TPU kernel does not write these chunks: {reason}")
    stacked = cache[0].ndim == 5
    cache = [x if stacked else x[None] for x in cache]
    chunks, width, heads, size = new[0].shape
    tiles, step_heads, tokens = _tiles(cache), scale_rows(heads), _tokens(cache, width)
    there = pages < cache[0].shape[1]
    scalars = _Scalars(
        jnp.where(there, pages, -1).astype(jnp.int32),
        slots.astype(jnp.int32),
        jnp.asarray(layer, jnp.int32).reshape(1),
    )
    if not interpret:  # otherwise XLA would bring a small cache to VMEM
        cache = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in cache]
    inputs = _Inputs([x.reshape(chunks, width, heads * size) for x in new], cache)
    in_hbm = [pl.BlockSpec(memory_space=pl.ANY)] * len(cache)
    cells = pl.BlockSpec((None, tokens, step_heads * size), lambda p, k, t, *_: (p, t, k))
    (written,) = pl.pallas_call(
        functools.partial(_kernel, ring=ring, tiles=tiles, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks, heads // step_heads, width // tokens),
            in_specs=(_Inputs([cells] * len(new), in_hbm),),
            out_specs=(in_hbm,),
            scratch_shapes=[_scratch(cache, tiles, tokens, len(new))],
        ),
        out_shape=([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache],),
        input_output_aliases={len(scalars) + len(new) + n: n for n in range(len(cache))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=chunks * width * heads * sum(math.prod(x.shape[4:]) * x.dtype.itemsize for x in cache)
            + sum(x.size * x.dtype.itemsize for x in new),
            transcendentals=0,
        ),
        interpret=interpret,
        name="chunk_write",
    )(scalars, inputs)
    return tuple(x if stacked else x[0] for x in written)


class _Scalars(NamedTuple):
    """pages [P], -1 if absent; slots [P]; layer [1]."""

    pages: Any
    slots: Any
    layer: Any


class _Inputs(NamedTuple):
    """new: arrays of cells [tokens, heads * h]; HBM: the arrays of the cache."""

    new: Sequence[Any]
    cache: Sequence[Any]


class _Scratch(NamedTuple):
    """windows: for each array of the cache the tiles to write, [heads, window, ...]. rows [h / 128, rows, 128]: a
    head's cells in float32 with a tile before and behind them, because only rows of 128 lanes can be read from any row
    on. scales [n, heads, tokens]: the scales of each of `new`."""

    windows: Sequence[Any]
    rows: Any
    scales: Any
    semaphores: Any


def _scratch(cache: Sequence[jax.Array], tiles: Sequence[int], tokens: int, count: int) -> _Scratch:
    """The scratch of a grid step that writes `tokens` tokens of `count` arrays of cells."""
    heads, size = scale_rows(cache[0].shape[2]), cache[0].shape[-1]
    windows = [
        pltpu.VMEM((heads, _window(tokens, tile), *x.shape[4:]), x.dtype) for x, tile in zip(cache, tiles, strict=True)
    ]
    return _Scratch(
        windows,
        pltpu.VMEM((size // LANES, _window(tokens, tiles[0]) + tiles[0], LANES), jnp.float32),
        pltpu.VMEM((count, heads, pl.cdiv(tokens, LANES) * LANES), jnp.float32),
        pltpu.SemaphoreType.DMA((len(cache),)),
    )


def _kernel(scalars: _Scalars, inputs: _Inputs, in_hbm, scratch: _Scratch, *, ring, tiles, size):
    """Write some tokens of a chunk for some heads. in_hbm: the cache, in the memory of `inputs.cache`."""
    new, windows = inputs.new, scratch.windows
    arrays, count = len(tiles), len(new)
    chunk, group, part = (pl.program_id(n) for n in range(3))
    tokens, step_heads, slots = new[0].shape[0], windows[0].shape[0], in_hbm[0].shape[3]
    heads = pl.ds(pl.multiple_of(group * step_heads, step_heads), step_heads)
    page, position = scalars.pages[chunk], scalars.slots[chunk] + part * tokens
    position = lax.rem(position, slots) if ring else position

    def copy(n: int, inside, at, length: int, back: bool):
        """The copy of `length` positions from `at` on, which lie at `inside` in a window, to the window or back."""
        if ring:
            at = jnp.where(at >= slots, at - slots, at)
        at, inside = (pl.ds(pl.multiple_of(x, tiles[n]), length) for x in (at, inside))
        here = in_hbm[n].at[scalars.layer[0], page, heads, at]
        pair = (windows[n].at[:, inside], here) if back else (here, windows[n].at[:, inside])
        return pltpu.make_async_copy(*pair, scratch.semaphores.at[n])

    def begin_of(n: int):
        return div(position, tiles[n]) * tiles[n]

    def ends(act: Callable) -> None:
        """Call act on the copies of the first and the last tile of each window."""
        for n, tile in enumerate(tiles):
            begin, length = begin_of(n), windows[n].shape[1]
            act(copy(n, 0, begin, tile, False))
            last = begin + length - tile
            pl.when(ring | (last < slots))(
                lambda n=n, tile=tile, length=length, last=last: act(copy(n, length - tile, last, tile, False))
            )

    def back(act: Callable) -> None:
        """Call act on the copies of the windows to the cache."""
        for n, tile in enumerate(tiles):
            begin, length = begin_of(n), windows[n].shape[1]
            fits = (begin + length <= slots) & (length <= slots)
            if length <= slots:
                pl.when(fits)(lambda n=n, begin=begin, length=length: act(copy(n, 0, begin, length, True)))

            def one(i, _, n=n, tile=tile, begin=begin):
                pl.when(ring | (begin + i * tile < slots))(lambda: act(copy(n, i * tile, begin + i * tile, tile, True)))

            lax.fori_loop(0, jnp.where(fits, 0, length // tile), one, None)

    def put_cells(n: int, head: int) -> None:
        """Put a head's cells in a window, between the old cells of its first and last tile."""
        tile, window = tiles[n], windows[n]
        x = new[n][:, head * size : (head + 1) * size].astype(jnp.float32)
        if count < arrays:
            x, scales = quantised(x, window.dtype)
            lane = lax.broadcasted_iota(jnp.int32, (min(tokens, LANES), LANES), 1)
            row = lax.broadcasted_iota(jnp.int32, lane.shape, 0)
            for at in range(0, tokens, LANES):  # from a column to a row
                diagonal = jnp.where(lane == row, scales[at : at + LANES], 0.0)
                scratch.scales[n, head : head + 1, at : at + LANES] = jnp.sum(diagonal, axis=0, keepdims=True)
        for part in range(size // LANES):
            scratch.rows[part, tile : tile + tokens] = x[:, part * LANES : (part + 1) * LANES]
        offset, length = position - begin_of(n), window.shape[1]
        rows = pl.ds(tile - offset, length)
        moved = jnp.concatenate([scratch.rows[part, rows] for part in range(size // LANES)], axis=1)

        def with_old(at):
            index = at + lax.broadcasted_iota(jnp.int32, (tile, size), 0)
            mine = (index >= offset) & (index < offset + tokens)
            return jnp.where(mine, moved[at : at + tile], window[head, at : at + tile].astype(jnp.float32))

        last = length - tile
        parts = [with_old(0), moved[tile:last], with_old(last)] if last > tile else [with_old(0), with_old(last)]
        window[head] = jnp.concatenate(parts).astype(window.dtype)

    def put_scales(n: int) -> None:
        window, scales = windows[count + n], scratch.scales[n]
        offset, length = position - begin_of(count + n), window.shape[1]
        rolled = [pltpu.roll(scales[:, at : at + LANES], offset, 1) for at in range(0, length - LANES, LANES)]
        lane = lax.broadcasted_iota(jnp.int32, (step_heads, LANES), 1)
        for at in range(0, length, LANES):
            before, after = rolled[max(at // LANES - 1, 0)], rolled[min(at // LANES, len(rolled) - 1)]
            mine = (at + lane >= offset) & (at + lane < offset + tokens)
            old = window[:, at : at + LANES]
            window[:, at : at + LANES] = jnp.where(mine, jnp.where(lane < offset, before, after), old)

    @pl.when((page >= 0) & (position < slots))
    def _():
        ends(lambda copy: copy.start())
        ends(lambda copy: copy.wait())
        for n in range(count):
            for head in range(step_heads):
                put_cells(n, head)
            if count < arrays:
                put_scales(n)
        back(lambda copy: copy.start())
        back(lambda copy: copy.wait())
