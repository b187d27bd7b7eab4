"""Decode attention of rows that share prefixes, on NVIDIA GPUs: rows' own positions, the prefixes, and one merge.

A prefix is attended to by the kernel of prefill attention on Hopper GPUs, and by that of decode attention elsewhere.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax

from inferlib.attention_values import MOST_STACKED, AttentionOptions, KvCache
from inferlib.pallas_kernels import cascade_attention_hopper_gpu as hopper
from inferlib.pallas_kernels.decode_attention_gpu import Launch, attend_shares
from inferlib.pallas_kernels.merge_prefixes_gpu import Prefixes, PrefixShares, Strides, merge_prefixes
from inferlib.pallas_kernels.row_cells_gpu import of_one_layer

# Stacked queries fill a program, so fewer are resident, and each of their shares leaves far more numbers to merge.
# (64 rows over 7680 positions, 8B, one H200, ms a step: 7.55 with 528 programs, 7.13 with 264, 6.98 with three stages;
# with 8 warps, other tiles or 128 stacked queries more.)
STACKED = Launch(resident=264, stages=3)


def cascade_attention(
    q: jax.Array,
    cache: KvCache,
    lengths: jax.Array,
    prefixes: Prefixes,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of rows to the positions that they do not share and, at the same time, to their prefixes.

    q [B, K, G, h]; cache and lengths [B]: of what rows do not share. Returns out [B, K, G, h] and lse [B, K, G]
    float32.
    """
    shares = attend_shares(q, of_one_layer(cache), lengths, options, options.sinks, interpret=interpret)
    without = AttentionOptions(options.scale, softcap=options.softcap)
    by_hopper = not interpret and hopper.unsupported(q, cache, prefixes, without) is None
    of_prefixes = hopper.attend_prefixes if by_hopper else functools.partial(_attend_prefixes, interpret=interpret)
    return merge_prefixes(shares, of_prefixes(q, cache, prefixes, without), prefixes.places, q.dtype, interpret)


def _attend_prefixes(
    q: jax.Array, cache: KvCache, prefixes: Prefixes, options: AttentionOptions, *, interpret: bool
) -> PrefixShares:
    (rows, kv_heads, group, size), page = q.shape, cache.k.shape[-2]
    shared = prefixes.shared.cut(max(1, MOST_STACKED // group), rows)
    of_tiles = of_one_layer(replace(cache, pages=shared.tables(prefixes.pages)))
    width = shared.members.shape[1]
    # The more tiles, the fewer shares may a tile have; but those that were cut are often empty behind their first part.
    launch = STACKED._replace(resident=STACKED.resident * (prefixes.shared.members.shape[1] // width))
    outs, lses = attend_shares(
        shared.stacked(q), of_tiles, shared.pages * page, options, interpret=interpret, launch=launch
    )
    splits = outs.shape[0]
    strides = Strides(kv_heads * width * group, width * group, group, 1)
    return PrefixShares(outs.reshape(splits, -1, size), lses.reshape(splits, -1), width, strides, strides)
