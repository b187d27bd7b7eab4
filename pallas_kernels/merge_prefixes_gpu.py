"""Merges what rows have for themselves with the prefixes that they share, on NVIDIA GPUs, in one launch.

XLA would take about ten launches a layer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import SharedPrefixes
from inferlib.pallas_kernels.decode_attention_gpu import MERGED, WARPS, power_of_two
from inferlib.pallas_kernels.lowered_once import call_lowered


class Prefixes(NamedTuple):
    """Prefixes of the rows of a page table [B, M], and which of the tiles' rows each row is, [B] int32 (see
    `SharedPrefixes.places`)."""

    shared: SharedPrefixes
    pages: jax.Array
    places: jax.Array


class Strides(NamedTuple):
    """How far apart are, in a list, the results of tiles, of KV heads, of a tile's rows, and of a KV head's queries."""

    tile: int
    kv_head: int
    row: int
    query: int


class PrefixShares(NamedTuple):
    """Attention of tiles of `width` rows to the prefixes, in U shares: outs [U, N, h] and lses [U, N] float32.

    strides and lse_strides: where the N results of a share lie. tiles [U] int32: whose prefix a share is of; None: each
    share is a part of all prefixes.
    """

    outs: jax.Array
    lses: jax.Array
    width: int
    strides: Strides
    lse_strides: Strides
    tiles: jax.Array | None = None


def merge_prefixes(
    shares: tuple[jax.Array, jax.Array], of_prefixes: PrefixShares, places: jax.Array, dtype, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Merge the rows' own shares, [S, B, K, G, h] and their lses [S, B, K, G], with those of their prefixes.

    places [B] int32: which of the tiles' rows each row is. Returns out [B, K, G, h] in `dtype`, lse [B, K, G] float32.
    """
    how = of_prefixes.width, (of_prefixes.strides, of_prefixes.lse_strides), jnp.dtype(dtype)
    of_tiles = of_prefixes.outs, of_prefixes.lses, of_prefixes.tiles
    return call_lowered(_merge, how, shares, of_tiles, places, interpret=interpret)


def _merge(
    width: int,
    strides: tuple[Strides, Strides],
    dtype,
    shares: tuple[jax.Array, jax.Array],
    of_tiles: tuple[jax.Array, jax.Array, jax.Array | None],
    places: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    (parts, lses), (outs, tile_lses, tiles) = shares, of_tiles
    (splits, rows, kv_heads, group, size), tile_splits = parts.shape, outs.shape[0]
    count = rows * kv_heads * group
    columns = min(power_of_two(size), max(MERGED // power_of_two(splits + tile_splits, 1), 16))
    kernel = functools.partial(
        _merge_kernel,
        columns=columns,
        heads=(kv_heads, group),
        width=width,
        strides=strides,
    )
    out, lse = pl.pallas_call(
        kernel,
        grid=(count, pl.cdiv(size, columns)),
        in_specs=[
            pl.BlockSpec((splits, None, size), lambda i, n: (0, i, 0)),
            pl.BlockSpec((splits, None), lambda i, n: (0, i)),
            pl.BlockSpec(),
            pl.BlockSpec(),
            pl.BlockSpec((rows,), lambda i, n: (0,)),
            None if tiles is None else pl.BlockSpec(),
        ],
        out_specs=[pl.BlockSpec((None, size), lambda i, n: (i, 0)), pl.BlockSpec((None,), lambda i, n: (i,))],
        out_shape=[jax.ShapeDtypeStruct((count, size), dtype), jax.ShapeDtypeStruct((count,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="merge_prefixes",
    )(
        parts.reshape(splits, count, size),
        lses.reshape(splits, count),
        outs,
        tile_lses,
        places,
        tiles,
    )
    return out.reshape(rows, kv_heads, group, size), lse.reshape(rows, kv_heads, group)


def _merge_kernel(
    parts_ref,
    lses_ref,
    tiles_ref,
    tile_lses_ref,
    places_ref,
    of_ref,
    out_ref,
    lse_ref,
    *,
    columns,
    heads,
    width,
    strides,
):
    """A tile of one query head's columns: parts_ref [S, h], lses_ref [S], tiles_ref [U, N, h], tile_lses_ref [U, N],
    places_ref [B], of_ref [U] or None, out_ref [h], lse_ref scalar. heads: K and G. strides: of tiles_ref and of
    tile_lses_ref."""
    (kv_heads, group), head = heads, pl.program_id(0)
    row, of_row = lax.div(head, kv_heads * group), lax.rem(head, kv_heads * group)
    place, count = plgpu.load(places_ref.at[row]), tile_lses_ref.shape[0]
    tile, shares = lax.div(place, width), jnp.arange(power_of_two(count, 1))
    if of_ref is None:
        tiles = tile_lses_ref.shape[1] // strides[0].tile
        mine, tile = (shares < count) & (tile < tiles), jnp.minimum(tile, tiles - 1)
    else:
        mine = plgpu.load(of_ref.at[shares], mask=shares < count, other=-1) == tile
    at_head = lax.div(of_row, group), lax.rem(place, width), lax.rem(of_row, group)
    at, lse_at = (_at(of, tile, *at_head) for of in strides)

    at_columns = pl.program_id(1) * columns + jnp.arange(columns)
    size = out_ref.shape[0]
    part = jnp.arange(power_of_two(lses_ref.shape[0], 1))
    lses = plgpu.load(lses_ref.at[part], mask=part < lses_ref.shape[0], other=-jnp.inf)
    tile_lses = plgpu.load(tile_lses_ref.at[shares, lse_at], mask=mine, other=-jnp.inf)
    top = jnp.maximum(lses.max(axis=0), tile_lses.max(axis=0))
    base = jnp.where(top > -jnp.inf, top, 0.0)
    weights, tile_weights = jnp.exp(lses - base), jnp.exp(tile_lses - base)
    total = weights.sum(axis=0) + tile_weights.sum(axis=0)
    total = jnp.where(total > 0, total, 1.0)  # an inactive row: weights 0, top -inf

    def weighted(ref, at, lses, weights):
        written = (lses > -jnp.inf)[:, None] & (at_columns < size)[None]
        parts = plgpu.load(ref.at[(*at, at_columns[None])], mask=written, other=0)
        return (parts.astype(jnp.float32) * weights[:, None]).sum(axis=0)

    out = weighted(parts_ref, (part[:, None],), lses, weights)
    out = (out + weighted(tiles_ref, (shares[:, None], at), tile_lses, tile_weights)) / total
    plgpu.store(out_ref.at[at_columns], out.astype(out_ref.dtype), mask=at_columns < size)
    plgpu.store(lse_ref, top + jnp.log(total))  # each tile stores the same values


def _at(strides: Strides, tile, kv_head, row, query):
    return tile * strides.tile + kv_head * strides.kv_head + row * strides.row + query * strides.query
