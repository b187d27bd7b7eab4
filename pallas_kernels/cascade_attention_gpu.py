"""Decode attention of rows that share prefixes, on NVIDIA GPUs: `decode_attention_gpu` twice, and one merge of both.

Each kernel leaves the results of its shares. XLA would merge them in about ten launches a layer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.pallas_kernels.decode_attention_gpu import MERGED, WARPS, Launch, attend_shares, power_of_two
from inferlib.pallas_kernels.row_cells_gpu import of_one_layer

# Stacked queries fill a program, so fewer are resident, and each of their shares leaves far more numbers to merge.
# (64 rows over 7680 positions, 8B, one H200, ms a step: 7.55 with 528 programs, 7.13 with 264, 6.98 with three stages;
# with 8 warps, other tiles or 128 stacked queries more.)
STACKED = Launch(resident=264, stages=3)


class Queries(NamedTuple):
    """Queries [N, K, Q, h] of N rows of a cache, whose lengths are [N] int32."""

    queries: jax.Array
    cache: KvCache
    lengths: jax.Array


def cascade_attention(
    rows: Queries, stacked: Queries, places: jax.Array, options: AttentionOptions, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Attention of rows to the positions that they do not share and, at the same time, to their prefixes.

    rows: [B, K, G, h] queries. stacked: the queries [T, K, m * G, h] of m rows for each of T tiles. places [B] int32:
    which of the T * m stacked rows is row b; T * m or more: none. Returns out [B, K, G, h] and lse [B, K, G] float32.
    """
    q = rows.queries
    shares = attend_shares(q, of_one_layer(rows.cache), rows.lengths, options, options.sinks, interpret=interpret)
    without = AttentionOptions(options.scale, softcap=options.softcap)
    tiles = attend_shares(
        stacked.queries, of_one_layer(stacked.cache), stacked.lengths, without, interpret=interpret, launch=STACKED
    )
    return _merge(shares, tiles, places, q.dtype, interpret)


def _merge(shares, tiles, places: jax.Array, dtype, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """shares: [S, B, K, G, h] and lses [S, B, K, G]; tiles: [U, T, K, m * G, h] and lses [U, T, K, m * G]."""
    (parts, lses), (of_tiles, lses_of_tiles) = shares, tiles
    (splits, rows, kv_heads, group, size), tile_splits = parts.shape, of_tiles.shape[0]
    count = rows * kv_heads * group
    columns = min(power_of_two(size), max(MERGED // power_of_two(splits + tile_splits, 1), 16))
    kernel = functools.partial(
        _merge_kernel, columns=columns, heads=(kv_heads, group), stacked=of_tiles.shape[3] // group
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
        ],
        out_specs=[pl.BlockSpec((None, size), lambda i, n: (i, 0)), pl.BlockSpec((None,), lambda i, n: (i,))],
        out_shape=[jax.ShapeDtypeStruct((count, size), dtype), jax.ShapeDtypeStruct((count,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="merge_prefixes",
    )(
        parts.reshape(splits, count, size),
        lses.reshape(splits, count),
        of_tiles.reshape(tile_splits, -1, size),
        lses_of_tiles.reshape(tile_splits, -1),
        places,
    )
    return out.reshape(rows, kv_heads, group, size), lse.reshape(rows, kv_heads, group)


def _merge_kernel(
    parts_ref, lses_ref, tiles_ref, tile_lses_ref, places_ref, out_ref, lse_ref, *, columns, heads, stacked
):
    """A tile of one query head's columns: parts_ref [S, h], lses_ref [S], tiles_ref [U, T * K * m * G, h],
    tile_lses_ref [U, T * K * m * G], places_ref [B], out_ref [h], lse_ref scalar. stacked: m."""
    (kv_heads, group), head = heads, pl.program_id(0)
    row, of_row = lax.div(head, kv_heads * group), lax.rem(head, kv_heads * group)
    place, (count, queries) = plgpu.load(places_ref.at[row]), tile_lses_ref.shape
    there = place * kv_heads * group < queries
    # Stacked head (tile, KV head, row of the tile, head of its group).
    tile = lax.div(place, stacked) * kv_heads + lax.div(of_row, group)
    at = jnp.where(there, (tile * stacked + lax.rem(place, stacked)) * group + lax.rem(of_row, group), 0)

    at_columns = pl.program_id(1) * columns + jnp.arange(columns)
    size = out_ref.shape[0]
    part, tiles = jnp.arange(power_of_two(lses_ref.shape[0], 1)), jnp.arange(power_of_two(count, 1))
    lses = plgpu.load(lses_ref.at[part], mask=part < lses_ref.shape[0], other=-jnp.inf)
    tile_lses = plgpu.load(tile_lses_ref.at[tiles, at], mask=(tiles < count) & there, other=-jnp.inf)
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
    out = (out + weighted(tiles_ref, (tiles[:, None], at), tile_lses, tile_weights)) / total
    plgpu.store(out_ref.at[at_columns], out.astype(out_ref.dtype), mask=at_columns < size)
    plgpu.store(lse_ref, top + jnp.log(total))  # each tile stores the same values
