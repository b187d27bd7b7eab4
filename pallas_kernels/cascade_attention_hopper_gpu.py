"""Attention of rows to the prefixes that they share, on NVIDIA's Hopper GPUs: the kernel of prefill attention.

The rows that share a prefix are the tokens of a chunk, which all see the whole prefix. Prefixes are dealt to so many
chunks of about equal length that their programs keep the GPU busy; no program reads keys for fewer than 128 queries.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions, KvCache, Shaped, SharedPrefixes
from inferlib.pallas_kernels import prefill_attention_hopper_gpu as prefill
from inferlib.pallas_kernels.merge_prefixes_gpu import Prefixes, PrefixShares, Strides
from inferlib.pallas_kernels.prefill_attention_gpu import pages_of

_TRIED = 8  # sizes of chunks that are tried, from the least on


def unsupported(q: jax.Array, cache: KvCache, prefixes: Prefixes, options: AttentionOptions) -> str | None:
    """Why the kernel does not run the rows' queries [B, K, G, h]; None: it does."""
    if not prefill.is_hopper():
        return "GPUs that are not Hopper"
    return prefill.unsupported(_chunks(q, cache, prefixes.shared), cache, options)


def attend_prefixes(q: jax.Array, cache: KvCache, prefixes: Prefixes, options: AttentionOptions) -> PrefixShares:
    """Attention of the rows' queries q [B, K, G, h] to their prefixes, in a share for each chunk."""
    rows, kv_heads, group, size = q.shape
    queries = _chunks(q, cache, prefixes.shared)
    chunks, width, *_ = queries.shape
    members, pages = prefixes.shared.cut(width, rows)
    tiles, first, last = dealt(pages * (cache.k.shape[-2] // prefill.KEYS), chunks)
    of_chunks = jnp.minimum(members.at[tiles].get(mode="clip"), rows - 1)
    k, v, tables = pages_of(replace(cache, pages=prefixes.pages), of_chunks[:, 0])
    shape = prefill.Shape.of(queries, cache, splits=1)
    seen = prefill.Seen(*(jnp.broadcast_to(x[:, None], (chunks, width)) for x in (first, last)))
    outs, lses = prefill.attend_shares(shape, options.scale, q[of_chunks], k, v, tables, seen)
    heads = kv_heads * group
    return PrefixShares(
        outs.reshape(chunks, -1, size),
        lses.reshape(chunks, -1),
        width,
        Strides(0, group, heads, 1),
        Strides(0, group * width, 1, width),
        tiles,
    )


def dealt(blocks: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Deal prefixes of `blocks` [T] int32 to at least T chunks.

    Returns, of each chunk, the prefix (T: none) and its first and last position (0 and -1: none), int32 [chunks] each.
    """
    # Each prefix that is used has at most one chunk that is not full, so chunks of `most` blocks are enough.
    used, total = jnp.maximum(jnp.sum(blocks > 0), 1), jnp.sum(blocks)
    least, most = (jnp.maximum(_parts(total, n), 1) for n in (jnp.int32(chunks), chunks - used + 1))
    sizes = jnp.minimum(least + jnp.arange(_TRIED), most)
    enough = jnp.sum(_parts(blocks[:, None], sizes), axis=0) <= chunks
    size = jnp.min(jnp.where(enough, sizes, most))
    counts = _parts(blocks, size)
    ends, chunk = jnp.cumsum(counts), jnp.arange(chunks)
    tiles = jnp.sum(chunk[:, None] >= ends, axis=1)
    begin = (chunk - (ends - counts).at[tiles].get(mode="fill", fill_value=0)) * size
    end = jnp.minimum(begin + size, blocks.at[tiles].get(mode="fill", fill_value=0))
    some = tiles < blocks.size
    first, last = jnp.where(some, begin * prefill.KEYS, 0), jnp.where(some, end * prefill.KEYS - 1, -1)
    return tiles.astype(jnp.int32), first.astype(jnp.int32), last.astype(jnp.int32)


def _parts(total: jax.Array, size: jax.Array) -> jax.Array:
    """How many parts of `size` a total has, which is not negative: the quotient, rounded up."""
    total, size = jnp.broadcast_arrays(total, size)
    return lax.div(total + size - 1, size)


def _chunks(q: Shaped, cache: KvCache, shared: SharedPrefixes) -> jax.ShapeDtypeStruct:
    """The queries of the chunks, [W, m, K, G, h]: m rows fill a program with their queries of a KV head, or are all
    that a tile has; W is as large as keeps a GPU busy, and at least the number of tiles. Arrays may be shapes."""
    width = shared.cut_width(max(prefill.GROUPS * prefill.ROWS // q.shape[2], 1))
    one = prefill.Shape.of(jax.ShapeDtypeStruct((1, width, *q.shape[1:]), q.dtype), cache, splits=1)
    chunks = max(prefill.PROGRAMS // (one.kv_heads * one.shares * one.parts), shared.members.size // width)
    return jax.ShapeDtypeStruct((chunks, width, *q.shape[1:]), q.dtype)
