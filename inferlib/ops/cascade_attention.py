"""Decode attention of rows that share the pages of a prefix, which are read once for all of them.

The queries of the rows that share a prefix are stacked as if they were heads of one row, which ends where the prefix
does; or, on Hopper GPUs, as if they were tokens of a chunk. What a row has behind the prefix is attended to as if its
cache began there. Both results merge by their log-sum-exps. Nothing in a cell depends on where it lies, so the kernels
of attention do it all. (Zhu et al. 2024, "RelayAttention", https://arxiv.org/abs/2402.14808; Ye et al. 2024,
"ChunkAttention", https://arxiv.org/abs/2402.15220; called cascade attention in FlashInfer and vLLM.)
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from inferlib.attention_values import MOST_STACKED, AttentionOptions, KvCache, NewCells, SharedPrefixes
from inferlib.ops.attention import merge_attention
from inferlib.ops.decode_attention import decode_attention, write_new


def takes(cache: KvCache, options: AttentionOptions) -> bool:
    """True if a layer can read a shared prefix once: its rows have pages, and see all positions before their own."""
    return cache.pages is not None and not cache.ring and options.window is None


def cascade_attention(
    q: jax.Array,
    cache: KvCache,
    lengths: jax.Array,
    options: AttentionOptions,
    prefixes: SharedPrefixes,
    *,
    new: NewCells | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array, KvCache]:
    """`decode_attention` of one query a row, with the same arguments and results.

    q [B, K, G, h]; prefixes: of the B rows, each shorter than its rows' `lengths`.
    """
    rows, kv_heads, group, _ = q.shape
    pages, page = _required(cache.pages), cache.k.shape[-2]
    places = prefixes.places(lengths > 0)
    shared = jnp.repeat(prefixes.pages, prefixes.members.shape[1]).at[places].get(mode="fill", fill_value=0)
    columns = jnp.minimum(jnp.arange(pages.shape[1]) + shared[:, None], pages.shape[1] - 1)
    behind = replace(cache, pages=jnp.take_along_axis(pages, columns, axis=1))
    ends = lengths - shared * page
    if backend == "pallas_gpu":
        if new is not None:
            behind = write_new(behind, new, ends)
        from inferlib.pallas_kernels.cascade_attention_gpu import Prefixes
        from inferlib.pallas_kernels.cascade_attention_gpu import cascade_attention as kernels

        of_prefixes = Prefixes(prefixes, pages, places)
        out, lse = kernels(q, behind, ends, of_prefixes, options)
        return out, lse, cache.with_arrays(behind.arrays)

    prefixes = prefixes.cut(max(1, MOST_STACKED // group), rows)
    (tiles, width), tables = prefixes.members.shape, prefixes.tables(pages)
    queries = prefixes.stacked(q)
    out, lse, behind = decode_attention(q, behind, ends, options, new=new, backend=backend)
    cache = cache.with_arrays(behind.arrays)  # read from here on: a cache that is read later would be copied
    without_sinks = replace(options, sinks=None)
    prefix_ends = prefixes.pages * page
    of_prefix = decode_attention(queries, replace(cache, pages=tables), prefix_ends, without_sinks, backend=backend)
    apart = (jnp.moveaxis(x.reshape(tiles, kv_heads, width, group, *x.shape[3:]), 2, 1) for x in of_prefix[:2])
    outs, lses = (x.reshape(tiles * width, *x.shape[2:]) for x in apart)
    outs = outs.at[places].get(mode="fill", fill_value=0)
    lses = lses.at[places].get(mode="fill", fill_value=-jnp.inf)
    return *merge_attention(jnp.stack([out, outs]), jnp.stack([lse, lses])), cache


def _required(pages: jax.Array | None) -> jax.Array:
    if pages is None:
        raise ValueError("rows without pages share none")
    return pages
